"""A trainer that has a bug on request: the places of a step are methods of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.optimizers import Optimizer
from concord.backends.trainer import Given, Tensor, Trainer
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, FrameworkOperations
from concord.conformance.bugs.training.step import DropoutSite, TrainingStep
from concord.spec.batch import Batch
from concord.spec.precision import round_to_bits
from concord.spec.training.dropout import sites
from concord.spec.training.optimizers import slots
from concord.spec.training.trajectory import counts

if TYPE_CHECKING:
    from concord.backends.session import FrameworkSession

Tensors = Mapping[str, Tensor]


class MutatedTrainer(Trainer):
    """A trainer with a bug.

    Args:
        session: of a request whose recipe is the bug's already.
        change: what the bug makes of the places of a step.
        rounding: the operations of the framework.
    """

    def __init__(self, session: FrameworkSession, change: Change, rounding: FrameworkOperations) -> None:
        self.change, self.rounding, self.behind, self.batches = change, rounding, 0, 0
        super().__init__(session)

    @cached_property
    def place(self) -> TrainingStep:
        """The step that the bug is at work in."""
        return TrainingStep(self.operations, self.shortened, self.recipe, self.kinds)

    def shortened(self, tensor: Any, number_format: str) -> Any:
        """Round a tensor, or an array that was written down, to a shorter format."""
        if not isinstance(tensor, np.ndarray):
            return self.rounding.rounded(tensor, number_format)
        exact = tensor.astype(np.float64)
        return round_to_bits(exact, SIGNIFICANT_BITS[number_format]).astype(tensor.dtype)

    def updating(self) -> Optimizer:
        right = super().updating()
        if not self.change.places & {"optimizer", "keeps"}:
            return right
        # Written out in the framework's operations, where its own optimizer cannot have the bug.
        variables = self.variables(self.session.model)
        return self.change.optimizer(right.operations, self.recipe, variables, self.kinds)

    def load(self, state: Mapping[str, NDArray[np.floating]], step: int) -> None:
        known = ("parameters", *slots(self.recipe))
        state = {name: array for name, array in state.items() if name.partition(".")[0] in known}
        self.place.resumed = step
        state, counted = self.change.load(self.place, (state, step)) if step else (state, step)
        self.behind = step - counted
        super().load(state, step)

    def resume(self, kept: Tensors, step: int) -> None:
        super().resume(kept, step - self.behind)

    def advance(self, batches: Sequence[Batch], report: bool) -> dict[str, NDArray[Any]]:
        self.place.number = self.steps
        batches = self.change.batches(self.place, batches, self.training.steps)
        self.batches = len(batches)
        return super().advance(batches, report)

    def batch_weights(self, batches: Sequence[Batch]) -> list[float]:
        counted = [counts(self.request.config, batch) for batch in batches]
        found: list[float] = self.change.weights(self.place, super().batch_weights(batches), counted)
        return found

    def numbers(self) -> dict[str, float]:
        return self.optimizer.numbers(self.steps - self.behind, self.rate())

    def rate(self) -> float:
        return float(self.change.rate(self.place, super().rate()))

    def dropped(self, number: int, site: str, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], float]:
        right = super().dropped(number, site, shape)
        names = tuple(sites(self.request.config, self.request.part).values())
        place = DropoutSite(self.training.seed, self.steps, number, site, shape, right[1], names)
        found: tuple[NDArray[np.bool_], float] = self.change.masks(self.place, right, place)
        return found

    def added(self, total: Tensors, piece: Tensors, weight: Tensor | None) -> dict[str, Tensor]:
        right, factor = super().added(total, piece, weight), 1.0 if weight is None else weight
        found: dict[str, Tensor] = self.change.added(self.place, right, total, piece, factor)
        return found

    def accumulated(
        self, model: Any, batches: Sequence[Given], numbers: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        total, seen, found = super().accumulated(model, batches, numbers)
        return self.change.gradients(self.place, total), seen, found

    def limited(
        self, gradients: Tensors, squares: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        found = super().limited(gradients, squares)
        if found[1] is not None:
            found = self.change.clip(self.place, found, gradients, squares)
        return found

    def update(self, gradients: Tensors, numbers: Tensors, rows: Tensors) -> None:
        if self.change.skips(self.place, False, self.batches):
            return
        super().update(gradients, numbers, rows)
        if "keeps" in self.change.places:
            self.optimizer.state = self.change.keeps(self.place, self.optimizer.state)
