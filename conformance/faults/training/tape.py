"""Training with a fault on the tape of the NumPy arithmetic: what a backend that has it would report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.optimizers import Operations, Optimizer
from concord.conformance.bugs.tape import TapeOperations, Value
from concord.conformance.expectation import JudgedTraining
from concord.conformance.faults.training.fault import Change, Place, Site
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.precision import precision
from concord.spec.tape import Node, Values
from concord.spec.training.dropout import rate_of, sites
from concord.spec.training.optimizers import slots
from concord.spec.training.recipe import RATES
from concord.spec.training.trajectory import Observer, Trajectory, counts, rows_of

RIGHT = Change()
"""No fault at all."""


@dataclass
class Held:
    """A parameter that an update reads and replaces."""

    value: Value


class TapeUpdates(Operations):
    """What an update takes besides operators (:class:`concord.backends.optimizers.Operations`), on a tape."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.a = arithmetic

    def of(self, node: Node) -> Value:
        return Value(self.a, node)

    def value(self, variable: Held) -> Value:
        return variable.value

    def assign(self, variable: Held, value: Value) -> None:
        variable.value = value

    def zeros_like(self, tensor: Value) -> Value:
        return self.of(self.a.leaf(np.zeros(tensor.shape)))

    def square_root(self, tensor: Value) -> Value:
        return self.of(self.a.sqrt(tensor.tensor))

    def larger(self, left: Value, right: Value) -> Value:
        return self.of(self.a.larger(left.tensor, right.tensor))

    def bounded(self, tensor: Value, limit: float) -> Value:
        return self.of(self.a.bound(tensor.tensor, -limit, limit))

    def total(self, tensor: Value) -> Value:
        return self.of(self.a.sum(tensor.tensor))

    def chosen(self, which: NDArray[np.bool_], one: Value, other: Value) -> Value:
        return self.of(
            self.a.choose(which.reshape(len(which), *(1,) * (len(one.shape) - 1)), one.tensor, other.tensor)
        )


