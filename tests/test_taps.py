import dataclasses
import re

import numpy as np
import pytest

from concord import spec
from concord.backends import wire
from concord.backends.interface import Request
from concord.conformance.judging.exemptions import UNUSED
from concord.conformance.run.campaign import Setup, conduct
from concord.conformance.run.standard_jobs import check_jobs
from concord.spec.cases import build_case
from concord.spec.encoder import Model
from concord.spec.errors import SpecError
from tests.toys.built_in import changed
from tests.toys.rounded import as_run, truth_of, verdict_of
from tests.toys.small import run_case


def case_of(name, part="model", **options):
    # One layer, and a different size for each axis. Every sample has a real token: where a mask constant
    # absorbs all scores of a row, taps would have no effect.
    return build_case(name, "equal", part, options={"num_layers": 1, **options})


def reference(case, pinned=None):
    return spec.reference(case.config, case.weights, case.batch, part=case.part, pinned=pinned).taps


# The model continues with what a tap returns.


@pytest.mark.in_turn
@pytest.mark.clause("PRT-2", "ATT-7")
@pytest.mark.parametrize(
    ("name", "options"),
    [("tf1-text-classifier", {"head_computation": "looped"}), ("bert-pytorch", {}), ("bert", {})],
)
def test_model_goes_on_with_every_tap(altered, name, options):
    # Changing a tap in the backend and in the reference must change the same tensors.
    case = case_of(name, **options)

    def run(tap=""):
        edited = f"edit {tap}::explicit"
        return run_case(altered, case, "float64", implementation=edited, gradients=False).taps

    plain, expected = run(), reference(case)
    for tap in spec.taps(case.config):
        pinned, actual = reference(case, {tap: changed(tap, expected[tap])}), run(tap)
        kept = {name for name in expected if name != tap and np.array_equal(pinned[name], expected[name])}
        assert {name for name in actual if np.array_equal(actual[name], plain[name])} == kept, tap


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("name", "tap", "implementation", "execution"),
    [
        ("nndl-paddle", "layers.0.attention.weights", "explicit", "compiled"),
        ("bert", "layers.0.attention.query", "library", "eager"),
        ("bert", "layers.0.feed_forward.activation", "library", "compiled"),
        ("bert", "pooler.dense", "library", "unpadded"),
    ],
)
def test_model_goes_on_with_taps_however_it_is_run(altered, name, tap, implementation, execution):
    # Each step is judged from the run's own taps, so only the changed tap is wrong.
    case = case_of(name)
    edited = f"edit {tap}::{implementation}"
    run = run_case(altered, case, implementation=edited, execution=execution, gradients=False)
    verdict = verdict_of(case, run)
    assert [row.tensor for row in verdict.table if row.status == "diverges"] == [tap]


# Gradients of taps.


def test_gradients_of_taps_change_nothing_else(worker):
    case = case_of("nndl-paddle")
    without, run = (run_case(worker, case, tap_gradients=tap_gradients) for tap_gradients in (False, True))
    assert without.tap_gradients == {}
    assert run.tap_gradients.keys() == run.taps.keys() - {"loss"}
    for name, array in {**run.taps, **run.gradients}.items():
        assert np.array_equal(array, {**without.taps, **without.gradients}[name]), name


@pytest.mark.clause("GRD-6")
def test_weights_that_are_an_output_alone_have_no_gradient_that_could_be_wrong(altered):
    case = case_of("bert")
    run = run_case(altered, case, implementation="aside::explicit", tap_gradients=True)
    verdict = verdict_of(case, run)
    assert verdict.status == "agrees", verdict.first_divergence
    weights = [
        row for row in verdict.table if re.fullmatch(r"gradients\.taps\..*attention\.weights", row.tensor)
    ]
    assert {row.note for row in weights} <= {UNUSED}


def test_gradients_of_taps_come_beside_the_others():
    case = case_of("bert")
    request = Request(case.config, case.weights, case.batch, gradients=False, tap_gradients=True)
    with pytest.raises(SpecError, match="'tap_gradients' is true but 'gradients' is false"):
        request.validate()


def test_campaigns_ask_for_gradients_of_taps_where_nobody_has_published_others():
    (job,) = check_jobs(["bert"], ["float32"], cases=["bert-single"])
    published = dataclasses.replace(job, expectation={})
    report = conduct([job, published], ["tests.toys.numpy_backend:SaysWhatItIsAsked"], Setup(threads=1))
    assert [result.detail for result in report.results] == ["tap_gradients=True", "tap_gradients=False"]


# Unused activations, and branches that are cut off.


class Cut(Model):
    """The reference without gradients beyond the taps in `cut`."""

    cut = ()

    def tap(self, name, tensor):
        result = super().tap(name, tensor)
        return self.a.freeze(result, np.ones(result.shape, bool)) if name in self.cut else result


def run_with(case, cut, aside, nothing=np.zeros_like):
    # The gradients of the unused taps `aside` are zero, or what `nothing` makes of them.
    truth = truth_of(case, "float32", model=type("WithACut", (Cut,), {"cut": cut}))
    by_taps = {
        name: truth.tap_gradients.get(name, np.zeros_like(tap))
        for name, tap in truth.taps.items()
        if name != "loss"
    }
    by_taps |= {name: nothing(by_taps[name]) for name in aside}
    return as_run(truth, "float32", info={}, tap_gradients=by_taps)


ATTENTION = tuple(f"layers.1.attention.{step}" for step in ("weights", "masked_scores", "scores"))


@pytest.mark.parametrize(
    "aside",
    [ATTENTION[:1], ("layers.0.norm1", "layers.1.feed_forward.inner", *ATTENTION)],
    ids=len,
)
def test_activation_that_the_model_does_not_go_on_with_is_said_to_be_one(aside):
    case = build_case("bert", "ragged")
    verdict = verdict_of(case, run_with(case, (), aside))
    assert verdict.status == "agrees", verdict.first_divergence
    assert {row.tensor: row.status for row in verdict.table if row.note == UNUSED} == {
        f"gradients.taps.{name}": "not exposed" for name in aside
    }


def test_gradient_by_a_tap_that_is_none_is_left_out():
    case = build_case("bert", "ragged")
    run = run_with(case, (), ATTENTION, lambda gradient: None)
    assert set(wire.returned(run).tap_gradients) == set(run.tap_gradients) - set(ATTENTION)
    verdict = verdict_of(case, run)
    assert verdict.status == "agrees", verdict.first_divergence


@pytest.mark.clause("GRD-6")
@pytest.mark.parametrize("cut", ["attention.weights", "feed_forward.activation", "residual1"])
@pytest.mark.parametrize("aside", [(), ATTENTION[:1]])  # unused activations may occur as well
def test_branch_that_is_cut_off_is_found_where_it_is_cut(cut, aside):
    case = build_case("bert", "ragged")
    verdict = verdict_of(case, run_with(case, (f"layers.0.{cut}",), aside))
    assert verdict.first_divergence.tensor == f"gradients.taps.layers.0.{cut}"
    assert [row.tensor for row in verdict.table if row.note == UNUSED] == [
        f"gradients.taps.{name}" for name in aside
    ]
    if cut == "attention.weights" and not aside:
        verdict = verdict.explained()
        assert verdict.explanation.clause == "ATT-6"
        assert "no gradient at all" in verdict.cause.text
