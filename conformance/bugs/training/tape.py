"""Training with a bug on the tape of the NumPy arithmetic: what a backend that has it would report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.optimizers import Operations
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.tape import TapeOperations, Value
from concord.conformance.bugs.training.step import DropoutSite, TrainingStep
from concord.conformance.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch
from concord.spec.precision import precision
from concord.spec.tape import Node, Values
from concord.spec.training.dropout import sites
from concord.spec.training.optimizers import slots
from concord.spec.training.recipe import RATES
from concord.spec.training.trajectory import Observer, Trajectory, counts, rows_of


@dataclass
class Held:
    """A parameter that an update reads and replaces."""

    value: Value


def updates(a: Arithmetic) -> Operations:
    """Return what an update takes besides operators, on a tape."""
    value_of = partial(Value, a)
    return Operations(
        value=lambda held: held.value,
        assign=lambda held, value: setattr(held, "value", value),
        zeros_like=lambda tensor: value_of(a.leaf(np.zeros(tensor.shape))),
        square_root=lambda tensor: value_of(a.sqrt(tensor.tensor)),
        larger=lambda left, right: value_of(a.larger(left.tensor, right.tensor)),
        bounded=lambda tensor, limit: value_of(a.bound(tensor.tensor, -limit, limit)),
        total=lambda tensor: value_of(a.sum(tensor.tensor)),
        chosen=lambda which, one, other: value_of(a.choose(which, one.tensor, other.tensor)),
    )


class BuggedTrajectory(Trajectory):
    """The oracle's training with a bug.

    Attributes:
        change: what the bug makes of the places of a step.
        resume: the step before which training stops and goes on from a checkpoint.
        known: gradients of batches that were computed before, for training of the same state.
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
        training = replace(case.training, recipe=change.recipe(case.training.recipe))
        weights = {name: precision(case.dtype).round(array) for name, array in case.weights.items()}
        super().__init__(
            case.config, weights, training, arithmetic, case.part, case.dtype, case.deviations, case.uncertain
        )
        self.updates = updates(arithmetic)
        shortened = TapeOperations(arithmetic, case.dtype).rounded
        self.place = TrainingStep(self.updates, shortened, training.recipe, self.kinds)

    def tensors(self, values: Mapping[str, Values]) -> dict[str, Value]:
        return {name: Value(self.a, self.node(array)) for name, array in values.items()}

    def nodes(self, tensors: Mapping[str, Value]) -> dict[str, Node]:
        return {name: self.node(tensor.tensor.value) for name, tensor in tensors.items()}

    # The places of a step.

    def step(self, batches: Sequence[Batch], observer: Observer) -> None:
        self.place.number = self.steps
        if self.resume and self.steps == self.resume:
            self.restart()
        super().step(self.change.batches(self.place, batches, self.training.steps), observer)

    def restart(self) -> None:
        """Go on from what was written down after the steps so far."""
        self.place.resumed = self.steps
        if "load" not in self.change.places:
            return
        given = self.tensors(self.state()), self.optimizer.steps
        found, steps = self.change.load(self.place, given)
        nodes = self.nodes(found)
        self.parameters |= {name: nodes.pop(f"parameters.{name}") for name in self.trained}
        self.optimizer.state, self.known = nodes, None
        if steps != self.optimizer.steps:
            self.optimizer.steps, recipe = steps, self.training.recipe
            self.optimizer.powers = [
                self.optimizer.raised(self.optimizer.held(beta), steps)
                for beta in (recipe.beta1, recipe.beta2)
            ]

    def batch_weights(self, batches: Sequence[Batch]) -> list[float]:
        found: list[float] = self.change.weights(
            self.place, super().batch_weights(batches), [counts(self.config, batch) for batch in batches]
        )
        return found

    def dropped(
        self, micro_batch: int, site: str, shape: tuple[int, ...]
    ) -> tuple[NDArray[np.bool_], float] | None:
        right = super().dropped(micro_batch, site, shape)
        if right is None:
            return None
        names = tuple(sites(self.config, self.part).values())
        place = DropoutSite(self.training.seed, self.steps, micro_batch, site, shape, right[1], names)
        found: tuple[NDArray[np.bool_], float] = self.change.masks(self.place, right, place)
        return found

    def differentiated(self, batch: Batch, micro_batch: int, observer: Observer) -> dict[str, Values]:
        if self.known is None or "masks" in self.change.places:
            return super().differentiated(batch, micro_batch, observer)
        recipe = self.training.recipe
        rates = (getattr(recipe, rate) for rate in RATES)
        key = (self.steps, micro_batch, id(batch), recipe.embedding_gradients, *rates)
        if key not in self.known:
            seen: dict[str, Values] = {}
            self.known[key] = (super().differentiated(batch, micro_batch, seen.__setitem__), seen)
        found, seen = self.known[key]
        for name, values in seen.items():
            observer(name, values)
        return dict(found)

    def added(
        self, total: Mapping[str, Values], piece: Mapping[str, Values], weight: float
    ) -> dict[str, Values]:
        right = super().added(total, piece, weight)
        if "added" not in self.change.places:
            return right
        found = self.change.added(self.place, *map(self.tensors, (right, total, piece)), weight)
        return {name: tensor.tensor.value for name, tensor in found.items()}

    def accumulated(
        self, batches: Sequence[Batch], observer: Observer
    ) -> tuple[dict[str, Values], dict[str, list[Values]]]:
        total, slices = super().accumulated(batches, observer)
        if "gradients" in self.change.places:
            made = self.change.gradients(self.place, self.tensors(total))
            total = {name: made[name].tensor.value for name in total}
        return total, slices

    def limited(
        self, gradients: Mapping[str, Node], squares: Callable[[str], Node]
    ) -> tuple[dict[str, Node], Node | None]:
        limited, norm = super().limited(gradients, squares)
        if "clip" not in self.change.places or norm is None:
            return limited, norm
        of = partial(Value, self.a)
        scaled, given = ({name: of(node) for name, node in nodes.items()} for nodes in (limited, gradients))
        found, total = self.change.clip(self.place, (scaled, of(norm)), given, lambda name: of(squares(name)))
        return self.nodes(found), total.tensor

    def rate(self) -> float:
        return float(self.change.rate(self.place, super().rate()))

    def update(self, gradients: Mapping[str, Node], batches: Sequence[Batch]) -> None:
        if self.change.skips(self.place, False, len(batches)):
            return
        if "optimizer" in self.change.places:
            self.update_otherwise(gradients, batches)
        else:
            super().update(gradients, batches)
        if "keeps" in self.change.places:
            kept = {name: node.value for name, node in self.optimizer.state.items()}
            self.optimizer.state = self.nodes(self.change.keeps(self.place, self.tensors(kept)))

    def update_otherwise(self, gradients: Mapping[str, Node], batches: Sequence[Batch]) -> None:
        """Update every parameter by an optimizer with a bug."""
        of, oracle, recipe = partial(Value, self.a), self.optimizer, self.training.recipe
        held = {name: Held(of(self.parameters[name])) for name in self.trained}
        optimizer = self.change.optimizer(self.updates, recipe, held, self.kinds)
        kept = {
            f"{slot}.{name}": of(oracle.slot(slot, name, self.parameters[name]))
            for slot in slots(recipe)
            for name in self.trained
        }
        optimizer.resume(kept, oracle.steps)
        looked_up = rows_of(self.config, batches, self.part) if recipe.embedding_updates == "lazy" else {}
        rows = {
            name: np.isin(np.arange(self.parameters[name].shape[0]), used)[:, None]
            for name, used in looked_up.items()
            if name in held
        }
        optimizer.step(
            {name: of(node) for name, node in gradients.items()},
            optimizer.numbers(oracle.steps, self.rate()),
            rows,
        )
        self.parameters |= self.nodes({name: variable.value for name, variable in held.items()})
        oracle.state, oracle.steps = self.nodes(optimizer.state), oracle.steps + 1


@dataclass(frozen=True)
class BuggedTraining(JudgedTraining):
    """What a run with a bug is asked to do.

    Attributes:
        change: what the bug makes of it.
        resume: the step before which training stops and goes on from a checkpoint.
    """

    change: Change = field(default_factory=Change)
    resume: int = 0

    def trajectory(self, arithmetic: Arithmetic) -> Trajectory:
        return BuggedTrajectory(self, arithmetic, self.change, self.resume)
