"""Backends beside the oracle, step by step: each step from the oracle's state, or each from its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.candidate import Candidate
from concord.conformance.lockstep.cause import cause_of
from concord.conformance.lockstep.envelope import (
    Envelope,
    Start,
    carried,
    expectation,
    in_range,
    of_training,
    rounded,
)
from concord.conformance.lockstep.made import MadeStep
from concord.conformance.lockstep.outcome import Divergence, Track
from concord.conformance.verdict import conclude
from concord.spec.arrays import Array
from concord.spec.deviations import NONE, Deviations
from concord.spec.errors import SpecError

Callback = Callable[[str, int], None]
"""Takes the name of a backend and how many steps it has made."""


def in_lockstep(
    again: bool,
    case: JudgedTraining,
    candidates: Sequence[Candidate],
    steps: int | None = None,
    stop_first: bool = False,
    callback: Callback = lambda name, steps: None,
) -> list[Track]:
    """Let backends train beside the oracle: while one step is judged, they make the next.

    Args:
        again: whether each step starts from the oracle's weights and state, so that a bug shows at its own
            step. Else backends train by themselves, and rounding is carried through the steps.
        case: the training; its deviations are of no account.
        steps: how many to make, by default all.
        stop_first: whether a backend is left out after its first divergence.
        callback: is told of progress.
    """
    # An envelope for each set of deviations; from the one without comes the oracle's state.
    envelopes = {
        key_of(one): Envelope(replace(case, deviations=one), again)
        for one in (NONE, *(candidate.deviations for candidate in candidates))
    }
    batches = case.training.steps[:steps]
    with ExitStack() as stack:
        # Each backend answers in its own time, and one request after the other.
        lines = [stack.enter_context(ThreadPoolExecutor(max_workers=1)) for _ in candidates]

        def goes_on(one: Candidate) -> bool:
            return not one.failure and not (stop_first and one.diverging)

        def ask(state: Mapping[str, Array], step: int) -> list[Any]:
            """Have every backend that goes on make a step."""
            given = state if again or step == 0 else None
            return [
                (one, line.submit(one.step, given, step, batches[step]))
                for one, line in zip(candidates, lines, strict=True)
                if step < len(batches) and goes_on(one)
            ]

        state, earlier = rounded(case, case.start), None
        asked = ask(state, 0)
        for step in range(len(batches)):
            if not asked:
                break
            start = Start(state, step, batches[step], earlier=earlier)
            for envelope in envelopes.values():
                envelope.advance(start)
            state = rounded(case, envelopes[key_of(NONE)].truth.state())
            following = ask(state, step + 1)
            for one, answer in asked:
                one.receive(answer, envelopes[key_of(one.deviations)], start)
                callback(one.name, step + 1)
            asked = [(one, answer) for one, answer in following if goes_on(one)]
            earlier = replace(start, earlier=None)
    return [one.track() for one in candidates]


resynchronised, free_running = partial(in_lockstep, True), partial(in_lockstep, False)
"""Training from the oracle's state in each step, and by themselves."""


def key_of(deviations: Deviations) -> str:
    """Return a text that says which deviations these are."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(deviations.items()))


def judged_steps(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0
) -> Iterator[MadeStep]:
    """Yield the steps of training that was made by itself, until one diverges.

    Args:
        case: all of whose steps are reported, with the deviations of the backend.
        made: what was reported of each step, without the number of the step.
        resumed: the step before which it went on from a checkpoint of its own; 0: it did not.

    Raises:
        SpecError: at the end, if a section was judged at no step, so that nobody can say.
    """
    whole, start, statuses = of_training(case), None, set[tuple[str, str]]()
    sigmas, state = dict[str, Array](), rounded(case, case.start)
    for step, (batches, found) in enumerate(zip(case.training.steps, made, strict=True)):
        prefix = f"steps.{step}."
        values, tolerated = (
            {name: array for name, array in table.items() if name.startswith(prefix)}
            for table in (whole.values, whole.sigmas)
        )
        expected = expectation(case, values, tolerated)
        start = Start(state, step, batches, sigmas, start and replace(start, earlier=None), resumed)
        delivered = {f"{prefix}{name}": np.asarray(array) for name, array in found.items()}
        one = MadeStep(case, start, delivered, in_range(expected, state))
        yield one
        if one.tensor:
            return
        statuses |= one.statuses
        sigmas = carried(case, step, expected)
        state = rounded(case, {name: values[f"{prefix}{name}"] for name in sigmas})
    status, unjudged = conclude(statuses)
    if status == "undetermined":
        sections = ", ".join(unjudged) or "tensors"
        raise SpecError(
            f"no step of this training was judged in its {sections}: it neither agrees nor diverges"
        )


def first_divergence(
    case: JudgedTraining, made: Sequence[Mapping[str, Array]], resumed: int = 0, explaining: bool = True
) -> Divergence | None:
    """Return where training left its tolerance first (:func:`judged_steps`), and why.

    Args:
        explaining: whether a cause is looked for.
    """
    *agreed, last = judged_steps(case, made, resumed)
    if not last.tensor:
        return None
    return replace(Divergence.of(last), cause=cause_of(last, agreed) if explaining else None)
