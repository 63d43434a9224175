"""Faults of training: each has a clause, a run that shows it, and is found where the reference shows it, in four frameworks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from concord import backends
from concord.backends.optimizers import Optimizer
from concord.backends.worker import Worker
from concord.conformance.expectation import JudgedTraining
from concord.conformance.faults.training.catalogue import ALL, TRAINING
from concord.conformance.faults.training.fault import GROUPS, HUB, Change, Place, TrainingFault
from concord.conformance.faults.training.fault import recipe as by_recipe
from concord.conformance.faults.training.runs import RUNS, model, training_of
from concord.conformance.lockstep import Entrant, Lockstep, Track, free_running, resynchronised
from concord.conformance.mutants.matrix import Hunt, plugin
from concord.conformance.mutants.trained import divergence_of, shown
from concord.spec.training.schedules import learning_rate
from tests.toys.trained import Faulty

SPECIFICATION = (Path(__file__).parent.parent / "spec" / "SPEC.md").read_text()
SAMPLE = (
    "adam_first_moment_uncorrected",
    "decay_after_step",
    "clip_each_batch",
    "schedule_step_ahead",
    "gradients_not_reset",
    "dropout_same_each_step",
    "last_batch_dropped",
    "resumed_without_first_moment",
)
"""One fault of each group; they are looked for in all frameworks, the others by the slow suite."""

CLEARLY = 4.0
"""Tolerances that a fault lies off at its first step on the reference, so that rounding does not decide which step that is."""

SLOWLY = [
    pytest.param(
        name,
        fault,
        id=f"{name}-{fault.name}",
        marks=[pytest.mark.xdist_group(name), *([] if fault.name in SAMPLE else [pytest.mark.slow])],
    )
    for fault in ALL
    for name in sorted(backends.BUILT_IN)
]
RIGHT = [
    pytest.param(
        name,
        run,
        id=f"{name}-{run}",
        marks=[
            pytest.mark.xdist_group(name),
            *([] if run in ("resumed", "lazy-adam") else [pytest.mark.slow]),
        ],
    )
    for run in RUNS
    for name in sorted(backends.BUILT_IN)
]


def test_table_is_large_and_has_every_group() -> None:
    assert len(TRAINING) == len(ALL), "names are unique"
    assert len(ALL) >= 150
    assert sum(bool(fault.source) for fault in ALL) >= 80
    assert {fault.group for fault in ALL} == set(GROUPS)
    assert {TRAINING[name].group for name in SAMPLE} == set(GROUPS)


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_fault_is_documented(fault: TrainingFault) -> None:
    assert re.fullmatch("[a-z0-9_]+", fault.name)
    assert fault.what.endswith(".")
    assert f"**{fault.clause}**" in SPECIFICATION
    assert fault.run in RUNS
    assert not fault.source or re.fullmatch(f"{HUB}[^/ ]+/[^/ ]+/(issues|pull)/[0-9]+", fault.source)
    assert fault.precisions
    assert any(value is not None for value in vars(fault.change).values())


@pytest.mark.parametrize("run", RUNS)
def test_faults_show_on_the_reference_in_their_runs(run: str) -> None:
    for fault in ALL:
        if fault.run == run:
            found = shown(fault.name, fault.precisions[0])
            assert found.step >= 0, fault.name
            assert found.margin >= CLEARLY, fault.name
            assert found.before * CLEARLY <= 1, fault.name
            for dtype in fault.equivalent:
                assert shown(fault.name, dtype).step == -1, fault.name


@pytest.mark.parametrize(("name", "fault"), SLOWLY)
def test_fault_is_found_at_the_first_step_that_shows_it(
    open_worker: Callable[[str], Worker], name: str, fault: TrainingFault
) -> None:
    finding = Hunt(name, worker=open_worker(plugin(name))).find(fault)
    assert finding.status == "found", finding
    assert finding.clause == "right", finding
    assert finding.cause != "wrong", finding


@pytest.mark.parametrize(("name", "run"), RIGHT)
def test_right_training_has_no_cause(open_worker: Callable[[str], Worker], name: str, run: str) -> None:
    fault = next(fault for fault in ALL if fault.run == run and not fault.options)
    assert divergence_of(open_worker(plugin(name)), fault, "float32", right=True) is None


# What explains a step.


def scaled_rate(m: Place) -> float:
    return 1.37 * learning_rate(m.recipe, m.step)


def unequal(m: Place, counts: Any, right: list[float]) -> list[float]:
    return [0.3, 0.45][: len(right)]


class Heavier(Optimizer):
    """What is new weighs more in the second moment than what is left for it, and its correction knows nothing of that."""

    def average(self, slot: str, name: str, value: Any, beta: float) -> Any:
        return super().average(slot, name, 1.37 * value if slot == "second_moment" else value, beta)


def track_of(run: str, change: Change, mode: Any = free_running) -> Track:
    case = JudgedTraining(*model(), training_of(run))
    (track,) = mode(case, [Entrant("toy", Faulty(case, change))], stop_first=True)
    found: Track = track
    return found


@pytest.mark.parametrize(
    ("run", "change", "name", "said"),
    [
        (
            "adamw",
            Change(rate=scaled_rate),
            "learning_rate",
            "a learning rate of 0.009133 instead of 0.006667",
        ),
        ("adamw", by_recipe(weight_decay=0.17), "weight_decay", "weight_decay = 0.17 instead of 0.3"),
        ("adamw", by_recipe(clip_at=0.77), "clip_at", "clip_at = 0.77 instead of 0.9"),
        ("adamw", by_recipe(beta2=0.98712), "beta2", "beta2 = 0.9871 instead of 0.999"),
        (
            "adamw",
            Change(optimizer=Heavier),
            "weights_of_second_moment",
            "second_moment = 0.00137 of what is new",
        ),
        ("keras-adam", by_recipe(epsilon=3.3e-4), "epsilon", "epsilon = 0.00033 instead of 0.001"),
        (
            "adamw",
            Change(shares=unequal),
            "shares_of_batches",
            "batches that count by 0.3, 0.45 instead of 0.5, 0.5",
        ),
    ],
)
def test_number_that_nobody_guesses_is_recovered(run: str, change: Change, name: str, said: str) -> None:
    divergence = track_of(run, change).first
    assert divergence is not None
    assert divergence.cause is not None
    assert divergence.cause.hypothesis == name
    assert said in divergence.cause.text


def test_what_nothing_explains_has_no_cause() -> None:
    noisy = Change(
        gradients=lambda m, total: {name: gradient + gradient * gradient for name, gradient in total.items()}
    )
    divergence = track_of("adamw", noisy).first
    assert divergence is not None
    assert divergence.row.tensor.startswith("steps.0.gradients.")
    assert divergence.cause is None


@pytest.mark.parametrize(
    "name", ["decay_after_step", "dropout_seed_ignored", "gradients_not_reset", "resumed_masks_from_start"]
)
def test_cause_is_found_from_the_oracle_state_too(name: str) -> None:
    fault = TRAINING[name]
    divergence = track_of(fault.run, fault.change, resynchronised).first
    assert divergence is not None
    assert divergence.cause is not None
    assert fault.name in divergence.cause.hypothesis.split(" or ")
    assert (
        Lockstep("resynchronised", "float32", {}, (Track("toy", "diverges", first=divergence),)).exit_code
        == 1
    )
