"""Allowances and verdicts: rounding passes, mistakes do not, and the first tensor that is wrong is named."""

import dataclasses

import numpy as np
import pytest

import spec
from backends.interface import Run
from conformance.comparison import judge
from conformance.tolerance import Z, expect
from spec.cases import SCENARIOS, build_case, standard_cases
from spec.reference import reference


def run_of(case, dtype="float32", config=None, weights=None, arithmetic=None, shuffle=97):
    """Return what a backend would: the reference in rounded arithmetic, perhaps of another model."""
    truth = reference(
        config or case.config, weights or case.weights, case.batch, gradients=True, part=case.part,
        dtype=dtype, arithmetic=arithmetic or dtype, shuffle=shuffle,
    )  # fmt: skip
    return Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", dtype)


def verdict_of(case, run):
    return judge(case.config, case.weights, case.batch, run, case.part)


@pytest.mark.parametrize("dtype", spec.PRECISIONS)
@pytest.mark.parametrize("case", standard_cases(), ids=lambda case: case.name)
def test_rounding_is_not_called_a_divergence(case, dtype):
    for seed in range(100, 103):
        verdict = verdict_of(case, run_of(case, dtype, shuffle=seed))
        assert verdict.status in (("agrees", "undetermined") if dtype == "float16" else ("agrees",)), verdict.first_divergence


MISTAKES = {
    "gelu tanh for erf": ("bert", {"activation": "gelu_tanh"}, "layers.0.feed_forward.activation"),
    "gelu erf for tanh": ("bert-pytorch", {"activation": "gelu_erf"}, "layers.0.feed_forward.activation"),
    "biased for unbiased": ("bert-pytorch", {"norm_variance": "biased"}, "layers.0.norm1"),
    "unbiased for biased": ("keras-attention", {"norm_variance": "unbiased"}, "layers.0.norm1"),
    "epsilon inside": ("bert-pytorch", {"norm_epsilon_placement": "inside"}, "layers.0.norm1"),
    "epsilon outside": ("bert", {"norm_epsilon_placement": "outside"}, "embeddings.norm"),
    "epsilon 1e-5 for 1e-12": ("bert", {"norm_epsilon": 1e-5}, "embeddings.norm"),
    "epsilon 1e-6 for 1e-5": ("nndl-paddle", {"norm_epsilon": 1e-6}, "embeddings.norm"),
    "epsilon 1e-12 for 1e-8": ("tf1-text-classifier", {"norm_epsilon": 1e-12}, "layers.0.norm1"),
    "mask -1e9 for -1e4": ("vanilla-encoder", {"mask_value": -1e9}, "layers.0.attention.masked_scores"),
    "mask -1e4 for -1e9": ("nndl-paddle", {"mask_value": -1e4}, "layers.0.attention.masked_scores"),
    "added for replaced": ("bert-pytorch", {"mask_fill": "add"}, None),
    "no embedding scale": ("nndl-paddle", {"embedding_scale": "one"}, "embeddings.token"),
    "padding row used": ("nndl-paddle", {"token_padding_forward": "stored"}, "embeddings.token"),
    "positions from one": ("bert", {"position_start": 1}, "embeddings.position"),
    "padding is counted": ("keras-attention", {"position_of_padding": "counted"}, "embeddings.position"),
    "no qkv activation": ("tf1-text-classifier", {"qkv_activation": "none"}, "layers.0.attention.query"),
    "queries not overwritten": ("tf1-text-classifier", {"query_mask": "none"}, "layers.0.attention.masked_weights"),
    "post-norm for pre": ("bert-pytorch", {"norm_placement": "post"}, "layers.0.norm1"),
    "masks of the right sample": ("keras-attention", {"mask_assignment": "per_sample"}, "layers.0.attention.masked_scores"),
    "trained padding row": ("bert-pytorch", {"token_padding_row": None}, "gradients.embeddings.token.weight"),
    "frozen row": ("tf1-text-classifier", {"token_padding_row": 0}, "gradients.embeddings.token.weight"),
    "no l2": ("tf1-text-classifier", {"l2_weight": 0.0}, "loss"),
    "counted label": ("bert-pytorch", {"ignore_label": None}, "loss"),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_option_is_found_at_its_first_tensor(mistake, dtype):
    name, fields, first = MISTAKES[mistake]
    found = []
    for scenario, entry in SCENARIOS.items():
        if entry.only and name not in entry.only:
            continue
        case = build_case(name, scenario)
        wrong = dataclasses.replace(case.config, **fields)
        verdict = verdict_of(case, run_of(case, dtype, config=wrong))
        if verdict.first_divergence:
            found.append(verdict.first_divergence.tensor)
    # An additive mask shows where every key is masked; in float32 it is absorbed there, and in float64 it shows at once.
    if mistake == "added for replaced":
        assert found
    else:
        assert first in found
        assert set(found) == {first} or mistake.startswith("epsilon") or mistake == "post-norm for pre", found


def change_weight(case, name, change):
    return {**case.weights, name: change(case.weights[name].copy())}


WEIGHT_MISTAKES = {
    "transposed": ("layers.0.attention.key.weight", lambda w: w.T, "layers.0.attention.key"),
    "a bias missing": ("layers.0.feed_forward.outer.bias", lambda w: 0 * w, "layers.0.feed_forward.outer"),
    "two rows swapped": ("layers.0.attention.value.weight", lambda w: w[[1, 0, *range(2, 14)]], "layers.0.attention.value"),
    "one element in bfloat16": (
        "layers.0.attention.output.weight",
        lambda w: np.where(np.arange(w.size).reshape(w.shape) == 30, spec.precision("bfloat16").round(w), w),
        "layers.0.attention.output",
    ),
    "heads permuted": ("layers.0.attention.query.weight", lambda w: np.concatenate([w[:, 7:], w[:, :7]], 1), "layers.0.attention.query"),
}


@pytest.mark.parametrize("mistake", WEIGHT_MISTAKES)
def test_wrong_weight_is_found_at_its_first_tensor(mistake):
    name, change, first = WEIGHT_MISTAKES[mistake]
    case = build_case("nndl-paddle", "ragged")
    verdict = verdict_of(case, run_of(case, weights=change_weight(case, name, change)))
    assert verdict.first_divergence.tensor == first
    assert verdict.first_divergence.clause == spec.clause_of(case.config, first)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("case", standard_cases(["tf1-text-classifier", "nndl-paddle"]), ids=lambda case: case.name)
def test_allowance_is_a_small_share_of_every_tensor(case, dtype):
    """An allowance as large as the tensor would let anything pass."""
    expectation = expect(case.config, case.weights, case.batch, case.part, dtype)
    for name, value in expectation.values.items():
        if case.scenario in ("ragged", "full", "peaked") and not name.endswith("key.bias"):
            largest = np.max(abs(value), axis=-1 if value.ndim > 2 else None, keepdims=True)
            share = np.max(Z * expectation.sigmas[name] / np.where(largest > 0, largest, np.inf))
            assert share < (1e-11 if dtype == "float64" else 1e-2), name


@pytest.fixture
def sound():
    case = build_case("bert", "ragged")
    return case, run_of(case)


def test_verdict_says_where_and_by_how_much(sound):
    case, run = sound
    run.taps["layers.1.norm1"] = run.taps["layers.1.norm1"].copy()
    run.taps["layers.1.norm1"][2, 5, 7] += 0.25
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.clause, row.element, row.beyond, row.size) == ("layers.1.norm1", "NRM-1", (2, 5, 7), 1, 770)
    assert row.actual - row.expected == pytest.approx(0.25, abs=1e-5)
    assert row.ratio == pytest.approx(0.25 / row.allowance, rel=1e-3)


