import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from concord.conformance.bugs.bug import REFUSED, Change
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.explain import family_explanation, search, suspects
from concord.conformance.explain.hypothesis import Hypothesis
from concord.spec.cases import build_case, standard_cases
from tests.toys.rounded import explained, option, other, run_with
from tests.toys.surroundings import sample_of

PLACED = [bug for bug in BUGS.values() if not bug.after and REFUSED not in bug.first]
NAMED = [bug for bug in PLACED if bug.cause]
CASES = standard_cases()
SCORES = "layers.0.attention.scores"


@pytest.mark.parametrize("bug", sample_of(PLACED, lambda place, _: place % 13 == 0), ids=lambda bug: bug.name)
def test_a_bug_is_placed_and_its_cause_is_named(bug):
    case = build_case(bug.variant, bug.scenario, options=bug.options)
    verdict = explained(case, run_with(bug.change, case, bug.precisions[0]))
    assert bug.rightly_first(verdict.first_divergence.tensor)
    assert not [note for note in verdict.explanation.notes if " failed: " in note]
    if bug.cause:
        cause = verdict.cause
        assert bug.diagnosed(cause.hypothesis if cause else "") == "right", cause
        sure = "is" if cause.confident else "may be"
        assert f"`{verdict.first_divergence.tensor}` {sure} explained by" in cause.text


@pytest.mark.parametrize(
    ("place", "every"),
    [(place, 67) for place, case in enumerate(CASES) if place % 8 == 0 and case.scenario != "long"]
    + [
        pytest.param(place, 5, marks=pytest.mark.slow)
        for place, case in enumerate(CASES)
        if case.scenario != "tiny"  # there attention is uniform, and several bugs are one
    ],
)
def test_no_bug_is_taken_for_another(place, every):
    # The quick suite takes a sample of cases and bugs; the slow suite runs every case with every fifth bug.
    wrongly_sure = []
    for number, bug in enumerate(NAMED):
        case, dtype = CASES[place], ("float32", "float64")[(number + place) % 2]
        if (number + place) % every:
            continue
        try:
            run = run_with(bug.change, case, dtype)
        except (KeyError, IndexError, ValueError):
            continue  # the bug does not apply to the case
        cause = explained(case, run).cause
        if cause and cause.confident and bug.diagnosed(cause.hypothesis) != "right":
            wrongly_sure.append(f"{case.name}, {dtype}: {bug.name} is taken for {cause}")
    assert not wrongly_sure


# Unknown bugs are not named.

