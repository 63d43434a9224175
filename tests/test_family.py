from dataclasses import replace

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Run
from concord.conformance.judging import family
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.exemptions import DECLARED
from concord.conformance.judging.expectation import JudgedProblem, Pinned
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case, standard_cases
from concord.spec.deviations import KNOWN_DEVIATIONS
from concord.spec.reference import reference
from tests.toys.rounded import declaring, other, put, run_of, truth_of, verdict_of, without
from tests.toys.surroundings import quick_case, sample_of


@pytest.mark.parametrize(
    "rounded",
    sample_of(
        [(case, dtype) for case in standard_cases() for dtype in spec.PRECISIONS],
        lambda place, entry: quick_case(place, entry[0]) and (place // 4 + place) % 8 == 0,
    ),
    ids=lambda entry: f"{entry[0].name}-{entry[1]}",
)
@pytest.mark.parametrize("seed", [100, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (101, 102))])
def test_rounding_is_not_called_a_divergence(rounded, seed):
    # In the quick suite a sample of cases and precisions, in the slow suite all of them.
    case, dtype = rounded
    verdict = verdict_of(case, run_of(case, dtype, Arithmetic(dtype, shuffle=seed)))
    assert verdict.status in (("agrees", "undetermined") if dtype == "float16" else ("agrees",)), (
        verdict.first_divergence
    )
    assert dtype in ("float16", "bfloat16") or all(row.status != "undetermined" for row in verdict.table)


@pytest.mark.parametrize(
    ("variant", "dtype", "least"),
    [("tf1-text-classifier", "float32", 2.0**-8), ("nndl-paddle", "float64", 2.0**-36)],
)
@pytest.mark.parametrize("scenario", ["ragged", "full"])
def test_tolerance_is_a_small_share_of_every_tensor(variant, scenario, dtype, least):
    # A tolerance as large as the tensor would let anything pass.
    case = build_case(variant, scenario)
    problem = JudgedProblem(case.config, case.weights, case.batch, case.part, dtype)
    truth = family.end_to_end(problem).values
    expected = family.local(problem, Pinned({name: truth[name] for name in spec.taps(case.config)}, {}))
    for name, value in expected.values.items():
        if not name.endswith("key.bias"):  # its gradient is zero
            axis = (-2, -1) if value.ndim > 3 else -1 if value.ndim > 2 else None
            largest = np.max(abs(value), axis=axis, keepdims=True)
            assert np.max(Z * expected.sigmas[name] / np.where(largest > 0, largest, np.inf)) < least, name


@pytest.fixture(scope="module")
def case():
    return build_case("bert", "ragged")


@pytest.fixture
def run(case):
    return run_of(case)


def test_beside_an_empty_text_gradients_through_a_length_are_judged():
    # Its vector is zero and is divided by epsilon, which no rounding decides.
    case = build_case("sentence-bert", "ragged")
    run = run_of(case)
    assert not run.taps["pooling"].any(-1).all()
    for name in ("gradients.layers.1.norm2.bias", "gradients.embeddings.norm.weight"):
        wrong = other(run, name, lambda gradient: gradient * np.float32(1.001))
        assert verdict_of(case, wrong).first_divergence.tensor == name


def test_a_large_case_has_the_statuses_of_a_small_one(case, run, monkeypatch):
    usual = verdict_of(case, run)
    monkeypatch.setattr(family, "is_large", lambda case: True)
    first = verdict_of(case, run)
    assert [(row.tensor, row.status) for row in first.table] == [
        (row.tensor, row.status) for row in usual.table
    ]
    far = 100 * max(verdict.row("layers.0.norm1").local.tolerance for verdict in (usual, first))
    wrong = verdict_of(case, other(run, "layers.0.norm1", put((2, 5, 7), lambda x: x + far)))
    assert (wrong.first_divergence.tensor, wrong.first_divergence.deciding.beyond) == ("layers.0.norm1", 1)


