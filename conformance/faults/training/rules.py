"""Optimizers with a bug: each is the optimizer that is written out for the four frameworks, but for one step."""

from __future__ import annotations

from collections.abc import Mapping

from concord.backends.optimizers import Optimizer, Tensor
from concord.spec.training.schedules import learning_rate

Numbers = Mapping[str, Tensor]


class EpsilonInside(Optimizer):
    def denominator(self, second: Tensor, numbers: Numbers) -> Tensor:
        return self.operations.square_root(second / (numbers["root"] * numbers["root"]) + self.recipe.epsilon)


class StepAhead(Optimizer):
    def corrections(self, step: int) -> tuple[float, float]:
        return super().corrections(step + 1)


class ConstantCorrection(Optimizer):
    def corrections(self, step: int) -> tuple[float, float]:
        return super().corrections(0)


class FirstUncorrected(Optimizer):
    def corrections(self, step: int) -> tuple[float, float]:
        return 1.0, super().corrections(step)[1]


class SecondUncorrected(Optimizer):
    def corrections(self, step: int) -> tuple[float, float]:
        return super().corrections(step)[0], 1.0


class CorrectionWithoutRoot(Optimizer):
    def numbers(self, step: int, rate: float | None = None) -> dict[str, float]:
        found, (one, two) = super().numbers(step, rate), self.corrections(step)
        uncorrected = self.recipe.epsilon_placement == "uncorrected"
        return found | {"root": two, "height": found["rate"] * (two if uncorrected else 1.0) / one}