def test_verdict_passes_a_sound_run(sound):
    verdict = verdict_of(*sound)
    assert verdict.passed
    assert verdict.first_divergence is None
    assert 0 < verdict.worst < 1
    assert [row.tensor for row in verdict.table][:2] == ["embeddings.token", "embeddings.position"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_diverges(sound, bad):
    case, run = sound
    run.gradients["classifier.bias"] = np.array([0.1, bad, 0.2], np.float32)
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.ratio, row.note) == ("gradients.classifier.bias", np.inf, "not finite")


def test_what_is_missing_diverges(sound):
    case, run = sound
    del run.taps["layers.0.attention.weights"]
    run.gradients.clear()
    verdict = verdict_of(case, run)
    assert verdict.first_divergence.tensor == "layers.0.attention.weights"
    assert "missing" in verdict.first_divergence.note
    assert sum(row.status == "diverges" for row in verdict.table) == 1 + len(spec.trainable(case.config))


def test_what_was_not_requested_is_not_judged(sound):
    case, run = sound
    bare = Run(run.output, run.loss, {}, {}, "numpy", "float32", requested=())
    verdict = verdict_of(case, bare)
    assert verdict.passed
    assert [row.tensor for row in verdict.table] == ["logits", "loss"]


def test_tap_that_a_backend_declares_it_has_not_is_undelivered(sound):
    case, run = sound
    for name in list(run.taps):
        if ".attention." in name and not name.endswith("output"):
            del run.taps[name]
    run.info["undelivered_taps"] = ["layers.*.attention.*"]
    verdict = verdict_of(case, run)
    assert verdict.passed
    assert verdict.row("layers.1.attention.scores").status == "undelivered"
    run.gradients.pop("pooler.bias")
    run.info["undelivered_taps"] = ["*"]
    assert verdict_of(case, run).first_divergence.tensor == "gradients.pooler.bias", "a gradient cannot be declared away"


def test_result_that_is_not_its_tap_diverges(sound):
    case, run = sound
    run.output = 2 * run.output
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.note) == ("logits", "the run's output is not its tap of this name")
    run.info["undelivered_taps"] = ["*"]
    run.taps.pop("loss")
    assert {row.tensor for row in verdict_of(case, run).table if row.status == "diverges"} == {"logits", "loss"}


def test_wrong_shape_diverges(sound):
    case, run = sound
    run.taps["logits"] = run.taps["logits"].T
    assert verdict_of(case, run).first_divergence.note == "has shape (3, 5) but must be (5, 3)"


@pytest.mark.clause("PRC-3")
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_run_in_another_precision_than_asked_diverges(sound, dtype):
    case, run = sound
    run.dtype = dtype
    note = verdict_of(case, run).first_divergence.note
    assert "has dtype float32 but must be float64" in note or "computed in a wider precision" in note


def test_out_of_range_is_undetermined():
    case = build_case("tf1-text-classifier", "ragged")
    verdict = verdict_of(case, run_of(case, "float16"))
    assert verdict.status == "agrees"
    assert verdict.row("layers.0.attention.context").note == "392 elements are undetermined: out of range"
    assert verdict.row("gradients.layers.0.attention.key.weight").status == "undetermined"
    assert verdict.row("layers.0.attention.scores").status == "agrees"


@pytest.mark.clause("GRD-4")
def test_gradient_that_is_mathematically_zero_is_judged_by_its_own_rounding():
    case = build_case("bert", "ragged")
    for dtype in ("float64", "float32"):
        run = run_of(case, dtype)
        assert verdict_of(case, run).passed
        run.gradients["layers.0.attention.key.bias"] = run.gradients["layers.0.attention.key.bias"] + run.output.dtype.type(1e-4)
        assert verdict_of(case, run).first_divergence.tensor == "gradients.layers.0.attention.key.bias"
