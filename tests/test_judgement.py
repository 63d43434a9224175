"""Tolerances and verdicts: rounding passes, mistakes do not, and the first tensor that is wrong is named."""

import dataclasses
import re

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Run
from concord.conformance import tolerance
from concord.conformance.estimate import Z
from concord.conformance.expectation import Forced, JudgedProblem
from concord.conformance.judging import judge
from concord.spec.cases import build_case, standard_cases
from concord.spec.deviations import KNOWN_DEVIATIONS
from concord.spec.reference import reference
from tests.toys.surroundings import quick_case, sample_of


def run_of(case, dtype="float32", config=None, weights=None, arithmetic=None, shuffle=97):
    """Return what a backend would: the reference in rounded arithmetic, perhaps of another model."""
    truth = reference(
        config or case.config,
        weights or case.weights,
        case.batch,
        gradients=True,
        part=case.part,
        dtype=dtype,
        arithmetic=arithmetic or dtype,
        shuffle=shuffle,
    )
    return as_run(truth, dtype)


def as_run(truth, dtype="float32"):
    """Return a run that holds what the reference computed."""
    taps, gradients = dict(truth.taps), dict(truth.gradients)
    return Run(truth.output, truth.loss, taps, gradients, "numpy", dtype, {"not_exposed": []})


def rounded(case, dtype="float32", **fields):
    """Return what the reference computes of a case in a precision's own arithmetic."""
    return reference(
        case.config, case.weights, case.batch, True, case.part, dtype=dtype, arithmetic=dtype, **fields
    )


def verdict_of(case, run):
    return judge(case.config, case.weights, case.batch, run, case.part)


@pytest.mark.parametrize("dtype", spec.PRECISIONS)
@pytest.mark.parametrize("case", sample_of(standard_cases(), quick_case), ids=lambda case: case.name)
def test_rounding_is_not_called_a_divergence(case, dtype):
    for seed in range(
        100, 103 if dtype in ("float64", "float32") else 101
    ):  # in few bits every run has a tolerance of its own
        verdict = verdict_of(case, run_of(case, dtype, shuffle=seed))
        assert verdict.status in (("agrees", "undetermined") if dtype == "float16" else ("agrees",)), (
            verdict.first_divergence
        )
        assert dtype in ("float16", "bfloat16") or not [
            row.tensor for row in verdict.table if row.status == "undetermined"
        ]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "case", standard_cases(["tf1-text-classifier", "nndl-paddle"]), ids=lambda case: case.name
)
def test_tolerance_is_a_small_share_of_every_tensor(case, dtype):
    """A tolerance as large as the tensor would let anything pass."""
    asked = JudgedProblem(case.config, case.weights, case.batch, case.part, dtype)
    truth = tolerance.end_to_end(asked).values
    taps = {
        name: value for name, value in truth.items() if not name.startswith("gradients.") and name != "loss"
    }
    expectation = tolerance.local(asked, Forced(taps, {}))
    for name, value in expectation.values.items():
        flat = name.endswith("key.bias") or (
            name.startswith("gradients.") and case.scenario in ("peaked", "tiny", "offset")
        )
        if not flat:
            heads = name.endswith(
                ("query", "key", "value")
            )  # of width 1 in some case: a row is that of all heads
            largest = np.max(
                abs(value), axis=((-2, -1) if heads else -1) if value.ndim > 2 else None, keepdims=True
            )
            share = np.max(Z * expectation.sigmas[name] / np.where(largest > 0, largest, np.inf))
            # A softmax by its logarithm errs by as much as the score that is taken off was rounded (SPEC
            # ALG-1).
            scores = (
                abs(truth[name.replace("weights", "scores")]).max()
                if name.endswith("attention.weights")
                else 0.0
            )
            assert share < max(
                2.0**-36 if dtype == "float64" else 2.0**-8,
                2 * Z * scores * spec.precision(dtype).unit_roundoff,
            ), name


@pytest.fixture
def sound():
    case = build_case("bert", "ragged")
    return case, run_of(case)


def test_beside_an_empty_text_gradients_through_a_length_are_judged():
    """Its vector is zero, and divided by epsilon: no rounding decides that."""
    case = build_case("sentence-bert", "ragged")
    run = run_of(case)
    assert not run.taps["pooling"].any(-1).all()
    for name in ("layers.1.norm2.bias", "embeddings.norm.weight"):
        wrong = dataclasses.replace(
            run, gradients={**run.gradients, name: run.gradients[name] * np.float32(1.001)}
        )
        assert verdict_of(case, wrong).first_divergence.tensor == f"gradients.{name}"


