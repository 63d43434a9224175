"""PyTorch's backend with a fault in its training.

One that shows at its third step alone, and one that is there before the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concord.backends.torch.backend import Adapter
from concord.backends.torch.optimizers import OwnOptimizer, optimizer
from concord.spec.training.recipe import Recipe


class Forgetful(OwnOptimizer):
    """Takes another epsilon at the height of the schedule."""

    def step(
        self, gradients: Mapping[str, Any], numbers: Mapping[str, float], rows: Mapping[str, Any]
    ) -> None:
        """Update every parameter."""
        for group in self.native.param_groups:
            group["eps"] = 1e-6 if numbers["rate"] == self.recipe.learning_rate else self.recipe.epsilon
        super().step(gradients, numbers, rows)


def forgetful(recipe: Recipe, variables: Mapping[str, Any], kinds: Mapping[str, str]) -> Forgetful:
    """Return such an optimizer."""
    made = optimizer(recipe, variables, kinds)
    assert isinstance(made, OwnOptimizer)
    return Forgetful(recipe, variables, kinds, made.native)


class Late(Adapter):
    """Its epsilon is another one at the height of the schedule."""

    name = "late"
    optimizer = staticmethod(forgetful)


class Decaying(Adapter):
    """Everything decays, gains and offsets too."""

    name = "decaying"
    optimizer = staticmethod(
        lambda recipe, variables, kinds: optimizer(recipe.replace(undecayed=()), variables, kinds)
    )
