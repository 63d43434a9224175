"""Paddle's optimizer if it can compute a recipe, otherwise :mod:`concord.backends.update_rules`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from concord.backends.update_rules import Operations, Optimizer, groups
from concord.spec.training.recipe import Recipe

# Paddle's names for the moments.
MOMENTS = {
    "velocity_0": "momentum",
    "moment1_0": "first_moment",
    "moment2_0": "second_moment",
    "moment2_max_0": "largest_second_moment",
}


# Declared for Paddle's Adam, except in float64.
CONSTANTS = {
    "name": "optimizer_constant_bits",
    "value": 24,
    "reason": "Adam's kernel takes beta, 1 - beta and the powers of beta in float32",
}


OPERATIONS = Operations(
    lambda parameter: parameter.detach(),
    lambda parameter, value: parameter.set_value(value),
    paddle.zeros_like,
    paddle.sqrt,
    paddle.maximum,
    lambda tensor, limit: paddle.clip(tensor, min=-limit, max=limit),
    paddle.sum,
    paddle.where,
)


def own(recipe: Recipe, parameters: Any, undecayed: set[str]) -> paddle.optimizer.Optimizer | None:
    if recipe.embedding_updates == "lazy" or recipe.decay_form == "alone":
        return None
    rate, decoupled, double = (
        recipe.learning_rate,
        recipe.decay_form == "times_rate",
        parameters[0]["params"][0].dtype == paddle.float64,
    )
    if recipe.algorithm == "adam" and recipe.epsilon_placement == "corrected" and recipe.bias_correction:
        constants: dict[str, Any] = {
            "beta1": recipe.beta1,
            "beta2": recipe.beta2,
            "epsilon": recipe.epsilon,
            "amsgrad": recipe.amsgrad,
        }
        if not decoupled:
            return paddle.optimizer.Adam(rate, parameters=parameters, **constants)
        if not (double and recipe.weight_decay):  # the decay is stored in float32
            alone = [parameter for group in parameters for parameter in group["params"]]
            return paddle.optimizer.AdamW(
                rate,
                parameters=alone,
                weight_decay=recipe.weight_decay,
                apply_decay_param_fun=lambda name: name not in undecayed,
                **constants,
            )
    if decoupled or recipe.algorithm != "sgd":  # its RMSProp errs by more than rounding
        return None
    if not recipe.momentum:
        return paddle.optimizer.SGD(rate, parameters=parameters)
    if recipe.momentum_form == "velocity" and not (recipe.dampening or double):  # momentum is float32 too
        return paddle.optimizer.Momentum(
            rate, recipe.momentum, parameters=parameters, use_nesterov=recipe.nesterov
        )
    return None


class OwnOptimizer(Optimizer):
    """Paddle's optimizer."""

    def step(
        self, gradients: Mapping[str, Tensor], numbers: Mapping[str, float], rows: Mapping[str, Tensor]
    ) -> None:
        self.native.set_lr(numbers["rate"])
        for name, variable in self.variables.items():
            variable.grad = gradients[name]
        self.native.step()

    def kept(self) -> dict[str, Tensor]:
        names = {
            f"{variable.name}_{key}": f"{moment}.{name}"
            for name, variable in self.variables.items()
            for key, moment in MOMENTS.items()
        }
        return {names[key]: tensor for key, tensor in self.native.state_dict().items() if key in names}

    def resume(self, kept: Mapping[str, Tensor], steps: int) -> None:
        native_state = {
            f"{variable.name}_{key}": kept[f"{moment}.{name}"]
            for name, variable in self.variables.items()
            for key, moment in MOMENTS.items()
            if f"{moment}.{name}" in kept
        }
        if self.recipe.algorithm == "adam":
            for number, beta in enumerate((self.recipe.beta1, self.recipe.beta2), 1):
                native_state |= {
                    f"{variable.name}_beta{number}_pow_acc_0": _raised(beta, steps + 1, variable)
                    for variable in self.variables.values()
                }
        self.native.set_state_dict(native_state)


def _raised(beta: float, steps: int, variable: Tensor) -> Tensor:
    # One factor at a time, in the kernel's precision, as in Adam's kernel.
    kind = np.dtype("float64" if variable.dtype == paddle.float64 else "float32")
    return paddle.to_tensor(np.multiply.accumulate(np.full(steps, beta, kind))[-1:], place=variable.place)


def optimizer(recipe: Recipe, variables: Mapping[str, Tensor], kinds: Mapping[str, str]) -> Optimizer:
    undecayed = {variable.name for name, variable in variables.items() if kinds[name] in recipe.undecayed}
    native = own(recipe, groups(recipe, variables, kinds), undecayed)
    kind = Optimizer if native is None else OwnOptimizer
    rule = kind(OPERATIONS, recipe, variables, kinds, native)
    double = next(iter(variables.values())).dtype == paddle.float64
    if native is not None and recipe.algorithm == "adam" and not double:
        rule.known_deviations = (CONSTANTS,)
    return rule