class FaultyTrajectory(Trajectory):
    """The oracle's training with a fault.

    Attributes:
        change: what the fault makes of the places of a step.
        resume: the step before which training stops and goes on from a checkpoint.
        known: gradients of batches that were computed before, for training of the same state; where they are given nothing is differentiated twice.
    """

    def __init__(
        self,
        case: JudgedTraining,
        arithmetic: Arithmetic,
        change: Change,
        resume: int = 0,
        known: dict[Any, Any] | None = None,
    ) -> None:
        self.change, self.resume, self.known = change, resume, known
        recipe = case.training.recipe
        training = replace(case.training, recipe=change.recipe(recipe)) if change.recipe else case.training
        weights = {name: precision(case.dtype).round(array) for name, array in case.weights.items()}
        super().__init__(
            case.config, weights, training, arithmetic, case.part, case.dtype, case.deviations, case.uncertain
        )
        self.updates = TapeUpdates(arithmetic)
        shortened = TapeOperations(arithmetic, case.dtype).rounded
        self.place = Place(self.updates, shortened, training.recipe, self.kinds)

    def values(self, nodes: Mapping[str, Node]) -> dict[str, Value]:
        return {name: self.updates.of(node) for name, node in nodes.items()}

    def nodes(self, values: Mapping[str, Value]) -> dict[str, Node]:
        return {name: self.node(value.tensor.value) for name, value in values.items()}

    # The places of a step.

    def step(self, window: Sequence[Batch], observer: Observer) -> None:
        self.place.step = self.steps
        if self.resume and self.steps == self.resume:
            self.restart()
        super().step(
            self.change.window(self.place, self.training.windows) if self.change.window else window, observer
        )

    def restart(self) -> None:
        """Go on from what was written down after the steps so far."""
        self.place.resumed = self.steps
        if self.change.load is None:
            return
        kept = {f"parameters.{name}": self.parameters[name] for name in self.trained} | self.optimizer.state
        found, steps = self.change.load(self.place, self.values(kept), self.optimizer.steps)
        nodes = self.nodes(found)
        self.parameters |= {name: nodes.pop(f"parameters.{name}") for name in self.trained}
        self.optimizer.state, self.known = nodes, None
        if steps != self.optimizer.steps:
            self.optimizer.steps, recipe = steps, self.training.recipe
            self.optimizer.powers = [
                self.optimizer.raised(self.optimizer.held(beta), steps)
                for beta in (recipe.beta1, recipe.beta2)
            ]

    def shares(self, window: Sequence[Batch]) -> list[float]:
        right = super().shares(window)
        return (
            self.change.shares(self.place, [counts(self.config, batch) for batch in window], right)
            if self.change.shares
            else right
        )

    def dropped(
        self, micro_batch: int, site: str, shape: tuple[int, ...]
    ) -> tuple[NDArray[np.bool_], float] | None:
        rate = rate_of(self.training.recipe, site)
        if not rate or self.change.masks is None:
            return super().dropped(micro_batch, site, shape)
        names = tuple(sites(self.config, self.part).values())
        return self.change.masks(
            self.place, Site(self.training.seed, self.steps, micro_batch, site, shape, rate, names)
        )

    def differentiated(self, batch: Batch, micro_batch: int, observer: Observer) -> dict[str, Values]:
        if self.known is None or self.change.masks:
            return super().differentiated(batch, micro_batch, observer)
        recipe = self.training.recipe
        key = (
            self.steps,
            micro_batch,
            id(batch),
            recipe.table_gradients,
            *(getattr(recipe, rate) for rate in RATES),
        )
        if key not in self.known:
            seen: dict[str, Values] = {}
            self.known[key] = (super().differentiated(batch, micro_batch, seen.__setitem__), seen)
        found, seen = self.known[key]
        for name, values in seen.items():
            observer(name, values)
        return dict(found)

    def added(
        self, total: Mapping[str, Values], piece: Mapping[str, Values], share: float
    ) -> dict[str, Values]:
        if self.change.added is None:
            return super().added(total, piece, share)
        so_far, more = (
            self.values({name: self.node(values) for name, values in given.items()})
            for given in (total, piece)
        )
        return {
            name: value.tensor.value
            for name, value in self.change.added(self.place, so_far, more, share).items()
        }

    def accumulated(
        self, window: Sequence[Batch], observer: Observer
    ) -> tuple[dict[str, Values], dict[str, list[Values]]]:
        total, slices = super().accumulated(window, observer)
        if self.change.gradients:
            made = self.change.gradients(
                self.place, self.values({name: self.node(values) for name, values in total.items()})
            )
            total = {name: made[name].tensor.value for name in total}
        return total, slices

    def limited(
        self, gradients: Mapping[str, Node], squares: Callable[[str], Node]
    ) -> tuple[dict[str, Node], Node | None]:
        if self.change.clip is None or self.training.recipe.clip_at is None:
            return super().limited(gradients, squares)
        found, norm = self.change.clip(
            self.place, self.values(gradients), lambda name: self.updates.of(squares(name))
        )
        return self.nodes(found), None if norm is None else norm.tensor

    def rate(self) -> float:
        return self.change.rate(self.place) if self.change.rate else super().rate()

    def update(self, gradients: Mapping[str, Node], window: Sequence[Batch]) -> None:
        if self.change.skips and self.change.skips(self.place, len(window)):
            return
        if self.change.optimizer is None:
            super().update(gradients, window)
        else:
            self.update_otherwise(self.change.optimizer, gradients, window)
        if self.change.keeps:
            self.optimizer.state = self.nodes(
                self.change.keeps(self.place, self.values(self.optimizer.state))
            )

    def update_otherwise(
        self, optimizer: type[Optimizer], gradients: Mapping[str, Node], window: Sequence[Batch]
    ) -> None:
        """Update every parameter by an optimizer with a bug."""
        recipe, held = (
            self.training.recipe,
            {name: Held(self.updates.of(self.parameters[name])) for name in self.trained},
        )
        rule, rows = optimizer(self.updates, recipe, held, self.kinds), {}
        kept = {
            f"{slot}.{name}": self.optimizer.slot(slot, name, self.parameters[name])
            for slot in slots(recipe)
            for name in self.trained
        }
        rule.resume(self.values(kept), self.optimizer.steps)
        for name, used in (
            rows_of(self.config, window, self.part).items() if recipe.table_updates == "lazy" else ()
        ):
            rows[name] = np.isin(np.arange(self.parameters[name].shape[0]), used)
        rule.step(
            self.values(gradients),
            rule.numbers(self.optimizer.steps, self.rate()),
            {name: rows[name] for name in rows if name in held},
        )
        self.parameters |= self.nodes({name: variable.value for name, variable in held.items()})
        self.optimizer.state, self.optimizer.steps = self.nodes(rule.state), self.optimizer.steps + 1


@dataclass(frozen=True)
class FaultyTraining(JudgedTraining):
    """What a run with a fault is asked to do.

    Attributes:
        change: what the fault makes of it.
        resume: the step before which training stops and goes on from a checkpoint.
        known: of :class:`FaultyTrajectory`.
    """

    change: Change = RIGHT
    resume: int = 0
    known: dict[Any, Any] | None = field(default=None, compare=False)

    def trajectory(self, arithmetic: Arithmetic) -> Trajectory:
        return FaultyTrajectory(self, arithmetic, self.change, self.resume, self.known)
