"""A trainer that has a bug on request: the places of a step that the table of faults names are methods of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.optimizers import Optimizer
from concord.backends.trainer import Given, Tensor, Trainer
from concord.conformance.bugs.operations import SIGNIFICANT_BITS, FrameworkOperations
from concord.conformance.faults.training.fault import Change, Place, Site
from concord.spec.batch import Batch
from concord.spec.precision import round_to_bits
from concord.spec.training.dropout import rate_of, sites
from concord.spec.training.optimizers import slots
from concord.spec.training.trajectory import counts

if TYPE_CHECKING:
    from concord.backends.session import FrameworkSession

Tensors = Mapping[str, Tensor]


class MutatedTrainer(Trainer):
    """A trainer with a fault.

    Args:
        session: of a request whose recipe is the fault's already.
        change: what the fault makes of the places of a step.
        rounding: the operations of the framework.
    """

    def __init__(self, session: FrameworkSession, change: Change, rounding: FrameworkOperations) -> None:
        self.change, self.rounding, self.behind, self.batches = change, rounding, 0, 0
        super().__init__(session)

    @cached_property
    def place(self) -> Place:
        """Where the fault is at work."""
        return Place(self.operations, self.shortened, self.recipe, self.kinds)

    def shortened(self, tensor: Any, number_format: str) -> Any:
        """Round a tensor, or an array that was written down, to a shorter format."""
        if isinstance(tensor, np.ndarray):
            return round_to_bits(tensor.astype(np.float64), SIGNIFICANT_BITS[number_format]).astype(
                tensor.dtype
            )
        return self.rounding.rounded(tensor, number_format)

    def updating(self) -> Optimizer:
        change = self.change
        if change.optimizer is None and change.keeps is None:
            return super().updating()
        return self.written_out(change.optimizer or Optimizer)

    def written_out(self, optimizer: type[Optimizer]) -> Optimizer:
        """Return an optimizer in the framework's operations, where its own cannot have the fault."""
        return optimizer(
            super().updating().operations, self.recipe, self.variables(self.session.model), self.kinds
        )

    def load(self, state: Mapping[str, NDArray[np.floating]], step: int) -> None:
        known = ("parameters", *slots(self.recipe))
        state, counted = (
            {name: array for name, array in state.items() if name.partition(".")[0] in known},
            step,
        )
        self.place.resumed = step
        if self.change.load and step:
            state, counted = self.change.load(self.place, state, step)
        self.behind = step - counted
        super().load(state, step)

    def resume(self, kept: Tensors, step: int) -> None:
        super().resume(kept, step - self.behind)

    def advance(self, window: Sequence[Batch], report: bool) -> dict[str, NDArray[Any]]:
        self.place.step = self.steps
        window = self.change.window(self.place, self.training.windows) if self.change.window else window
        self.batches = len(window)
        return super().advance(window, report)

    def shares(self, window: Sequence[Batch]) -> list[float]:
        right = super().shares(window)
        return (
            self.change.shares(self.place, [counts(self.request.config, batch) for batch in window], right)
            if self.change.shares
            else right
        )

    def numbers(self) -> dict[str, float]:
        return self.optimizer.numbers(self.steps - self.behind, self.rate())

    def rate(self) -> float:
        return self.change.rate(self.place) if self.change.rate else super().rate()

    def dropped(self, number: int, site: str, shape: tuple[int, ...]) -> tuple[NDArray[np.bool_], float]:
        if self.change.masks is None:
            return super().dropped(number, site, shape)
        names = tuple(sites(self.request.config, self.request.part).values())
        return self.change.masks(
            self.place,
            Site(self.training.seed, self.steps, number, site, shape, rate_of(self.recipe, site), names),
        )

    def added(self, total: Tensors, piece: Tensors, share: Tensor | None) -> dict[str, Tensor]:
        if self.change.added is None:
            return super().added(total, piece, share)
        return self.change.added(self.place, total, piece, 1.0 if share is None else share)

    def accumulated(
        self, model: Any, window: Sequence[Given], numbers: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        total, seen, found = super().accumulated(model, window, numbers)
        return self.change.gradients(self.place, total) if self.change.gradients else total, seen, found

    def limited(
        self, gradients: Tensors, squares: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        if self.change.clip is None or self.recipe.clip_at is None:
            return super().limited(gradients, squares)
        return self.change.clip(self.place, gradients, squares)

    def update(self, gradients: Tensors, numbers: Tensors, rows: Tensors) -> None:
        if self.change.skips and self.change.skips(self.place, self.batches):
            return
        super().update(gradients, numbers, rows)
        if self.change.keeps:
            self.optimizer.state = self.change.keeps(self.place, self.optimizer.state)