class CorrectedInPlace(Optimizer):
    def numbers(self, step: int, rate: float | None = None) -> dict[str, float]:
        one, two = self.corrections(step)
        found = super().numbers(step, rate)
        return found | {"height": found["rate"], "root": 1.0, "one": one, "two": two}

    def adam(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        super().adam(name, gradient, numbers)
        for slot, correction in (("first_moment", "one"), ("second_moment", "two")):
            self.state[f"{slot}.{name}"] = self.state[f"{slot}.{name}"] / numbers[correction]
        return (
            numbers["height"]
            * self.state[f"first_moment.{name}"]
            / self.denominator(self.state[f"second_moment.{name}"], numbers)
        )


class FirstUnweighted(Optimizer):
    def average(self, slot: str, name: str, value: Tensor, beta: float) -> Tensor:
        return super().average(slot, name, value / (1 - beta) if slot == "first_moment" else value, beta)


class SecondOfFirst(Optimizer):
    def average(self, slot: str, name: str, value: Tensor, beta: float) -> Tensor:
        if slot == "second_moment" and f"first_moment.{name}" in self.state:
            value = self.state[f"first_moment.{name}"] * self.state[f"first_moment.{name}"]
        return super().average(slot, name, value, beta)


class AverageReversed(Optimizer):
    def average(self, slot: str, name: str, value: Tensor, beta: float) -> Tensor:
        return super().average(slot, name, value, 1 - beta)


class GradientInsteadOfFirst(Optimizer):
    def adam(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        super().adam(name, gradient, numbers)
        slot = "largest_second_moment" if self.recipe.amsgrad else "second_moment"
        return numbers["height"] * gradient / self.denominator(self.state[f"{slot}.{name}"], numbers)


class LargestOfCorrected(Optimizer):
    def adam(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        key, two = f"largest_second_moment.{name}", numbers["root"] * numbers["root"]
        before = self.state.get(key)
        moved = super().adam(name, gradient, numbers)
        if before is None:
            return moved
        self.state[key] = self.operations.larger(before, self.state[f"second_moment.{name}"] / two)
        return (
            numbers["height"]
            * self.state[f"first_moment.{name}"]
            / self.denominator(self.state[key] * two, numbers)
        )


class LargestInPlace(Optimizer):
    def adam(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        moved, key = super().adam(name, gradient, numbers), f"largest_second_moment.{name}"
        if key in self.state:
            self.state[f"second_moment.{name}"] = self.state[key]
        return moved


class LargestUnused(Optimizer):
    def adam(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        super().adam(name, gradient, numbers)
        return (
            numbers["height"]
            * self.state[f"first_moment.{name}"]
            / self.denominator(self.state[f"second_moment.{name}"], numbers)
        )


class BeforeItsSquare(Optimizer):
    def rmsprop(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        before = self.state[f"second_moment.{name}"]
        self.average("second_moment", name, gradient * gradient, self.recipe.beta2)
        moved = gradient / (self.operations.square_root(before) + self.recipe.epsilon)
        return self.with_momentum(name, moved, numbers) if self.recipe.momentum else numbers["rate"] * moved


class DampenedFirst(Optimizer):
    def numbers(self, step: int, rate: float | None = None) -> dict[str, float]:
        return super().numbers(step, rate) | {"damping": 1 - self.recipe.dampening}


class NesterovBehind(Optimizer):
    def with_momentum(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        before, recipe, rate = self.state[f"momentum.{name}"], self.recipe, numbers["rate"]
        moved = super().with_momentum(name, gradient, numbers)
        if not recipe.nesterov:
            return moved
        inside = recipe.momentum_form == "displacement"
        return (
            recipe.momentum * before + rate * gradient
            if inside
            else rate * (gradient + recipe.momentum * before)
        )


class NesterovWithoutGradient(Optimizer):
    def with_momentum(self, name: str, gradient: Tensor, numbers: Numbers) -> Tensor:
        moved = super().with_momentum(name, gradient, numbers)
        if not self.recipe.nesterov:
            return moved
        looked = self.recipe.momentum * self.state[f"momentum.{name}"]
        return looked if self.recipe.momentum_form == "displacement" else numbers["rate"] * looked


class MadeAnew(Optimizer):
    def numbers(self, step: int, rate: float | None = None) -> dict[str, float]:
        return super().numbers(0, learning_rate(self.recipe, step) if rate is None else rate)

    def step(self, gradients: Mapping[str, Tensor], numbers: Numbers, rows: Mapping[str, Tensor]) -> None:
        self.state = {name: self.operations.zeros_like(tensor) for name, tensor in self.state.items()}
        super().step(gradients, numbers, rows)


class Decaying(Optimizer):
    """Decoupled decay in the steps that it may go wrong in (SPEC OPT-6)."""

    def updated(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Numbers) -> Tensor:
        if not self.decays(name) or self.recipe.decay_form == "coupled":
            return super().updated(name, parameter, gradient, numbers)
        return self.decayed(parameter, parameter - self.rule(name, gradient, numbers), numbers["decay"])

    def decays(self, name: str) -> bool:
        """Return whether a parameter decays."""
        return self.recipe.weight_decay > 0 and self.kinds[name] not in self.recipe.undecayed

    def decayed(self, before: Tensor, moved: Tensor, share: Tensor) -> Tensor:
        """Return a parameter after both."""
        return moved - share * before


class DecayAfterStep(Decaying):
    def decayed(self, before: Tensor, moved: Tensor, share: Tensor) -> Tensor:
        return moved - share * moved


class DecayReversed(Decaying):
    def decayed(self, before: Tensor, moved: Tensor, share: Tensor) -> Tensor:
        return moved + share * before


class DecayConstant(Decaying):
    def decayed(self, before: Tensor, moved: Tensor, share: Tensor) -> Tensor:
        return moved - share


class DecayByFullRate(Optimizer):
    def numbers(self, step: int, rate: float | None = None) -> dict[str, float]:
        found, recipe = super().numbers(step, rate), self.recipe
        return found | (
            {"decay": recipe.weight_decay * recipe.learning_rate} if recipe.decay_form == "times_rate" else {}
        )


class DecayNotInMoments(Decaying):
    def updated(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Numbers) -> Tensor:
        if not self.decays(name) or self.recipe.decay_form != "coupled":
            return super().updated(name, parameter, gradient, numbers)
        return (
            parameter
            - numbers["rate"] * self.recipe.weight_decay * parameter
            - self.rule(name, gradient, numbers)
        )


class PositionsFrozen(Optimizer):
    def updated(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Numbers) -> Tensor:
        return (
            parameter
            if self.kinds[name] == "positions"
            else super().updated(name, parameter, gradient, numbers)
        )


class UndecayedFrozen(Optimizer):
    def updated(self, name: str, parameter: Tensor, gradient: Tensor, numbers: Numbers) -> Tensor:
        moved = super().updated(name, parameter, gradient, numbers)
        return parameter if self.kinds[name] in self.recipe.undecayed else moved
