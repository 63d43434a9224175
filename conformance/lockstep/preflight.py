"""Before the first step: whether each backend is going to do what the recipe says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import Difference
from concord.conformance.wording import few
from concord.spec.batch import round_inputs
from concord.spec.deviations import Deviations
from concord.spec.precision import precision
from concord.spec.text import first_of
from concord.spec.training.plan import StepPlan, plan

FEW = 3
"""Names that are said of those that differ."""


def right_plan(case: JudgedTraining) -> StepPlan:
    """Return what a backend is to do."""
    steps = [[round_inputs({}, batch, case.dtype)[1] for batch in batches] for batches in case.training.steps]
    return plan(case.config, replace(case.training, steps=steps), case.part)


def differences(
    case: JudgedTraining, right: StepPlan, backend: str, found: StepPlan, deviations: Deviations
) -> list[Difference]:
    """Return what a backend is going to do otherwise.

    Args:
        right: as :func:`right_plan` has it.
        found: as the backend says, of the batches that it was given.
        deviations: that it declares: to how many bits it rounds constants.
    """
    roundoff = precision(case.dtype).unit_roundoff
    bits = deviations.get("optimizer_constant_bits")
    held = max(roundoff, 0.0 if bits is None else 2.0**-bits)
    checks = (
        ("order of batches", "OPT-10", _batches(right.batches, found.batches)),
        ("dropout masks", "DRP-3", _masks(right.masks, found.masks)),
        ("schedule", "OPT-9", _rates(right.rates, found.rates, roundoff)),
        ("decay groups", "OPT-6", _decayed({*right.decayed}, {*found.decayed})),
        ("hyperparameters", "OPT-1", _constants(right.constants, found.constants, held)),
    )
    return [Difference(backend, subject, clause, text) for subject, clause, texts in checks for text in texts]


def _batches(right: list[list[str]], found: list[list[str]]) -> Iterator[str]:
    sizes, wanted = ([len(batches) for batches in each] for each in (found, right))
    if sizes != wanted:
        said = (few(one, FEW) + (f", {one[-1]}" if len(one) > FEW else "") for one in (sizes, wanted))
        yield "steps accumulate {} batches but must {}".format(*said)
        return
    places = [(step, number) for step, count in enumerate(sizes) for number in range(count)]
    wrong = [(step, number) for step, number in places if found[step][number] != right[step][number]]
    if wrong:
        step, number = wrong[0]
        theirs, other = (
            found[step][number],
            [at for at in places if right[at[0]][at[1]] == found[step][number]],
        )
        where = f", which is batch {other[0][1] + 1} of step {other[0][0] + 1}" if other else ""
        first = f"first batch {number + 1} of step {step + 1}: its digest is {theirs}{where}"
        yield f"{len(wrong)} of {len(places)} batches are others: {first}, but must be {right[step][number]}"


def _masks(right: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    wrong = [name for name in right if found.get(name) != right[name]]
    if wrong:
        step, number, site = wrong[0].split(".", 2)
        first = f"first that of {site} for batch {int(number) + 1} of step {int(step) + 1}"
        digests = f"its digest is {found.get(wrong[0], 'missing')} but must be {right[wrong[0]]}"
        yield f"{len(wrong)} of {len(right)} masks are others: {first}: {digests}"
    if extra := [name for name in found if name not in right]:
        yield f"it drops where nothing is to be dropped: {', '.join(extra[:FEW])}"


def _rates(right: list[float], found: list[float], roundoff: float) -> Iterator[str]:
    if len(found) != len(right):
        yield f"there are {len(found)} learning rates but must be {len(right)}"
        return
    wrong = [step for step, rate in enumerate(right) if not abs(found[step] - rate) <= roundoff * abs(rate)]
    if wrong:
        step = wrong[0]
        yield (
            f"the learning rate of {len(wrong)} of {len(right)} steps is another: "
            f"that of step {step + 1} is {found[step]:.9g} but must be {right[step]:.9g}"
        )


def _decayed(right: set[str], found: set[str]) -> Iterator[str]:
    for names, words in ((found - right, "decay but must not"), (right - found, "do not decay but must")):
        if names:
            yield f"{first_of(sorted(names), FEW)} {words}"


def _constants(right: Mapping[str, float], found: Mapping[str, float], roundoff: float) -> Iterator[str]:
    for name, value in right.items():
        other = found.get(name, math.nan)
        if not abs(other - value) <= roundoff * abs(value):
            yield f"{name} is {f'{other:.9g}' if name in found else 'not held'} but must be {value:.9g}"
