"""PyTorch's backend with a fault in its training.

One that shows at its third step alone, and one that is there before the first.
"""

from concord.backends.torch.backend import Adapter
from concord.backends.torch.optimizers import OwnOptimizer, optimizer


class Forgetful(OwnOptimizer):
    """Takes another epsilon at the height of the schedule."""

    def step(self, gradients, numbers, rows):
        """Update every parameter."""
        for group in self.native.param_groups:
            group["eps"] = 1e-6 if numbers["rate"] == self.recipe.learning_rate else self.recipe.epsilon
        super().step(gradients, numbers, rows)


def forgetful(recipe, variables, kinds):
    """Return such an optimizer."""
    made = optimizer(recipe, variables, kinds)
    assert isinstance(made, OwnOptimizer)
    return Forgetful(made.operations, recipe, variables, kinds, made.native)


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
