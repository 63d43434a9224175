"""PyTorch's optimizer if it can compute a recipe, otherwise :mod:`concord.backends.update_rules`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from concord.backends.update_rules import Operations, Optimizer, groups
from concord.spec.training.recipe import Recipe

# PyTorch's names for the moments of each algorithm.
MOMENTS = {
    "sgd": {"momentum": "momentum_buffer"},
    "adam": {
        "first_moment": "exp_avg",
        "second_moment": "exp_avg_sq",
        "largest_second_moment": "max_exp_avg_sq",
    },
    "rmsprop": {"second_moment": "square_avg", "first_moment": "grad_avg", "momentum": "momentum_buffer"},
}


OPERATIONS = Operations(
    lambda parameter: parameter.detach(),
    lambda parameter, value: parameter.detach().copy_(value),
    torch.zeros_like,
    torch.sqrt,
    torch.maximum,
    lambda tensor, limit: torch.clamp(tensor, min=-limit, max=limit),
    torch.sum,
    torch.where,
)


def own(recipe: Recipe, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    if recipe.embedding_updates == "lazy" or recipe.decay_form == "alone":
        return None
    decoupled = recipe.decay_form == "times_rate"
    if recipe.algorithm == "adam" and recipe.epsilon_placement == "corrected" and recipe.bias_correction:
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        return kind(
            parameters,
            lr=recipe.learning_rate,
            betas=(recipe.beta1, recipe.beta2),
            eps=recipe.epsilon,
            amsgrad=recipe.amsgrad,
            foreach=True,
        )
    if decoupled or (recipe.momentum and recipe.momentum_form == "displacement"):
        return None
    if recipe.algorithm == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=recipe.learning_rate,
            momentum=recipe.momentum,
            dampening=recipe.dampening,
            nesterov=recipe.nesterov,
            foreach=True,
        )
    if recipe.algorithm == "rmsprop" and recipe.epsilon_placement == "uncorrected":
        return torch.optim.RMSprop(
            parameters,
            lr=recipe.learning_rate,
            alpha=recipe.beta2,
            eps=recipe.epsilon,
            momentum=recipe.momentum,
            centered=recipe.centered,
            foreach=True,
        )
    return None


class OwnOptimizer(Optimizer):
    """PyTorch's optimizer."""

    def step(
        self, gradients: Mapping[str, Tensor], numbers: Mapping[str, float], rows: Mapping[str, Tensor]
    ) -> None:
        for group in self.native.param_groups:
            group["lr"] = numbers["rate"]
        for name, variable in self.variables.items():
            variable.grad = gradients[name]
        self.native.step()

    def kept(self) -> dict[str, Tensor]:
        states = {name: self.native.state[variable] for name, variable in self.variables.items()}
        return {
            f"{moment}.{name}": moments[key]
            for name, moments in states.items()
            for moment, key in MOMENTS[self.recipe.algorithm].items()
            if key in moments
        }

    def resume(self, kept: Mapping[str, Tensor], steps: int) -> None:
        self.native.state.clear()
        if steps == 0 and self.recipe.algorithm == "sgd":
            return  # SGD creates its buffer in the first step, which is not dampened
        counts = {} if self.recipe.algorithm == "sgd" else {"step": torch.tensor(float(steps))}
        for name, variable in self.variables.items():
            moments = {
                key: kept[f"{moment}.{name}"]
                for moment, key in MOMENTS[self.recipe.algorithm].items()
                if f"{moment}.{name}" in kept
            }
            self.native.state[variable] = {key: tensor.clone() for key, tensor in (counts | moments).items()}


def optimizer(recipe: Recipe, variables: Mapping[str, nn.Parameter], kinds: Mapping[str, str]) -> Optimizer:
    native = own(recipe, groups(recipe, variables, kinds))
    kind = Optimizer if native is None else OwnOptimizer
    return kind(OPERATIONS, recipe, variables, kinds, native)
