"""Training with a bug on the NumPy tape, to predict a backend's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from concord.backends.update_rules import Operations, Optimizer
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.edited_model import TapeContext, Value
from concord.conformance.bugs.training.edited_step import Bugged, TrainingStep
from concord.conformance.judging.expectation import JudgedTraining
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Arrays, Ids
from concord.spec.batch import Batch
from concord.spec.precision import precision
from concord.spec.tape import Node
from concord.spec.training.reference_optimizer import ReferenceOptimizer, moments
from concord.spec.training.trajectory import Observer, Trajectory


@dataclass
class Held:
    """A parameter that an update reads and replaces."""

    value: Value


def updates(o: TapeContext) -> Operations:
    return Operations(
        value=lambda variable: variable.value,
        assign=lambda variable, value: setattr(variable, "value", value),
        zeros_like=lambda tensor: o.value(o.a.leaf(np.zeros(tensor.shape))),
        square_root=o.sqrt,
        larger=o.larger,
        bounded=lambda tensor, limit: o.bound(tensor, -limit, limit),
        total=o.sum,
        chosen=o.choose,
    )


class EditedOptimizer(ReferenceOptimizer):
    """An optimizer with a bug."""

    kind: type[Optimizer]
    operations: Operations

    def update(
        self,
        parameters: Mapping[str, Node],
        gradients: Mapping[str, Node],
        rate: float,
        rows: Mapping[str, Ids] | None = None,
    ) -> dict[str, Node]:
        wrap, lazy = partial(Value, self.a), self.recipe.embedding_updates == "lazy"
        variables = {name: Held(wrap(parameter)) for name, parameter in parameters.items()}
        optimizer = self.kind(self.operations, self.recipe, variables, self.kinds)
        state = {
            f"{moment}.{name}": wrap(self.moment(moment, name, parameter))
            for moment in moments(self.recipe)
            for name, parameter in parameters.items()
        }
        optimizer.resume(state, self.steps)
        optimizer.step(
            {name: wrap(gradient) for name, gradient in gradients.items()},
            optimizer.numbers(self.steps, rate),
            {
                name: np.isin(np.arange(parameters[name].shape[0]), used)[:, None]
                for name, used in (rows or {}).items()
                if lazy and name in variables
            },
        )
        self.state, self.steps = (
            {name: moment.tensor for name, moment in optimizer.state.items()},
            self.steps + 1,
        )
        return {name: variable.value.tensor for name, variable in variables.items()}


class BuggedTrajectory(Bugged, Trajectory):
    """The reference's training with a bug.

    Attributes:
        resume: step before which training resumes from a checkpoint.
        known: gradients of batches, cached by training state.
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
        tape = TapeContext(arithmetic, case.config, training.steps[0][0], case.part, case.dtype, {})
        self.place = TrainingStep(updates(tape), tape.rounded, training.recipe, self.kinds)
        if "optimizer" in change.places:
            self.optimizer = EditedOptimizer(arithmetic, training.recipe, self.kinds, self.optimizer.bits)
            self.optimizer.kind, self.optimizer.operations = change.optimizer, self.place.operations

    def value(self, tensor: Node | Array) -> Value:
        return Value(self.a, tensor if isinstance(tensor, Node) else self.node(tensor))

    def taken(self, tensor: Value, like: Node | Array) -> Node | Array:
        return tensor.tensor if isinstance(like, Node) else tensor.tensor.value

    def step(self, batches: Sequence[Batch], observer: Observer) -> None:
        if self.resume and self.steps == self.resume:
            self.restart()
        super().step(self.begun(batches), observer)

    def restart(self) -> None:
        self.place.resumed = self.steps
        if "load" in self.change.places:
            checkpoint, steps = self.change.load(
                self.place, (self.values(self.state()), self.optimizer.steps)
            )
            nodes = {name: self.node(tensor.tensor.value) for name, tensor in checkpoint.items()}
            self.parameters |= {name: nodes.pop(f"parameters.{name}") for name in self.trained}
            self.optimizer.load({}, steps)
            self.optimizer.state, self.known = nodes, None

    def differentiated(self, batch: Batch, number: int, observer: Observer) -> Arrays:
        if self.known is None:
            return super().differentiated(batch, number, observer)
        masks = [(tap, mask.tobytes(), rate) for tap, (mask, rate) in self.masked(batch, number).items()]
        key = (self.steps, id(batch), self.training.recipe.embedding_gradients, *masks)
        if key not in self.known:
            losses: list[Array] = []
            gradients = super().differentiated(batch, number, lambda name, loss: losses.append(loss))
            self.known[key] = batch, losses[0], gradients  # the stored batch keeps its id unique
        _, loss, gradients = self.known[key]
        observer(f"losses.{number}", loss)
        return dict(gradients)
