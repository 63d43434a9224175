"""An optimizer step in any arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Ids
from concord.spec.precision import round_to_bits
from concord.spec.tape import Node
from concord.spec.training.recipe import Recipe

Nodes = Mapping[str, Node]

MOMENTS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum",),
    "adam": ("first_moment", "second_moment", "largest_second_moment"),
    "rmsprop": ("second_moment", "first_moment", "momentum"),
}
"""Moments that each algorithm may keep; :func:`moments` returns those of a recipe."""


def moments(recipe: Recipe) -> tuple[str, ...]:
    """Moments of a recipe, which start at zero."""
    conditions = {
        "momentum": recipe.momentum > 0,
        "first_moment": recipe.algorithm == "adam" or recipe.centered,
        "second_moment": True,
        "largest_second_moment": recipe.amsgrad,
    }
    return tuple(moment for moment in MOMENTS[recipe.algorithm] if conditions[moment])


class ReferenceOptimizer:
    """The optimizer in any arithmetic (SPEC OPT-2 to OPT-6, OPT-8).

    Args:
        kinds: parameter kinds by name, which determine decay.
        bits: significant bits of the recipe's constants, if the framework rounds them.
    """

    def __init__(
        self, arithmetic: Arithmetic, recipe: Recipe, kinds: Mapping[str, str], bits: int | None = None
    ) -> None:
        self.a, self.recipe, self.kinds, self.bits = arithmetic, recipe, kinds, bits
        self.state: dict[str, Node] = {}
        self.steps = 0
        self.powers = [self.scalar(1.0), self.scalar(1.0)]

    def load(self, state: Mapping[str, Array], steps: int) -> None:
        """Resume after some steps.

        Args:
            state: ``<moment>.<parameter>``; missing moments are zero.
        """
        self.state = {name: self.a.leaf(values) for name, values in state.items()}
        self.steps = steps
        self.powers = [self.raised(self.held(beta), steps) for beta in (self.recipe.beta1, self.recipe.beta2)]

    def raised(self, beta: float, steps: int) -> Node:
        """Return a power of beta."""
        # Step-by-step multiplication, as in three of four frameworks, errs by the root of the number of
        # products (decision 0023).
        return Node(self.a.settle(self.scalar(beta).value ** steps, 2 * math.sqrt(steps)), (), taped=False)

    def scalar(self, value: float) -> Node:
        """Return a value as a tensor."""
        return self.a.leaf(np.asarray(value))

    def held(self, constant: float) -> float:
        """Round a constant as the framework does (SPEC PRC-4)."""
        return constant if self.bits is None else float(round_to_bits(np.asarray(constant), self.bits))

    def update(
        self,
        parameters: Nodes,
        gradients: Nodes,
        rate: float,
        rows: Mapping[str, Ids] | None = None,
    ) -> dict[str, Node]:
        """Parameters after one step.

        Args:
            rows: looked-up table rows, the only ones that lazy updates change.
        """
        self.steps += 1
        self.powers = [
            self.power(power, self.held(beta))
            for power, beta in zip(self.powers, (self.recipe.beta1, self.recipe.beta2), strict=True)
        ]
        return {
            name: self.updated(name, parameters[name], gradient, rate, (rows or {}).get(name))
            for name, gradient in gradients.items()
        }

    def power(self, power: Node, beta: float) -> Node:
        """Next power of beta."""
        if self.bits is None:
            return self.a.scale(power, beta)
        # TF1 stores the powers as float32, whatever the run's precision (decision 0023).
        return self.scalar(self.held(float(power.value.reshape(-1)[0]) * beta))

    def updated(self, name: str, parameter: Node, gradient: Node, rate: float, rows: Ids | None) -> Node:
        """Update a parameter, except rows that were not looked up (SPEC OPT-8)."""
        before = {moment: self.moment(moment, name, parameter) for moment in moments(self.recipe)}
        after = self.stepped(name, parameter, gradient, rate)
        if self.recipe.embedding_updates == "lazy" and rows is not None:  # OPT-8
            touched = np.zeros((parameter.shape[0], *(1,) * (len(parameter.shape) - 1)), bool)
            touched[rows] = True
            self.state |= {
                f"{moment}.{name}": self.a.choose(touched, self.state[f"{moment}.{name}"], old)
                for moment, old in before.items()
            }
            after = self.a.choose(touched, after, parameter)
        return after

    def stepped(self, name: str, parameter: Node, gradient: Node, rate: float) -> Node:
        """Update all rows of a parameter."""
        a, recipe = self.a, self.recipe
        decays = recipe.weight_decay > 0 and self.kinds[name] not in recipe.undecayed
        if decays and recipe.decay_form == "coupled":
            gradient = a.add(gradient, a.scale(parameter, self.held(recipe.weight_decay)))
        direct = {"sgd": self.sgd, "adam": self.adam, "rmsprop": self.rmsprop}[recipe.algorithm]
        if decays and recipe.decay_form in ("times_rate", "alone"):
            share = recipe.weight_decay * (rate if recipe.decay_form == "times_rate" else 1.0)
            # Both forms are correct, but a product drifts where every step rounds it in the same direction,
            # for example just above a power of two. Low-precision runs must use both forms (SPEC OPT-6).
            decayed = (
                a.scale(parameter, 1 - share)
                if a.closed
                else a.subtract(parameter, a.scale(parameter, share))
            )
        else:
            decayed = parameter
        return a.subtract(decayed, direct(name, gradient, rate))

    def moment(self, moment: str, name: str, like: Node) -> Node:
        """A moment, initially zero."""
        if f"{moment}.{name}" not in self.state:
            self.state[f"{moment}.{name}"] = self.a.leaf(np.zeros(like.shape))
        return self.state[f"{moment}.{name}"]

    # Each method returns the change of a parameter.

    def sgd(self, name: str, gradient: Node, rate: float) -> Node:
        """Gradient descent (SPEC OPT-2)."""
        if not self.recipe.momentum:
            return self.a.scale(gradient, rate)
        return self.with_momentum(name, gradient, rate)

    def with_momentum(self, name: str, gradient: Node, rate: float) -> Node:
        """Apply momentum to a gradient, or to RMSProp's quotient (SPEC OPT-2)."""
        a, recipe, factor = self.a, self.recipe, self.held(self.recipe.momentum)
        momentum = self.moment("momentum", name, gradient)
        if recipe.momentum_form == "displacement":
            displacement = a.add(a.scale(momentum, factor), a.scale(gradient, rate))
            self.state[f"momentum.{name}"] = displacement
            return (
                a.add(a.scale(displacement, factor), a.scale(gradient, rate))
                if recipe.nesterov
                else displacement
            )
        # PyTorch's dampening begins with the second step (SPEC OPT-2).
        damped = a.scale(gradient, 1 - recipe.dampening) if recipe.dampening and self.steps > 1 else gradient
        velocity = a.add(a.scale(momentum, factor), damped)
        self.state[f"momentum.{name}"] = velocity
        return a.scale(a.add(gradient, a.scale(velocity, factor)) if recipe.nesterov else velocity, rate)

    def average(self, moment: str, name: str, value: Node, beta: float) -> Node:
        """Update an exponential average."""
        a, beta = self.a, self.held(beta)
        average = a.add(a.scale(self.moment(moment, name, value), beta), a.scale(value, 1 - beta))
        self.state[f"{moment}.{name}"] = average
        return average

    def adam(self, name: str, gradient: Node, rate: float) -> Node:
        """Adam and AMSGrad (SPEC OPT-3, OPT-4)."""
        a, recipe = self.a, self.recipe
        first = self.average("first_moment", name, gradient, recipe.beta1)
        second = self.average("second_moment", name, a.multiply(gradient, gradient), recipe.beta2)
        if recipe.amsgrad:
            second = self.state[f"largest_second_moment.{name}"] = a.larger(
                self.moment("largest_second_moment", name, second), second
            )
        root, epsilon = a.sqrt(second), self.held(recipe.epsilon)
        if not recipe.bias_correction:
            return a.scale(a.divide(first, a.shift(root, epsilon)), rate)
        correction1, correction2 = (a.shift(a.scale(power, -1.0), 1.0) for power in self.powers)
        # Epsilon's placement determines the step for tiny gradients, so both forms are computed literally.
        if recipe.epsilon_placement == "uncorrected":
            height = a.divide(a.scale(a.sqrt(correction2), rate), correction1)
            return a.divide(a.multiply(first, height), a.shift(root, epsilon))
        return a.scale(
            a.divide(a.divide(first, correction1), a.shift(a.divide(root, a.sqrt(correction2)), epsilon)),
            rate,
        )

    def rmsprop(self, name: str, gradient: Node, rate: float) -> Node:
        """RMSProp (SPEC OPT-5)."""
        a, recipe = self.a, self.recipe
        second = self.average("second_moment", name, a.multiply(gradient, gradient), recipe.beta2)
        if recipe.centered:
            first = self.average("first_moment", name, gradient, recipe.beta2)
            second = a.subtract(second, a.multiply(first, first))
        epsilon = self.held(recipe.epsilon)
        inside = recipe.epsilon_placement == "inside"
        quotient = a.divide(
            gradient, a.sqrt(a.shift(second, epsilon)) if inside else a.shift(a.sqrt(second), epsilon)
        )
        return self.with_momentum(name, quotient, rate) if recipe.momentum else a.scale(quotient, rate)