UNKNOWN = {
    "one element off": lambda x, random: (
        x + 1e-3 * abs(x).max() * (np.arange(x.size).reshape(x.shape) == x.size // 2)
    ),
    "noise": lambda x, random: x + 1e-3 * abs(x).max() * random.standard_normal(x.shape),
    "faint noise": lambda x, random: x * (1 + 2e-5 * random.standard_normal(x.shape)),
    "last half off": lambda x, random: np.where(
        np.arange(x.size).reshape(x.shape) < x.size // 2, x, 1.01 * x
    ),
}
TENSORS = (
    "embeddings.token",
    SCORES,
    "layers.1.attention.context",
    "layers.1.norm2",
    "pooler.dense",
    "log_probabilities",
    "gradients.layers.1.feed_forward.inner.weight",
)


@pytest.mark.parametrize("met", sample_of([*product(TENSORS, UNKNOWN)], lambda place, _: place % 5 == 0))
def test_an_unknown_bug_is_given_no_name(met):
    tensor, kind = met
    case, random = build_case("bert", "ragged"), np.random.default_rng(3)
    run = other(run_with(Change(), case), tensor, lambda x: UNKNOWN[kind](x, random).astype(np.float32))
    verdict = explained(case, replace(run, output=run.taps["logits"]))
    assert verdict.first_divergence.tensor == tensor
    assert verdict.cause is None


@pytest.mark.parametrize(
    ("variant", "scenario", "dtype", "fields", "said"),
    [
        ("nndl-paddle", "ragged", "float32", {"mask_value": -54321.0}, "mask_value = -54321 instead of"),
        (
            "bert",
            "ragged",
            "float64",
            {"norm_epsilon": 3.7e-2, "norm_epsilon_placement": "outside"},
            "norm_epsilon = 0.037 instead of 1e-12 outside the root (NRM-2)",
        ),
        # Another cause explains it just as well.
        ("nndl-paddle", "peaked", "float32", {"norm_epsilon": 1e-8}, "1e-08 instead of 1e-05 (NRM-2) or by"),
    ],
)
def test_a_number_that_nobody_uses_is_read_off_and_is_not_sure(variant, scenario, dtype, fields, said):
    case = build_case(variant, scenario)
    cause = explained(case, run_with(option(**fields), case, dtype)).cause
    assert next(iter(fields)) in cause.hypothesis
    assert f"may be explained by {said}" in cause.text or f"= {said}" in cause.text
    assert not cause.confident


# Parts, fused implementations, dropout.


def test_the_cause_is_named_in_a_part():
    bug = BUGS["norm_variance_detached"]
    case = build_case("bert", bug.scenario, "stack")
    of_the_part = tuple(f"*{pattern.rpartition('.')[2]}" for pattern in bug.change.taps)
    run = run_with(replace(bug.change, taps=of_the_part), case)
    assert bug.diagnosed(explained(case, run).cause.hypothesis) == "right"


def test_a_cause_within_a_fused_step_is_named_where_the_step_ends():
    case, bug = build_case("bert", "ragged"), BUGS["softmax_over_queries"]
    run = run_with(bug.change, case)
    run.taps = {
        name: tap for name, tap in run.taps.items() if ".attention." not in name or name.endswith("output")
    }
    run.info["not_exposed"] = ["layers.*.attention.*"]
    verdict = explained(case, run)
    assert verdict.first_divergence.tensor == "layers.0.attention.output"
    assert bug.diagnosed(verdict.cause.hypothesis) == "right", verdict.cause


def dropped(m, x):
    return m.where(np.arange(np.prod(x.shape)).reshape(x.shape) % 5 > 0, x / 0.8, 0.0)


@pytest.mark.parametrize(
    ("tap", "edit"),
    [
        ("*.outer", lambda m: dropped(m, m.y)),
        ("*.context", lambda m: m.context(dropped(m, m.beside("weights")))),
    ],
)
def test_dropout_that_was_left_on_is_recognised(tap, edit):
    case = build_case("bert", "ragged")
    cause = explained(case, run_with(Change(taps=(tap,), edit=edit), case, "float64")).cause
    assert (cause.hypothesis, cause.confident) == ("dropout", True)
    assert "dropout of 20 %" in cause.text


# The search.


@pytest.fixture
def tanh_for_erf():
    case = build_case("bert", "ragged")
    return case, run_with(option(activation="gelu_tanh"), case)


def test_a_search_that_is_cut_short_says_what_it_found_by_then(monkeypatch, tanh_for_erf):
    case, run = tanh_for_erf
    seconds = iter(range(1000))
    monkeypatch.setattr(search.time, "thread_time", partial(next, seconds))  # one more second per call
    monkeypatch.setattr(family_explanation, "LONGEST", 60.0)
    # With the outputs alone, every step is a suspect.
    explanation = explained(case, replace(run, taps={})).explanation
    assert "activation" in explanation.hypothesis
    assert not explanation.confident
    (note,) = (note for note in explanation.notes if "cut short" in note)
    tried, total = map(
        int, re.search(r"cut short: (\d+) of (\d+) known explanations were tried", note).groups()
    )
    assert 1 < tried <= 60 < total


def test_a_faulty_explanation_is_noted_and_ends_no_search(monkeypatch, tanh_for_erf):
    def broken(m):
        raise TypeError("no such operation")

    def broken_family(question, tap):
        yield Hypothesis("broken", "a broken explanation", "PRT-1", change=Change(taps=(tap,), edit=broken))

    monkeypatch.setattr(suspects, "FAMILIES", (broken_family, *suspects.FAMILIES))
    explanation = explained(*tanh_for_erf).explanation
    assert explanation.hypothesis == "activation"
    assert explanation.confident
    assert explanation.notes[0] == "trying broken (a broken explanation) failed: TypeError: no such operation"
