"""Optimizer updates for every recipe, shared by the four frameworks.

Operators are the same in all; other functions are in :class:`Operations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from concord.spec.training.recipe import Recipe
from concord.spec.training.reference_optimizer import clipped_together

Tensor = Any
Variable = Any


class Operations(NamedTuple):
    """Framework functions that an update needs, apart from operators."""

    value: Callable[[Variable], Tensor]  # the tensor of a parameter
    assign: Callable[[Variable, Tensor], object]
    zeros_like: Callable[[Tensor], Tensor]
    square_root: Callable[[Tensor], Tensor]
    larger: Callable[[Tensor, Tensor], Tensor]
    bounded: Callable[[Tensor, float], Tensor]  # clips to a limit in both directions
    total: Callable[[Tensor], Tensor]  # the sum of all elements
    chosen: Callable[[Tensor, Tensor, Tensor], Tensor]  # elementwise selection by a boolean tensor


class Optimizer:
    """An optimizer of a model's parameters (SPEC OPT-2 to OPT-8).

    Args:
        native: the framework's own optimizer, if it implements the recipe.

    Attributes:
        state: ``<moment>.<native name>``, or the native optimizer's state; an operand of compiled steps.
    """

    # Set if the framework's optimizer differs from the recipe (SPEC PRC-4).
    known_deviations: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self,
        operations: Operations,
        recipe: Recipe,
        variables: Mapping[str, Variable],
        kinds: Mapping[str, str],
        native: Any = None,
    ) -> None:
        self.operations, self.recipe, self.variables, self.kinds = operations, recipe, dict(variables), kinds
        self.native = native
        self.rule = {"sgd": self.sgd, "adam": self.adam, "rmsprop": self.rmsprop}[recipe.algorithm]
        self.state: Any = {}

    def corrections(self, step: int) -> tuple[float, float]:
        """Bias corrections of Adam's averages (SPEC OPT-3)."""
        recipe = self.recipe
        return (
            (1 - recipe.beta1 ** (step + 1), 1 - recipe.beta2 ** (step + 1))
            if recipe.bias_correction
            else (1.0, 1.0)
        )

    def numbers(self, step: int, rate: float) -> dict[str, float]:
        """Step-dependent operands of :meth:`step`."""
        # Computed on the host in float64: a compiled step takes them as operands, without recompilation.
        recipe, (first, second) = self.recipe, self.corrections(step)
        height = (
            rate * math.sqrt(second) / first if recipe.epsilon_placement == "uncorrected" else rate / first
        )
        decay = recipe.weight_decay * (rate if recipe.decay_form == "times_rate" else 1.0)
        return {
            "rate": rate,
            "decay": decay,
            "height": height,
            "root": math.sqrt(second),
            "damping": 1 - recipe.dampening if step else 1.0,
        }

    def step(
        self, gradients: Mapping[str, Tensor], numbers: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> None:
        """Update every parameter.

        Args:
            rows: masks (N, 1) of looked-up rows, by native name of lazily updated tables.
        """
        self.state = dict(self.state)  # a copy: while tracing, the old state belongs to the compiler
        for name, variable in self.variables.items():
            parameter, old_state = self.operations.value(variable), dict(self.state)
            updated = self.updated(name, parameter, gradients[name], numbers)
            if name in rows:
                for key in [key for key in self.state if key.partition(".")[2] == name]:  # OPT-8
                    self.state[key] = self.operations.chosen(rows[name], self.state[key], old_state[key])
                updated = self.operations.chosen(rows[name], updated, parameter)
            self.operations.assign(variable, updated)

    def kept(self) -> dict[str, Tensor]:
        """Moments as ``<moment>.<native name>``."""
        return dict(self.state)

    def resume(self, kept: Mapping[str, Tensor], steps: int) -> None:  # noqa: ARG002 - frameworks' own count
        """Resume with all moments after some steps."""
        self.state = dict(kept)

    def updated(
        self, name: str, parameter: Tensor, gradient: Tensor, numbers: Mapping[str, Tensor]
    ) -> Tensor:
        """Return a parameter after a step."""
        recipe = self.recipe
        if not recipe.weight_decay or self.kinds[name] in recipe.undecayed:
            return parameter - self.rule(name, gradient, numbers)
        if recipe.decay_form == "coupled":
            return parameter - self.rule(name, gradient + recipe.weight_decay * parameter, numbers)
        return parameter - numbers["decay"] * parameter - self.rule(name, gradient, numbers)

    # Each method returns the change of a parameter.

    def sgd(self, name: str, gradient: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """Gradient descent (SPEC OPT-2)."""
        return (
            self.with_momentum(name, gradient, numbers)
            if self.recipe.momentum
            else numbers["rate"] * gradient
        )

    def with_momentum(self, name: str, gradient: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """Apply momentum to a gradient, or to RMSProp's quotient (SPEC OPT-2)."""
        recipe, key, rate = self.recipe, f"momentum.{name}", numbers["rate"]
        if recipe.momentum_form == "displacement":
            displacement = self.state[key] = recipe.momentum * self.state[key] + rate * gradient
            return recipe.momentum * displacement + rate * gradient if recipe.nesterov else displacement
        damped = numbers["damping"] * gradient if recipe.dampening else gradient
        velocity = self.state[key] = recipe.momentum * self.state[key] + damped
        return rate * (gradient + recipe.momentum * velocity if recipe.nesterov else velocity)

    def average(self, moment: str, name: str, value: Tensor, beta: float) -> Tensor:
        """Update an exponential average."""
        key = f"{moment}.{name}"
        self.state[key] = beta * self.state[key] + (1 - beta) * value
        return self.state[key]

    def adam(self, name: str, gradient: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """Adam and AMSGrad (SPEC OPT-3, OPT-4)."""
        recipe = self.recipe
        first = self.average("first_moment", name, gradient, recipe.beta1)
        second = self.average("second_moment", name, gradient * gradient, recipe.beta2)
        if recipe.amsgrad:
            key = f"largest_second_moment.{name}"
            second = self.state[key] = self.operations.larger(self.state[key], second)
        return numbers["height"] * first / self.denominator(second, numbers)

    def denominator(self, second: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """Adam's denominator with epsilon (SPEC OPT-3)."""
        root = self.operations.square_root(second)
        return (
            root if self.recipe.epsilon_placement == "uncorrected" else root / numbers["root"]
        ) + self.recipe.epsilon

    def rmsprop(self, name: str, gradient: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """RMSProp (SPEC OPT-5)."""
        recipe, square_root = self.recipe, self.operations.square_root
        second = self.average("second_moment", name, gradient * gradient, recipe.beta2)
        if recipe.centered:
            first = self.average("first_moment", name, gradient, recipe.beta2)
            second = second - first * first
        inside = recipe.epsilon_placement == "inside"
        quotient = gradient / (
            square_root(second + recipe.epsilon) if inside else square_root(second) + recipe.epsilon
        )
        return self.with_momentum(name, quotient, numbers) if recipe.momentum else numbers["rate"] * quotient


def groups(
    recipe: Recipe, variables: Mapping[str, Variable], kinds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Parameter groups with and without decay."""
    decays = {name: kinds[name] not in recipe.undecayed for name in variables}
    return [
        {"params": params, "weight_decay": recipe.weight_decay if decayed else 0.0}
        for decayed in (True, False)
        if (params := [variables[name] for name in variables if decays[name] == decayed])
    ]


def clip(
    operations: Operations,
    recipe: Recipe,
    gradients: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    squares: Callable[[str], Tensor],
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Clip gradients (SPEC OPT-7).

    Args:
        squares: returns a gradient's contribution to the squared norm.

    Returns:
        Clipped gradients, and the global norm, if any.
    """
    limit = recipe.clip_at
    if limit is None:
        return dict(gradients), None
    if recipe.clipping == "value":
        return {name: operations.bounded(gradient, limit) for name, gradient in gradients.items()}, None
    clipped: dict[str, Tensor] = {}
    norm = None
    for names in clipped_together(recipe, list(gradients), kinds):
        norm = operations.square_root(sum(squares(name) for name in names))
        share = operations.bounded(limit / (norm + recipe.clip_epsilon), 1.0)
        clipped |= {name: gradients[name] * share for name in names}
    return clipped, norm if recipe.clipping == "global_norm" else None
