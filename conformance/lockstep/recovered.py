"""Numbers that nobody would guess, recovered from what a step reported: shares of batches, limits, weights of averages, rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from concord.backends.optimizers import Optimizer, Tensor
from concord.conformance.estimate import exact
from concord.conformance.expectation import Array
from concord.conformance.faults.training.fault import Change, Place, Tensors
from concord.conformance.faults.training.fault import recipe as by_recipe
from concord.conformance.lockstep.hypotheses import Hypothesis
from concord.conformance.wording import distinct, instead, multiple
from concord.spec.errors import ConfigError
from concord.spec.training.schedules import learning_rate

if TYPE_CHECKING:
    from concord.conformance.lockstep.cause import Question

NEVER = 1e-30
"""What is smaller says nothing of a factor."""

BETAS = {"first_moment": "beta1", "second_moment": "beta2"}
"""By what an average weighs what was there."""

POWERS = -13.0, 0.0
"""Powers of ten between which an epsilon is looked for."""

SEARCHED, LOOKS = 12, 2
"""Values that are tried at once, and how often: then as many between the neighbours of the best."""

REFINED, NUDGE = 4, 1e-4
"""Steps of Gauss and Newton after that, and how far apart two values are that a slope is taken from."""


def recovered(question: Question) -> Iterator[Hypothesis]:
    """Yield what a step would have been computed with."""
    return {"gradients": _shares, "clipped": _limit, "moments": _update}.get(
        question.stage(), lambda _: iter(())
    )(question)


def _named(question: Question, values: Mapping[str, Array], section: str) -> dict[str, Array]:
    """Return the tensors of a section of the step, by name of a parameter."""
    prefix = f"steps.{question.start.step}.{section}."
    return {
        name.removeprefix(prefix): np.asarray(array, np.float64)
        for name, array in values.items()
        if name.startswith(prefix)
    }


def _flat(tensors: Mapping[str, Array], names: Sequence[str]) -> Array:
    return np.concatenate([tensors[name].reshape(-1) for name in names]) if names else np.zeros(0)


def _solved(columns: Sequence[Array], wanted: Array) -> list[float] | None:
    """Return by which factors columns add up to something; None where they say nothing of it."""
    usable = [column for column in columns if float(np.max(abs(column), initial=0.0)) > NEVER]
    if len(usable) < len(columns) or not np.isfinite(wanted).all():
        return None
    return [float(factor) for factor in np.linalg.lstsq(np.stack(columns, axis=1), wanted, rcond=None)[0]]


def _right(question: Question) -> dict[str, Array]:
    return question.made(Change(), exact(question.case.dtype), question.known)


def _shares(question: Question) -> Iterator[Hypothesis]:
    """By how much each batch counted."""
    pieces: list[dict[str, Array]] = []
    right: list[float] = []

    def collect(m: Place, total: Tensors, piece: Tensors, share: float) -> dict[str, Tensor]:
        if m.step == question.start.step:
            pieces.append({name: np.asarray(value.tensor.value, np.float64) for name, value in piece.items()})
        return {name: total[name] + value if name in total else value for name, value in piece.items()}

    def alone(m: Place, counts: list[tuple[int, int]], shares: list[float]) -> list[float]:
        right[:] = shares
        return [1.0] * len(counts)

    question.made(Change(shares=alone, added=collect), exact(question.case.dtype), question.known)
    actual = _named(question, question.delivered, "gradients")
    names = [name for name in actual if all(name in piece for piece in pieces)]
    found = _solved([_flat(piece, names) for piece in pieces], _flat(actual, names))
    if found is None:
        return
    factor = found[0] / right[0] if right[0] else math.nan
    alike = all(f"{one:g}" == f"{factor * share:g}" for one, share in zip(found, right, strict=True))
    shares = distinct(*map(float, (*found, *right)), digits=4)
    counts, meant = (", ".join(some) for some in (shares[: len(found)], shares[len(found) :]))
    told = (
        f"gradients times {multiple(factor, digits=4)}"
        if alike
        else f"batches that count by {counts} instead of {meant}"
    )
    yield Hypothesis(
        "shares_of_batches",
        told,
        "OPT-10",
        Change(shares=lambda m, counts, shares: found if len(found) == len(counts) else shares),
    )


def _limit(question: Question) -> Iterator[Hypothesis]:
    """By how much gradients were clipped."""
    right, step = _right(question), question.start.step
    gradients, actual = (
        _named(question, question.delivered, "gradients") or _named(question, right, "gradients"),
        _named(question, question.delivered, "clipped"),
    )
    names = [name for name in actual if name in gradients]
    found = _solved([_flat(gradients, names)], _flat(actual, names))
    norm, reported = right.get(f"steps.{step}.norm"), question.delivered.get(f"steps.{step}.norm")
    off = float(reported) / float(norm) if norm is not None and reported is not None and float(norm) else 1.0
    if found is None:
        return

    def clip(m: Place, given: Tensors, squares: Callable[[str], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        total = m.operations.square_root(sum(squares(name) for name in given)) * off
        return {name: gradient * found[0] for name, gradient in given.items()}, total

    limit = (
        f"clip_at = {instead(found[0] * float(norm), question.case.training.recipe.clip_at, digits=4)}"
        if norm is not None and abs(off - 1) < 1e-4
        else f"a norm that is {multiple(off, digits=4)} times what it should be, and gradients times {multiple(found[0], digits=4)}"
    )
    yield Hypothesis("clip_at", limit, "OPT-7", Change(clip=clip))


def _update(question: Question) -> Iterator[Hypothesis]:
    """With what averages and parameters moved."""
    yield from _averages(question)
    yield from _movement(question)
    yield from _epsilon(question)


def _averages(question: Question) -> Iterator[Hypothesis]:
    """By how much an average weighed what was there, and what is new."""
    right, recipe = _right(question), question.case.training.recipe
    gradients = _named(question, right, "clipped") or _named(question, right, "gradients")
    for slot, clause in (("first_moment", "OPT-3"), ("second_moment", "OPT-3"), ("momentum", "OPT-2")):
        actual, wanted = _named(question, question.delivered, slot), _named(question, right, slot)
        names = [name for name in actual if name in wanted and name in gradients]
        if (
            not names
            or recipe.decay_form == "coupled"
            or (recipe.algorithm == "rmsprop" and slot == "momentum")
        ):
            continue
        new = {name: gradients[name] ** 2 if slot == "second_moment" else gradients[name] for name in names}
        before = {
            name: np.asarray(question.start.state.get(f"{slot}.{name}", np.zeros_like(new[name])), np.float64)
            for name in names
        }
        columns = [_flat(before, names), _flat(new, names)]
        started = float(np.max(abs(columns[0]), initial=0.0)) > NEVER
        found = _solved(columns if started else columns[1:], _flat(actual, names))
        if found is not None:
            kept, fresh = found if started else (0.0, found[0])
            told = (
                f"{slot} = {kept:.4g} of what was there + {fresh:.4g} of what is new"
                if started
                else f"{slot} = {fresh:.4g} of what is new"
            )
            yield Hypothesis(
                f"weights_of_{slot}", told, clause, Change(optimizer=_weighing(slot, kept, fresh))
            )
            if slot in BETAS and 0 <= fresh <= 1:  # the correction for its bias knows of it too
                beta = BETAS[slot]
                yield Hypothesis(
                    beta,
                    f"{beta} = {instead(1 - fresh, getattr(recipe, beta), digits=4)}",
                    clause,
                    by_recipe(**{beta: 1 - fresh}),
                )


def _weighing(slot: str, kept: float, fresh: float) -> type[Optimizer]:
    """Return the optimizer whose average weighs otherwise."""

    class Weighing(Optimizer):
        def average(self, which: str, name: str, value: Tensor, beta: float) -> Tensor:
            if which != slot:
                return super().average(which, name, value, beta)
            self.state[f"{slot}.{name}"] = kept * self.state[f"{slot}.{name}"] + fresh * value
            return self.state[f"{slot}.{name}"]

        def with_momentum(self, name: str, gradient: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
            if slot != "momentum":
                return super().with_momentum(name, gradient, numbers)
            state = self.state[f"momentum.{name}"] = kept * self.state[f"momentum.{name}"] + fresh * gradient
            return numbers["rate"] * (
                gradient + self.recipe.momentum * state if self.recipe.nesterov else state
            )

    return Weighing


def _movement(question: Question) -> Iterator[Hypothesis]:
    """By which rate parameters moved, and by how much they decayed."""
    recipe, step = question.case.training.recipe, question.start.step
    rate, prefix = learning_rate(recipe, step), "parameters."
    decoupled = recipe.decay_form in ("times_rate", "alone") and recipe.weight_decay > 0
    bare = question.made(
        by_recipe(weight_decay=0.0) if decoupled else Change(), exact(question.case.dtype), question.known
    )
    actual, moved = _named(question, question.delivered, "parameters"), _named(question, bare, "parameters")
    before = {name: np.asarray(question.start.state[f"{prefix}{name}"], np.float64) for name in moved}
    kinds = question.case.trajectory(exact(question.case.dtype)).kinds
    names = [
        name for name in moved if name in actual and (not decoupled or kinds[name] not in recipe.undecayed)
    ]
    columns = [
        _flat({name: moved[name] - before[name] for name in names}, names),
        *([-_flat(before, names)] if decoupled else []),
    ]
    found = _solved(columns, _flat({name: actual[name] - before[name] for name in names}, names))
    if found is None:
        return
    share = recipe.weight_decay * (rate if recipe.decay_form == "times_rate" else 1.0)
    reported = float(question.delivered.get(f"steps.{step}.rate", rate))
    moved_by = (
        reported if reported != rate else found[0] * rate
    )  # what it says is nearer than what parameters, rounded, show
    yield Hypothesis(
        "learning_rate",
        f"a learning rate of {instead(moved_by, rate, digits=4)}",
        "OPT-9",
        Change(rate=lambda m: moved_by if m.step == step else learning_rate(m.recipe, m.step)),
    )
    if decoupled and share:
        decay = found[1] / share * recipe.weight_decay
        if decay >= 0:
            yield Hypothesis(
                "weight_decay",
                f"weight_decay = {instead(decay, recipe.weight_decay, digits=4)}",
                "OPT-6",
                by_recipe(weight_decay=decay),
            )


def _epsilon(question: Question) -> Iterator[Hypothesis]:
    """With which epsilon parameters moved."""
    recipe = question.case.training.recipe
    if recipe.algorithm == "sgd":
        return
    actual = _named(question, question.delivered, "parameters")
    names = list(actual)

    def off(power: float) -> Array:
        """Return what is left between the parameters that were reported and those of an epsilon."""
        made = _named(
            question,
            question.made(by_recipe(epsilon=10.0**power), exact(question.case.dtype), question.known),
            "parameters",
        )
        return _flat(actual, names) - _flat(made, names)

    try:
        power = _nearest(off, *POWERS)
    except (ConfigError, KeyError, ValueError):  # no such training, or other parameters than it has
        return
    value = 10.0**power
    yield Hypothesis(
        "epsilon", f"epsilon = {instead(value, recipe.epsilon, digits=4)}", "OPT-3", by_recipe(epsilon=value)
    )


def _nearest(off: Callable[[float], Array], low: float, high: float) -> float:
    """Return where between two numbers least is left: a look at all of them, a closer one about the best, and then Gauss and Newton's steps."""
    best = low
    for _ in range(LOOKS):
        tried = np.linspace(low, high, SEARCHED)
        place = int(
            np.argmin([np.nan_to_num(np.square(off(float(number))).sum(), nan=np.inf) for number in tried])
        )
        best, low, high = (
            float(tried[place]),
            float(tried[max(place - 1, 0)]),
            float(tried[min(place + 1, len(tried) - 1)]),
        )
    for _ in range(REFINED):
        left = off(best)
        slope = (off(best + NUDGE) - left) / NUDGE
        if not np.square(slope).sum() > 0:
            return best
        best = min(max(best - float(slope @ left / (slope @ slope)), low), high)
    return best