def clipped(
    arithmetic: Arithmetic,
    recipe: Recipe,
    gradients: Nodes,
    squares: Callable[[str], Node] | None = None,
    kinds: Mapping[str, str] | None = None,
    norm: Array | None = None,
) -> tuple[dict[str, Node], Node | None]:
    """Clip gradients; return them and the global norm, if any (SPEC OPT-7).

    Args:
        squares: returns a gradient's sum of squares for the norm; by default its own.
        norm: a run's norm, to clip by instead.
    """
    a, limit = arithmetic, recipe.clip_at
    if limit is None:
        return dict(gradients), None
    if recipe.clipping == "value":
        return {name: a.bound(gradient, -limit, limit) for name, gradient in gradients.items()}, None

    def own(name: str) -> Node:
        return a.sum(a.multiply(gradients[name], gradients[name]))

    square_sums = {name: (squares or own)(name) for name in gradients}
    groups = clipped_together(recipe, list(gradients), kinds or {})
    scaled: dict[str, Node] = {}
    together = recipe.clipping == "global_norm"
    for names in groups:
        total = square_sums[names[0]]
        for name in names[1:]:
            total = a.add(total, square_sums[name])
        # Frameworks may sum all squares in one pass, in a different order than per tensor (SPEC ALG-7).
        total = a.vary_total(total, [gradients[name] for name in names])
        own_norm = a.sqrt(total)
        used = a.override(own_norm, norm) if together and norm is not None else own_norm
        share = a.bound(
            a.divide(a.leaf(np.asarray(limit)), a.shift(used, recipe.clip_epsilon)), -math.inf, 1.0
        )
        scaled |= {name: a.multiply(gradients[name], share) for name in names}
    return {name: scaled[name] for name in gradients}, own_norm if together else None


def clipped_together(recipe: Recipe, names: Sequence[str], kinds: Mapping[str, str]) -> list[list[str]]:
    """Groups of gradients that share a norm (SPEC OPT-7)."""
    if recipe.clipping == "global_norm":
        return [list(names)]
    if recipe.clipping == "tensor_norm":
        return [[name] for name in names]
    alike: dict[bool, list[str]] = {}
    for name in names:
        alike.setdefault(kinds.get(name) in recipe.undecayed, []).append(name)
    return list(alike.values())


def batch_weights(recipe: Recipe, counts: list[tuple[int, int]]) -> list[float]:
    """Weight of each batch's gradient, from its numbers of samples and counted labels (SPEC OPT-10)."""
    if recipe.accumulation_mean == "configured":
        return [1 / recipe.accumulation] * len(counts)
    weights = {
        "batches": [1] * len(counts),
        "samples": [n for n, _ in counts],
        "labels": [n for _, n in counts],
    }[recipe.accumulation_mean]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