def test_verdict_says_where_and_by_how_much(case, run):
    row = verdict_of(case, other(run, "layers.1.norm1", put((2, 5, 7), lambda x: x + 0.25))).first_divergence
    assert (row.tensor, row.clause, row.deciding.element) == ("layers.1.norm1", "NRM-1", (2, 5, 7))
    assert (row.deciding.beyond, row.size, row.axes) == (1, 770, ("batch", "tokens", "d_model"))
    assert row.deciding.breakdown.worst[0].index == (2, 5, 7)
    assert abs(row.deciding.actual - row.deciding.expected - 0.25) < row.deciding.tolerance
    assert abs(row.ratio - 0.25 / row.deciding.tolerance) < 1


# Missing and malformed tensors.

BIAS, WEIGHTS = "gradients.classifier.bias", "layers.0.attention.weights"
EVERYTHING = {"info": {"not_exposed": ["*"]}}

SPOILT = {
    "no number": (lambda run: other(run, BIAS, put(1, np.nan)), {BIAS: "not finite"}),
    "a gradient that is declared away": (
        lambda run: replace(without(run, "gradients.pooler.bias"), **EVERYTHING),
        {"gradients.pooler.bias": "missing"},
    ),
    "an output that is not its tap": (
        lambda run: replace(run, output=2 * run.output),
        {"logits": "the run's output differs from the tap of the same name"},
    ),
    "a loss without its tap": (
        lambda run: replace(without(run, "loss"), loss=2 * run.loss, **EVERYTHING),
        {"loss": ""},
    ),
    "an output without its tap": (
        lambda run: replace(without(run, "logits"), output=run.output * np.float32(1.001)),
        {"logits": ""},
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_what_is_spoilt_diverges_where_it_is(case, run, kind):
    spoil, expected = SPOILT[kind]
    verdict = verdict_of(case, spoil(run))
    wrong = [row for row in verdict.table if row.local is None or row.local.status == "diverges"]
    notes = {row.tensor: row.note for row in wrong if row.status == "diverges"}
    assert notes.keys() == expected.keys()
    assert all(words in notes[name] for name, words in expected.items())
    assert verdict.first_divergence.tensor in expected


def test_what_nothing_was_said_of_is_not_checked(case, run):
    bare = replace(without(run, WEIGHTS), gradients={}, info={})
    verdict = verdict_of(case, bare)
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients",))
    assert verdict.row(WEIGHTS).status == "not exposed"
    gradients = f"all {len(spec.trainable(case.config))} gradients"
    assert verdict.unchecked == f"not checked: the run does not return {WEIGHTS}; {gradients}"


def test_what_was_not_requested_or_is_declared_not_to_be_exposed_is_not_judged(case, run):
    verdict = verdict_of(case, Run(run.output, run.loss, {}, {}, "numpy", "float32", requested=()))
    assert (verdict.passed, [row.tensor for row in verdict.table]) == (True, ["logits", "loss"])
    wrong = replace(run, output=run.output * np.float32(1.001), taps={}, requested=("gradients",))
    first = verdict_of(case, wrong).first_divergence
    assert (first.tensor, first.local) == ("logits", None), "without taps it is judged end to end"
    assert first.end_to_end.breakdown
    hidden = [name for name in run.taps if ".attention." in name and not name.endswith("output")]
    run = without(run, *hidden, "logits", "loss")
    verdict = verdict_of(case, replace(run, info={"not_exposed": ["layers.*.attention.*"]}))
    assert verdict.passed, verdict.first_divergence
    assert verdict.row("layers.1.attention.scores").note == DECLARED
    assert {verdict.row(name).status for name in ("logits", "loss")} == {"agrees"}


# Results that rounding or the range of a precision decides.


def test_out_of_range_is_undetermined():
    case = build_case("tf1-text-classifier", "ragged")
    verdict = verdict_of(case, run_of(case, "float16"))
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients", "logits", "loss"))
    assert verdict.row("layers.0.attention.context").note == "199 elements are not judged: out of range"
    assert verdict.row("layers.0.attention.scores").status == "agrees"


@pytest.mark.clause("GRD-4", "NRM-7")
def test_beyond_a_gradient_that_is_not_finite_only_finite_values_are_compared(small):
    config = small(
        norm_placement="post",
        norm_epsilon_placement="outside",
        qkv_activation="relu",
        embedding_norm=False,
        positions="sinusoidal",
    )
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    weights["layers.0.norm1.weight"][:] = 0.0  # only the feed-forward tells rows of norm2 apart,
    weights["layers.0.feed_forward.outer.weight"][:] = 0.0  # and now nothing does
    weights["layers.0.norm1.bias"][:] = weights["layers.0.feed_forward.outer.bias"][:] = 0.5
    weights["layers.0.attention.value.weight"][:] = 0.0
    weights["layers.0.attention.value.bias"][:] = -1.0  # every ReLU is closed
    problem = JudgedProblem(config, weights, batch)
    run, beyond = run_of(problem), "gradients.layers.0.attention.value.bias"
    assert np.isnan(run.gradients["layers.0.norm1.bias"]).any()
    assert (run.gradients["layers.0.attention.value.bias"] == 0).all()
    assert verdict_of(problem, run).passed
    assert verdict_of(problem, other(run, beyond, lambda gradient: gradient + np.nan)).passed
    assert verdict_of(problem, other(run, beyond, np.ones_like)).first_divergence.tensor == beyond


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradient_that_is_mathematically_zero_is_judged_by_its_own_rounding(case, dtype):
    name, run = "gradients.layers.0.attention.key.bias", run_of(case, dtype)
    assert verdict_of(case, run).passed
    wrong = other(run, name, lambda gradient: gradient + gradient.dtype.type(1e-4))
    assert verdict_of(case, wrong).first_divergence.tensor == name


@pytest.mark.clause("PRT-2")
def test_the_slope_of_a_relu_whose_result_is_pinned_follows_the_result():
    def pinned_to(case, taps):
        return reference(case.config, case.weights, case.batch, gradients=True, pinned=taps)

    case, name = build_case("tf1-text-classifier", "full"), "layers.0.attention.value"
    free = pinned_to(case, {})
    dead = pinned_to(case, {name: np.where(np.arange(7) == 3, 0.0, free.taps[name])})
    assert (dead.gradients[f"{name}.bias"].reshape(2, 7)[:, 3] == 0).all()
    assert (free.gradients[f"{name}.bias"].reshape(2, 7)[:, 3] != 0).any()


# Declared deviations.


@pytest.mark.clause("PRC-4")
def test_deviation_agrees_only_if_it_is_declared():
    case, floor = build_case("vanilla-encoder", "ragged"), ("softmax_floor", -64.0)
    clipped = run_of(case, deviations=dict([floor]))
    assert verdict_of(case, clipped).first_divergence.tensor == WEIGHTS
    assert verdict_of(case, declaring(clipped, *floor)).passed
    declared = declaring(run_of(case), *floor)
    assert verdict_of(case, declared).first_divergence.tensor == WEIGHTS, "it was declared and is not there"


BY_THE_JUDGE = {name for name, deviation in KNOWN_DEVIATIONS.items() if deviation.excuses}


@pytest.mark.clause("PRC-4")
@pytest.mark.parametrize("name", sorted(KNOWN_DEVIATIONS.keys() - {"optimizer_constant_bits"} - BY_THE_JUDGE))
def test_every_deviation_changes_what_the_reference_computes(name):
    # Whoever declares a deviation without effect would be judged by it all the same.
    case = build_case("bert", "ragged", options={"norm_epsilon": 0.3})
    others = {"softmax_floor": -0.5} if name == "padding_left_out" else {}
    value = -0.5 if name.endswith("floor") else 2.0 if name.endswith("bits") else 1.0

    def bits(deviations):
        truth = truth_of(case, "bfloat16", Arithmetic("bfloat16"), deviations=deviations)
        return [array.tobytes() for of in (truth.taps, truth.gradients) for array in of.values()]

    assert bits({**others, name: value}) != bits(others)