def test_a_large_case_is_judged_by_a_first_look_where_that_is_enough(sound, monkeypatch):
    case, run = sound
    usual, looks, exactly = verdict_of(case, run), [], tolerance.local_exactly
    monkeypatch.setattr(tolerance, "is_large", lambda case: True)
    monkeypatch.setattr(
        tolerance,
        "local_exactly",
        lambda case, forced, brief=False: looks.append(brief) or exactly(case, forced, brief),
    )
    first = verdict_of(case, run)
    assert (first.status, looks) == ("agrees", [True])
    for row, same in zip(first.table, usual.table, strict=True):
        assert (row.tensor, row.status) == (same.tensor, same.status)
    run.taps["layers.0.norm1"] = run.taps["layers.0.norm1"].copy()
    run.taps["layers.0.norm1"][2, 5, 7] += 100 * max(
        row_of(found, "layers.0.norm1").tolerance for found in (usual, first)
    )
    wrong = verdict_of(case, run)
    assert (wrong.first_divergence.tensor, wrong.first_divergence.beyond, looks) == (
        "layers.0.norm1",
        1,
        [True, True, False],
    )


def row_of(verdict, tensor):
    return next(row for row in verdict.table if row.tensor == tensor)


def test_verdict_says_where_and_by_how_much(sound):
    case, run = sound
    run.taps["layers.1.norm1"] = run.taps["layers.1.norm1"].copy()
    run.taps["layers.1.norm1"][2, 5, 7] += 0.25
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.clause, row.element, row.beyond, row.size) == (
        "layers.1.norm1",
        "NRM-1",
        (2, 5, 7),
        1,
        770,
    )
    assert abs(row.actual - row.expected - 0.25) < row.tolerance
    assert abs(row.ratio - 0.25 / row.tolerance) < 1


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_value_that_is_not_finite_diverges(sound, bad):
    case, run = sound
    run.gradients["classifier.bias"] = np.array([0.1, bad, 0.2], np.float32)
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.ratio, row.note) == ("gradients.classifier.bias", np.inf, "not finite")


def test_what_is_missing_diverges(sound):
    case, run = sound
    del run.taps["layers.0.attention.weights"]
    del run.gradients["pooler.bias"]
    verdict = verdict_of(case, run)
    assert verdict.first_divergence.tensor == "layers.0.attention.weights"
    assert "missing" in verdict.first_divergence.note
    assert [row.tensor for row in verdict.table if row.status == "diverges"] == [
        "layers.0.attention.weights",
        "gradients.pooler.bias",
    ]


def test_what_nothing_was_said_of_is_not_checked(sound):
    case, run = sound
    del run.taps["layers.0.attention.weights"], run.info["not_exposed"]
    run.gradients.clear()
    verdict = verdict_of(case, run)
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients",))
    assert verdict.row("layers.0.attention.weights").status == "not exposed"
    assert verdict.unchecked == (
        f"not checked, since not delivered: layers.0.attention.weights; all "
        f"{len(spec.trainable(case.config))} gradients"
    )


def test_what_was_not_requested_is_not_judged(sound):
    case, run = sound
    bare = Run(run.output, run.loss, {}, {}, "numpy", "float32", requested=())
    verdict = verdict_of(case, bare)
    assert verdict.passed
    assert [row.tensor for row in verdict.table] == ["logits", "loss"]


def test_tap_that_a_backend_declares_it_has_not_is_not_exposed(sound):
    case, run = sound
    for name in list(run.taps):
        if ".attention." in name and not name.endswith("output"):
            del run.taps[name]
    run.info["not_exposed"] = ["layers.*.attention.*"]
    verdict = verdict_of(case, run)
    assert verdict.passed
    assert verdict.row("layers.1.attention.scores").status == "not exposed"
    run.gradients.pop("pooler.bias")
    run.info["not_exposed"] = ["*"]
    assert verdict_of(case, run).first_divergence.tensor == "gradients.pooler.bias", (
        "a gradient cannot be declared away"
    )


def test_result_that_is_not_its_tap_diverges(sound):
    case, run = sound
    run.output = 2 * run.output
    row = verdict_of(case, run).first_divergence
    assert (row.tensor, row.note) == ("logits", "the run's output is not its tap of this name")
    run.info["not_exposed"] = ["*"]
    run.taps.pop("loss")
    run.loss = 2 * run.loss
    assert {row.tensor for row in verdict_of(case, run).table if row.status == "diverges"} == {
        "logits",
        "loss",
    }


