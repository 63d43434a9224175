"""A trainer with a bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.trainer import Tensor, Trainer
from concord.backends.update_rules import Optimizer
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import SIGNIFICANT_BITS
from concord.conformance.bugs.training.edited_step import Bugged, TrainingStep
from concord.spec.batch import Batch
from concord.spec.precision import round_to_bits
from concord.spec.training.reference_optimizer import moments

if TYPE_CHECKING:
    from concord.backends.session import FrameworkSession


class MutatedTrainer(Bugged, Trainer):
    """A trainer whose steps consist of methods that a bug may change.

    Args:
        session: a session for a request with the bug's recipe.
        rounding: the framework's operations.
    """

    optimizer: Optimizer

    def __init__(self, session: FrameworkSession, change: Change, rounding: Context) -> None:
        self.change, self.rounding, self.behind = change, rounding, 0
        super().__init__(session)

    @cached_property
    def place(self) -> TrainingStep:
        """The step that the bug changes."""
        return TrainingStep(self.operations, self.shortened, self.recipe, self.kinds)

    def shortened(self, tensor: Any, number_format: str) -> Any:
        if not isinstance(tensor, np.ndarray):
            return self.rounding.rounded(tensor, number_format)
        exact = tensor.astype(np.float64)
        return round_to_bits(exact, SIGNIFICANT_BITS[number_format]).astype(tensor.dtype)

    def updating(self) -> Optimizer:
        right = super().updating()
        if not self.change.places & {"optimizer", "keeps"}:
            return right
        # The framework's own optimizer cannot have the bug, so this optimizer consists of its operations.
        variables = self.variables(self.session.model)
        return self.change.optimizer(right.operations, self.recipe, variables, self.kinds)

    def load(self, state: Mapping[str, NDArray[np.floating]], step: int) -> None:
        sections = ("parameters", *moments(self.recipe))
        state = {name: array for name, array in state.items() if name.partition(".")[0] in sections}
        self.place.resumed = step
        state, count = self.change.load(self.place, (state, step)) if step else (state, step)
        self.behind = step - count
        super().load(state, step)

    def resume(self, kept: Mapping[str, Tensor], step: int) -> None:
        super().resume(kept, step - self.behind)

    def numbers(self) -> dict[str, float]:
        return self.optimizer.numbers(self.steps - self.behind, self.rate())

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, NDArray[Any]]:
        return super().step(self.begun(batches), report)
