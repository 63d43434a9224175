"""Each training bug has a clause and a run, and is found at the right step."""

import dataclasses
from functools import partial

import pytest

from concord.conformance.bugs.bug import Change, recipe
from concord.conformance.bugs.catalogue import TRAINING
from concord.conformance.bugs.training.edits import of_other_step
from concord.conformance.bugs.training.runs import RUNS, model, training_of
from concord.conformance.judging.expectation import JudgedTraining
from concord.conformance.lockstep.running import Candidate, resynchronised
from concord.conformance.mutants.matrix import Hunt
from concord.conformance.mutants.training_detection import divergence_of, shown
from concord.spec.training.recipe import RATES
from tests.toys.stepping import Bugged
from tests.toys.surroundings import sample_of

# One bug of each operation. Tests look for these in all frameworks, the command looks for the others.
SAMPLE = (
    "adam_first_moment_uncorrected",
    "decay_after_step",
    "clip_each_batch",
    "schedule_step_ahead",
    "gradients_not_reset",
    "dropout_same_each_step",
    "last_batch_dropped",
    "resumed_without_moments",
)

# How many tolerances a bug must be off at its first step on the reference, so that rounding cannot hide it.
CLEARLY = 4.0


def test_sample_has_every_operation():
    assert {TRAINING[name].operation for name in SAMPLE} == {bug.operation for bug in TRAINING.values()}


@pytest.mark.parametrize("run", RUNS)
def test_bugs_show_on_the_reference_in_their_runs(run):
    for bug in TRAINING.values():
        if bug.scenario == run:
            result = shown(bug.name, bug.precisions[0])
            assert result.step >= 0, bug.name
            assert result.margin >= CLEARLY, bug.name
            assert result.before * CLEARLY <= 1, bug.name


@pytest.mark.in_turn(command="mutants --every")
@pytest.mark.parametrize("bug", sample_of(TRAINING, lambda _, name: name in SAMPLE))
def test_bug_is_found_at_the_first_step_that_shows_it(altered, bug):
    finding = Hunt(altered.name, worker=altered).find(TRAINING[bug])
    assert finding.status == "found", finding
    assert finding.clause == "right", finding
    assert finding.cause != "wrong", finding


@pytest.mark.in_turn
@pytest.mark.parametrize("run", sample_of(RUNS, lambda _, name: name in ("resumed", "lazy-adam")))
def test_right_training_has_no_cause(altered, run):
    bug = dataclasses.replace(next(iter(TRAINING.values())), scenario=run, options={})
    assert divergence_of(altered, bug, "float32", right=True) is None


# Explanations of a step.


def track_of(run, change):
    case = JudgedTraining(*model(), training_of(run))
    (track,) = resynchronised(case, [Candidate("toy", Bugged(case, change))])
    return track


def halved(m, total):
    return {name: gradient * 0.5 if m.kinds[name] == "bias" else gradient for name, gradient in total.items()}


def without_last(m, right, gradients, squares):
    return {**right[0], "classifier.bias": gradients["classifier.bias"]}, right[1]


# Causes without an entry. What only some parameters show is not sure.
NO_ENTRY = [
    (
        "adamw",
        Change(rate=lambda m, right: 1.37 * right),
        "explained by a learning rate of 0.009133 instead of 0.006667 (OPT-9)",
        True,
    ),
    ("adamw", recipe(beta2=0.98712), "explained by beta2 = 0.9871 instead of 0.999 (OPT-3)", True),
    (
        "adamw",
        Change(batches=partial(of_other_step, by=1)),
        "explained by the batches of the next step (OPT-10)",
        True,
    ),
    ("dropout", recipe(**dict.fromkeys(RATES, 0.0)), "explained by training without dropout (DRP-2)", True),
    ("sgd", recipe(momentum=0.0, dampening=0.0), "explained by momentum = 0 instead of 0.9 (OPT-2)", True),
    ("adamw", Change(gradients=halved), "of every bias that are multiplied by 0.5 (GRD-1)", False),
    (
        "adamw",
        Change(clip=without_last),
        "gradients of `classifier.bias` that are not clipped (OPT-7)",
        False,
    ),
]


@pytest.mark.parametrize(("run", "change", "words", "confident"), NO_ENTRY)
def test_a_cause_is_named_without_an_entry(run, change, words, confident):
    cause = track_of(run, change).first.cause
    assert cause.text == words if confident else words in cause.text
    assert cause.confident == confident


def test_what_nothing_explains_has_no_cause():
    noisy = Change(
        gradients=lambda m, total: {name: gradient + gradient * gradient for name, gradient in total.items()}
    )
    divergence = track_of("adamw", noisy).first
    assert divergence.row.tensor.startswith("steps.0.gradients.")
    assert divergence.cause is None