def test_result_without_its_tap_is_judged_as_the_result_that_it_is(sound):
    case, run = sound
    del run.taps["logits"], run.taps["loss"]
    verdict = verdict_of(case, run)
    assert verdict.passed, verdict.first_divergence
    assert {verdict.row(name).status for name in ("logits", "loss")} == {"agrees"}
    wrong = verdict_of(case, dataclasses.replace(run, output=run.output * np.float32(1.001)))
    assert [row.tensor for row in wrong.table if row.local and row.local.status == "diverges"] == ["logits"]


@pytest.mark.clause("PRC-3")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_run_in_another_precision_than_asked_diverges(sound, dtype):
    case, run = sound
    run.dtype = dtype
    assert "it was computed in a wider one" in verdict_of(case, run).first_divergence.note


def test_out_of_range_is_undetermined():
    case = build_case("tf1-text-classifier", "ragged")
    verdict = verdict_of(case, run_of(case, "float16"))
    assert (verdict.status, verdict.unjudged) == ("undetermined", ("gradients",))
    assert verdict.row("layers.0.attention.context").note == "392 elements are not judged: out of range"
    assert verdict.row("gradients.layers.0.attention.key.weight").status == "undetermined"
    assert verdict.row("layers.0.attention.scores").status == "agrees"


@pytest.mark.clause("GRD-4")
@pytest.mark.clause("NRM-7")
def test_beyond_a_gradient_that_is_not_finite_only_finite_values_are_compared(small):
    config = small(
        norm_placement="post",
        norm_epsilon_placement="outside",
        qkv_activation="relu",
        embedding_norm=False,
        positions="sinusoidal",
    )
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    weights["layers.0.norm1.weight"][:] = 0.0  # then norm2 sees rows that only the feed-forward tells apart,
    weights["layers.0.feed_forward.outer.weight"][:] = 0.0  # and now nothing
    weights["layers.0.norm1.bias"][:] = weights["layers.0.feed_forward.outer.bias"][:] = 0.5
    weights["layers.0.attention.value.weight"][:] = 0.0
    weights["layers.0.attention.value.bias"][:] = -1.0  # a ReLU that is closed for all
    truth = reference(config, weights, batch, gradients=True, dtype="float32", arithmetic="float32")
    run = Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", "float32")
    beyond = "layers.0.attention.value.bias"
    assert np.isnan(run.gradients["layers.0.norm1.bias"]).any()
    assert (run.gradients[beyond] == 0).all()
    assert judge(config, weights, batch, run).passed
    multiplied = dataclasses.replace(
        run, gradients={**run.gradients, beyond: np.full_like(run.gradients[beyond], np.nan)}
    )
    assert judge(config, weights, batch, multiplied).passed
    wrong = dataclasses.replace(run, gradients={**run.gradients, beyond: np.ones_like(run.gradients[beyond])})
    assert judge(config, weights, batch, wrong).first_divergence.tensor == f"gradients.{beyond}"


def test_gradient_that_is_mathematically_zero_is_judged_by_its_own_rounding():
    case = build_case("bert", "ragged")
    for dtype in ("float64", "float32"):
        run = run_of(case, dtype)
        assert verdict_of(case, run).passed
        run.gradients["layers.0.attention.key.bias"] = run.gradients[
            "layers.0.attention.key.bias"
        ] + run.output.dtype.type(1e-4)
        assert verdict_of(case, run).first_divergence.tensor == "gradients.layers.0.attention.key.bias"


# Locally and end to end.


def wrong_scores(case, dtype="float32"):
    """Return a run that errs in one step only.

    The scores of its last layer are off by one part in a thousand.
    """
    run = run_of(case, dtype)
    name = f"layers.{case.config.num_layers - 1}.attention.scores"
    wrong = run.taps[name] * run.output.dtype.type(1.001)
    truth = rounded(case, dtype, forced={**before(run, name), name: wrong})
    taps = {**truth.taps, **before(run, name), name: wrong}
    return name, Run(
        taps["logits"], taps["loss"], taps, dict(truth.gradients), "numpy", dtype, {"not_exposed": []}
    )


def before(run, name):
    names = list(run.taps)
    return {other: run.taps[other] for other in names[: names.index(name)]}


@pytest.mark.clause("PRT-2")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_only_the_step_that_erred_diverges_locally_and_all_that_follows_end_to_end(dtype):
    case = build_case("bert", "ragged")
    name, run = wrong_scores(case, dtype)
    table = verdict_of(case, run).table
    assert [row.tensor for row in table if row.local.status == "diverges"] == [name]
    follows = [row.tensor for row in table].index(name)
    assert all(row.end_to_end.status == "agrees" for row in table[:follows])
    arrived = [row for row in table[follows:] if not row.tensor.startswith("gradients.")]
    assert all(row.end_to_end.status == "diverges" for row in arrived)


