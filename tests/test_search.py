"""The search for a cause.

In which order, how much of the processor it takes, and what it says when that is spent.
"""

import dataclasses
import fnmatch
import re

import numpy as np
import pytest

from concord.backends.interface import Run
from concord.conformance.explain import diagnosis, search, suspects
from concord.conformance.explain.hypothesis import Hypothesis
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case
from concord.spec.reference import compute
from tests.toys.ports import SOUND, option, run_of, verdict_of

# How much it may take.


class Ticking:
    """A clock that goes on by a second each time it is asked."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1
        return self.now


def tanh_for_erf():
    case = build_case("bert", "ragged")
    return case, run_of(case, option(activation="gelu_tanh"))


def of_output_alone(run):
    return Run(run.output, run.loss, {}, dict(run.gradients), "numpy", "float32")


@pytest.mark.parametrize("bare", [False, True])
def test_a_search_that_is_cut_short_says_what_it_found_by_then(monkeypatch, bare):
    case, run = tanh_for_erf()
    monkeypatch.setattr(search.time, "thread_time", Ticking())
    monkeypatch.setattr(diagnosis, "LONGEST", 13.0)
    found = verdict_of(case, of_output_alone(run) if bare else run).diagnosis
    assert found.cause.hypothesis == "activation"
    assert "activation = gelu_tanh instead of gelu_erf" in found.cause.text
    assert not found.cause.confident
    (note,) = (note for note in found.notes if "cut short" in note)
    tried, known = map(
        int, re.search(r"cut short: (\d+) of (\d+) known explanations were tried", note).groups()
    )
    assert 1 < tried <= 13 < known


# Segments.


@pytest.mark.parametrize(
    ("row_of", "named"),
    [
        ((0, 0), "segment_ids_ignored or segment_ids_shifted"),
        ((1, 1), "segment_ids_shifted"),
        ((1, 0), "segment_ids_inverted or segment_ids_shifted"),
    ],
)
def test_shifted_ids_of_two_segments_are_named(row_of, named):
    case = build_case("bert", "ragged")
    batch = dataclasses.replace(case.batch, segment_ids=np.array(row_of)[case.batch.segment_ids])
    run = run_of(dataclasses.replace(case, batch=batch), SOUND)
    assert verdict_of(case, run).cause.hypothesis == named


# A run of which little was delivered, or whose gradients are wrong.


@pytest.mark.parametrize("delivered", [(), ("embeddings.norm", "*.norm2"), ("*",)])
@pytest.mark.parametrize(
    "role",
    ["attention.query", "attention.weights", "norm1"],
)
def test_a_wrong_gradient_by_a_tap_ends_no_search(role, delivered):
    case = build_case("bert", "ragged")
    truth = compute(
        case.config, case.weights, case.batch, Arithmetic("float32", shuffle=5), True, dtype="float32"
    )
    random, name = np.random.default_rng(3), f"layers.1.{role}"
    by_tap = {
        name: truth.tap_gradients[name]
        + abs(truth.tap_gradients[name]).max()
        * random.standard_normal(truth.tap_gradients[name].shape).astype(np.float32)
    }
    taps = {
        tap: array
        for tap, array in truth.taps.items()
        if any(fnmatch.fnmatchcase(tap, pattern) for pattern in delivered)
    }
    run = Run(truth.output, truth.loss, taps, dict(truth.gradients), "numpy", "float32", tap_gradients=by_tap)
    found = verdict_of(case, run).diagnosis
    if found is not None:
        assert not [note for note in found.notes if "failed" in note]
    assert found is not None or not taps


# A fault of the search itself.


def broken(m):
    raise TypeError("no such operation")


def broken_family(question, tap):
    yield Hypothesis("broken", "a broken explanation", "PRT-1", change=broken)


def test_a_faulty_explanation_is_noted_and_ends_no_search(monkeypatch):
    monkeypatch.setattr(suspects, "FAMILIES", (broken_family, *suspects.FAMILIES))
    case, run = tanh_for_erf()
    found = verdict_of(case, run).diagnosis
    assert found.cause.hypothesis == "activation"
    assert found.cause.confident
    assert found.notes[0] == "trying broken (a broken explanation) failed: TypeError: no such operation"
