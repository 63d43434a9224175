"""Before the first step: whether each backend is going to do what the recipe says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import Difference
from concord.spec.batch import round_inputs
from concord.spec.deviations import Deviations
from concord.spec.precision import precision
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
        ("order of batches", "OPT-10", _batches(right, found)),
        ("dropout masks", "DRP-3", _masks(right.masks, found.masks)),
        ("schedule", "OPT-9", _rates(right, found, roundoff)),
        ("decay groups", "OPT-6", _decayed(right, found)),
        ("hyperparameters", "OPT-1", _constants(right.constants, found.constants, held)),
    )
    return [Difference(backend, subject, clause, text) for subject, clause, texts in checks for text in texts]


def _batches(right: StepPlan, found: StepPlan) -> Iterator[str]:
    wanted, got = (
        [
            (step, number, one)
            for step, batches in enumerate(each.batches)
            for number, one in enumerate(batches)
        ]
        for each in (right, found)
    )
    if [len(batches) for batches in right.batches] != [len(batches) for batches in found.batches]:
        yield f"steps accumulate {_sizes(found)} batches but must {_sizes(right)}"
        return
    wrong = [place for place, (one, other) in enumerate(zip(wanted, got, strict=True)) if one != other]
    if wrong:
        step, number, theirs = got[wrong[0]]
        where = next(
            (f", which is batch {other + 1} of step {at + 1}" for at, other, one in wanted if one == theirs),
            "",
        )
        first = f"first batch {number + 1} of step {step + 1}: its digest is {theirs}{where}"
        yield f"{len(wrong)} of {len(wanted)} batches are others: {first}, but must be {wanted[wrong[0]][2]}"


def _sizes(found: StepPlan) -> str:
    sizes = [len(batches) for batches in found.batches]
    return ", ".join(map(str, sizes[:FEW])) + (f", …, {sizes[-1]}" if len(sizes) > FEW else "")


def _masks(right: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    wrong = [name for name in right if found.get(name, "") != right[name]]
    extra = [name for name in found if name not in right]
    if wrong:
        step, number, site = wrong[0].split(".", 2)
        first = f"first that of {site} for batch {int(number) + 1} of step {int(step) + 1}"
        digests = f"its digest is {found.get(wrong[0], 'missing')} but must be {right[wrong[0]]}"
        yield f"{len(wrong)} of {len(right)} masks are others: {first}: {digests}"
    if extra:
        yield f"it drops where nothing is to be dropped: {', '.join(extra[:FEW])}"


def _rates(right: StepPlan, found: StepPlan, roundoff: float) -> Iterator[str]:
    if len(found.rates) != len(right.rates):
        yield f"there are {len(found.rates)} learning rates but must be {len(right.rates)}"
        return
    wrong = [
        step
        for step, (rate, other) in enumerate(zip(right.rates, found.rates, strict=True))
        if not abs(other - rate) <= roundoff * abs(rate)
    ]
    if wrong:
        first, rate, other = wrong[0], right.rates[wrong[0]], found.rates[wrong[0]]
        yield (
            f"the learning rate of {len(wrong)} of {len(right.rates)} steps is another: "
            f"that of step {first + 1} is {other:.9g} but must be {rate:.9g}"
        )


def _decayed(right: StepPlan, found: StepPlan) -> Iterator[str]:
    for names, words in (
        (sorted({*found.decayed} - {*right.decayed}), "decay but must not"),
        (sorted({*right.decayed} - {*found.decayed}), "do not decay but must"),
    ):
        if names:
            more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
            yield f"{', '.join(names[:FEW])}{more} {words}"


def _constants(right: Mapping[str, float], found: Mapping[str, float], roundoff: float) -> Iterator[str]:
    for name, value in right.items():
        other = found.get(name, math.nan)
        if not abs(other - value) <= roundoff * abs(value):
            yield f"{name} is {f'{other:.9g}' if name in found else 'not held'} but must be {value:.9g}"