@pytest.mark.clause("PRT-2")
def test_forced_taps_are_gone_on_from_and_gradients_flow_by_them():
    case = build_case("nndl-paddle", "ragged")
    free = reference(case.config, case.weights, case.batch, gradients=True)
    forced = reference(case.config, case.weights, case.batch, gradients=True, forced=free.taps)
    for name, tap in free.taps.items():
        assert np.array_equal(forced.taps[name], tap), name
    for name, gradient in free.gradients.items():
        assert np.array_equal(forced.gradients[name], gradient), name
    inner = "layers.0.feed_forward.inner"
    moved = reference(
        case.config, case.weights, case.batch, gradients=True, forced={inner: -free.taps[inner]}
    )
    assert np.array_equal(moved.taps[inner], free.taps[inner])
    assert np.array_equal(moved.taps["layers.0.feed_forward.activation"], np.maximum(-free.taps[inner], 0))
    assert not np.array_equal(
        moved.gradients["layers.0.feed_forward.outer.weight"],
        free.gradients["layers.0.feed_forward.outer.weight"],
    )


@pytest.mark.clause("PRT-2")
def test_slope_of_a_relu_whose_result_is_forced_follows_the_result():
    case = build_case("tf1-text-classifier", "full")
    free = reference(case.config, case.weights, case.batch, gradients=True)
    name = "layers.0.attention.value"
    dead = {name: np.where(np.arange(7) == 3, 0.0, free.taps[name])}
    gradient = (
        reference(case.config, case.weights, case.batch, gradients=True, forced=dead)
        .gradients[f"{name}.bias"]
        .reshape(2, 7)
    )
    assert (gradient[:, 3] == 0).all()
    assert (free.gradients[f"{name}.bias"].reshape(2, 7)[:, 3] != 0).any()


def test_without_taps_a_run_is_judged_end_to_end(sound):
    case, run = sound
    bare = Run(
        run.output * np.float32(1.001),
        run.loss,
        {},
        run.gradients,
        "numpy",
        "float32",
        requested=("gradients",),
    )
    verdict = verdict_of(case, bare)
    assert verdict.first_divergence.tensor == "logits"
    assert verdict.first_divergence.local is None


def test_end_to_end_says_nothing_from_where_rounding_may_have_grown_too_large():
    case = build_case("bert", "peaked")
    weights = {
        name: array * (4.0 if name.endswith(("query.weight", "key.weight")) else 1.0)
        for name, array in case.weights.items()
    }
    case = dataclasses.replace(case, weights=weights)
    table = verdict_of(case, run_of(case, "bfloat16")).table
    taps = [row for row in table if not row.tensor.startswith("gradients.")]
    statuses = [row.end_to_end.status for row in taps]
    first = statuses.index("undetermined")
    assert taps[first].tensor.startswith("layers.0.attention.")
    assert set(statuses[first:]) == {"undetermined"}
    assert {row.local.status for row in taps} == {"agrees"}, "each step is still judged"


# Declared deviations.


def clipped(case, dtype="float32"):
    """Return what a framework computes whose softmax clips."""
    return as_run(rounded(case, dtype, deviations={"softmax_floor": -64.0}), dtype)


FLOOR = {"name": "softmax_floor", "value": -64.0, "reason": "the kernel clips"}


@pytest.mark.clause("PRC-4")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_deviation_agrees_only_if_it_is_declared(dtype):
    case = build_case("vanilla-encoder", "ragged")
    run = clipped(case, dtype)
    assert verdict_of(case, run).first_divergence.tensor == "layers.0.attention.weights"
    run.info["deviations"] = [FLOOR]
    assert verdict_of(case, run).passed
    sound = run_of(case, dtype)
    sound.info["deviations"] = [FLOOR]
    assert verdict_of(case, sound).first_divergence.tensor == "layers.0.attention.weights", (
        "it was declared and is not there"
    )


BY_TRAINING = {"optimizer_constant_bits"}
BY_THE_JUDGE = {
    name for name, known in KNOWN_DEVIATIONS.items() if known.excuses
}  # tests/test_declarations.py
VALUES = {
    "softmax_floor": -0.5,
    "log_softmax_floor": -0.5,
    "norm_epsilon_bits": 2.0,
    "gelu_constant_bits": 2.0,
}


@pytest.mark.clause("PRC-4")
@pytest.mark.parametrize("name", sorted(KNOWN_DEVIATIONS.keys() - BY_TRAINING - BY_THE_JUDGE))
def test_every_deviation_changes_what_the_reference_computes(name):
    """One that nothing follows would judge whoever declares it by what it said it does not do."""
    case = build_case("bert", "ragged", options={"norm_epsilon": 0.3})
    others = {"softmax_floor": -0.5} if name == "padding_left_out" else {}

    def bits(deviations):
        truth = rounded(case, "bfloat16", deviations=deviations)
        tensors = truth.taps | {f"gradients.{n}": g for n, g in truth.gradients.items()}
        return {tensor: array.tobytes() for tensor, array in tensors.items()}

    assert bits({**others, name: VALUES.get(name, 1.0)}) != bits(others)


@pytest.mark.clause("PRC-2", "PRC-4")
def test_bias_gradients_summed_in_bfloat16_agree_only_if_that_is_declared():
    """What is less than half of a sum's last bit is lost, however often it comes."""
    config = spec.variant(
        "bert", vocab_size=23, max_positions=41, d_model=10, num_heads=2, d_ff=17, num_layers=1, num_classes=3
    )
    batch = spec.example_batch(config, batch=17, tokens=41, seed=0, part="attention")
    cotangent = np.full_like(batch.cotangent, 2.0**-8 - 2.0**-14)
    cotangent[0, 0] = 1.0
    batch = dataclasses.replace(batch, cotangent=cotangent)
    case = JudgedProblem(
        config, spec.initialize(config, seed=0, part="attention"), batch, "attention", "bfloat16"
    )
    bias = "attention.output.bias"
    narrow = {"narrow_bias_gradients": 1.0}
    truth = rounded(case, "bfloat16", deviations=narrow)
    assert truth.gradients[bias].tolist() == [1.0] * 10
    run = as_run(truth, "bfloat16")
    assert verdict_of(case, run).first_divergence.tensor == f"gradients.{bias}"
    run.info["deviations"] = [
        {"name": "narrow_bias_gradients", "value": 1, "reason": "the kernel adds term by term"}
    ]
    assert verdict_of(case, run).passed


def test_tf32_run_agrees_by_its_own_rules_and_diverges_by_those_of_float32():
    case = build_case("bert", "ragged")
    run = run_of(case, "float32", arithmetic="tf32")
    assert judge(case.config, case.weights, case.batch, run, dtype="tf32").passed
    assert verdict_of(case, run).first_divergence.tensor == "layers.0.attention.query"


# Gradients that rounding decides.


def test_gradient_of_which_rounding_leaves_no_digit_is_undetermined_in_a_half_precision(small):
    config = small("bert", pooling="first")
    weights, batch = spec.initialize(config), spec.example_batch(config, 7, 11)
    for name in ("query", "key"):
        weights[f"layers.0.attention.{name}.weight"] *= 3000.0  # a softmax with but one weight
    truth = reference(config, weights, batch, gradients=True, dtype="bfloat16", arithmetic="bfloat16")
    run = Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", "bfloat16")
    statuses = {row.tensor: row.status for row in judge(config, weights, batch, run).table}
    assert statuses["gradients.layers.0.attention.query.weight"] == "undetermined"
    assert statuses["gradients.layers.0.attention.value.weight"] == "agrees"
    assert (
        statuses["gradients.layers.1.attention.key.bias"] == "agrees"
    )  # zero in exact arithmetic: rounding is judged
    single = Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", "float32")
    assert (
        judge(config, weights, batch, single).row("gradients.layers.0.attention.query.weight").status
        != "undetermined"
    )


def test_a_verdict_prints_what_the_terminal_says(sound):
    case, run = sound
    told = str(judge(case.config, case.weights, case.batch, run, end_to_end=False))
    assert re.fullmatch(r"agrees: of \d+ tensors \S+ comes nearest to its tolerance, 0\.\d\d", told), told
    wrong = {**run.taps, "layers.0.norm1": run.taps["layers.0.norm1"] + 1}
    told = str(
        judge(case.config, case.weights, case.batch, dataclasses.replace(run, taps=wrong), end_to_end=False)
    ).splitlines()
    assert told[0] == "diverges"
    assert told[1].startswith("  first at layers.0.norm1 (SPEC NRM-2), element (")
    assert re.fullmatch(r"  \d+ of \d+ tensors lie beyond their tolerance", told[-2])
    assert told[-1].startswith("  next: ")
