"""Causes: what is wrong is named, and nothing is named that is not so."""

import dataclasses
import math

import numpy as np
import pytest

from concord.conformance.bugs.catalogue import ALL, BUGS
from concord.conformance.expectation import JudgedProblem as Judged
from concord.conformance.explain import Cause
from concord.conformance.explain.hypothesis import RIGHT
from concord.conformance.explain.question import Question
from concord.spec.arithmetic import Arithmetic
from concord.spec.cases import build_case, standard_cases
from concord.spec.reference import compute
from tests.toys.ports import SCORES, SOUND, WEIGHTS, option, run_of, run_with, step, verdict_of
from tests.toys.surroundings import quick_case, sample_of

WORDS = {
    "norm_epsilon_1e5_for_1e12": "norm_epsilon = 1e-05 instead of 1e-12 (NRM-2)",
    "norm_epsilon_outside": "norm_epsilon_placement = outside instead of inside (NRM-3)",
    "norm_variance_biased": "norm_variance = biased instead of unbiased (NRM-4)",
    "norm_post_for_pre": "norm_placement = post instead of pre (NRM-1)",
    "norm_shared_for_separate": "gain and offset of `layers.0.norm1` instead of its own (NRM-5)",
    "gelu_tanh_for_erf": "activation = gelu_tanh instead of gelu_erf (FFN-2)",
    "mask_constant_1e4_for_1e9": "mask_value = -10000 instead of -1000000000 (MSK-2)",
    "mask_added_for_replaced": "mask_fill = add instead of replace (MSK-3)",
    "mask_of_wrong_sample": "mask_assignment = batch_major instead of per_sample (MSK-7)",
    "query_relu_missing": "qkv_activation = none instead of relu",
    "embedding_scale_missing": "embedding_scale = one instead of sqrt_d_model (EMB-2)",
    "embedding_padding_row_used": "token_padding_forward = stored instead of zero (EMB-3)",
    "position_off_by_one": "positions that are 1 too high (POS-5)",
    "position_exponent_by_column": "position_exponent = column instead of pair (POS-3)",
    "position_halves_for_interleaved": "position_layout = halves instead of interleaved (POS-2)",
    "loss_ignored_label_counted": "ignore_label = absent instead of 1 (LOS-3)",
    "loss_l2_missing": "l2_weight = 0 instead of 0.1 (LOS-4)",
    "padding_row_trained": "token_padding_row = absent instead of 1 (EMB-4)",
    "segment_padding_row_trained": "segment_padding_row = absent instead of 0 (EMB-5)",
    "weight_transposed": "transposed (WGT-2)",
    "weight_column_major": "read in the wrong memory order",
    "weight_bias_missing": "left out",
    "weight_query_and_key_swapped": "the weights of `layers.0.attention.key` instead of its own (WGT-1)",
    "weight_stale_layer": "the weights of `layers.0.attention.query` instead of its own (WGT-1)",
    "weight_heads_permuted": "heads in the order",
    "weight_rows_swapped": "having changed places",
    "weight_element_off": "being",
    "weight_through_float16": "rounded to float16",
    "norm_in_bfloat16": "a step that was computed in bfloat16 (PRC-2)",
    "norm_variance_by_squares": "a variance computed as E[x²] - E[x]² (NRM-2)",
    "tf32_everywhere": "products whose factors are rounded to 11 bits, as TF32 and float16 have (PRC-2)",
    "tf32_in_scores": "products whose factors are rounded to 11 bits, as TF32 and float16 have (PRC-2)",
    "residual_stored_in_bfloat16": "numbers that were rounded to bfloat16 (PRC-2)",
    **{
        name: f"{BUGS[name].text} ({BUGS[name].clause})"
        for name in (
            *(
                "norm_gain_missing",
                "norm_mean_kept",
                "norm_variance_detached",
                "norm_mean_detached",
                "gelu_quick",
            ),
            *("mask_off_by_one", "mask_inverted", "mask_causal_too", "mask_by_length", "mask_minus_infinity"),
            *(
                "embedding_segments_ignored",
                "loss_label_smoothing",
                "loss_sum_for_mean",
                "loss_gradient_of_sum",
            ),
            *("score_scale_missing", "score_scale_of_d_model", "score_scale_after_mask"),
            *("softmax_over_queries", "heads_split_by_reshape", "residual_missing"),
            *("residual_of_normed_input", "pooling_last_token", "pooling_mean"),
        )
    },
}
"""What is said of bugs: of those that are tried as they are, their own sentence."""


@pytest.mark.parametrize("name", sample_of(WORDS, lambda place, _: place % 2 == 0))
def test_the_cause_is_named(name):
    bug = BUGS[name]
    case = build_case(bug.variant, bug.scenario, options=dict(bug.options))
    dtype = bug.precisions[list(WORDS).index(name) % len(bug.precisions)]
    verdict = verdict_of(case, run_with(bug, case, dtype))
    cause = verdict.cause
    assert cause is not None, verdict.first_divergence
    assert bug.diagnosed(cause.hypothesis) == "right", cause
    assert WORDS[name] in cause.text
    sure = "is" if cause.confident else "may be"
    assert f"`{verdict.first_divergence.tensor}` {sure} explained by" in cause.text


USUAL = [case for case in standard_cases() if case.scenario != "long"]
NAMED = [bug for bug in ALL if bug.cause and bug.precisions and not bug.after]


def wrongly_sure(case, meetings):
    """Return the bugs, each met in a precision, that are given another's name with confidence in a case."""
    found = []
    for bug, dtype in meetings:
        run = run_with(bug, case, dtype)
        cause = verdict_of(case, run).cause if run else None
        if cause and cause.confident and bug.diagnosed(cause.hypothesis) != "right":
            found.append(f"{case.name}, {dtype}: {bug.name} is taken for {cause}")
    return found


@pytest.mark.parametrize("place", range(0, len(USUAL), 8))
def test_no_fault_is_taken_for_another(place):
    """A sample of the whole table: some of the cases meet some of the bugs."""
    dtype = ("float32", "float64")[place // 8 % 2]
    assert not wrongly_sure(
        USUAL[place], [(bug, dtype) for i, bug in enumerate(NAMED) if (i + place) % 67 == 0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(standard_cases())), ids=[case.name for case in standard_cases()])
def test_no_fault_is_taken_for_another_in_any_case(place):
    """The whole table: every case meets every bug, in one precision or the other."""
    meetings = [(bug, ("float32", "float64")[(i + place) % 2]) for i, bug in enumerate(NAMED)]
    assert not wrongly_sure(standard_cases()[place], meetings)


# What is not known is not named.

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
    "embeddings.norm",
    "layers.0.attention.query",
    SCORES,
    WEIGHTS,
    "layers.1.attention.context",
    "layers.1.residual2",
    "layers.1.norm2",
    "pooler.dense",
    "logits",
    "log_probabilities",
    "gradients.layers.1.feed_forward.inner.weight",
    "gradients.embeddings.token.weight",
)


MISTAKES = [(kind, tensor) for tensor in TENSORS for kind in UNKNOWN]


@pytest.mark.parametrize("mistake", sample_of(MISTAKES, lambda place, _: place % 5 == 0), ids=str)
def test_an_unknown_mistake_is_given_no_name(mistake):
    """Each tensor meets a kind, in turn; the slow suite has all of them."""
    kind, tensor = mistake
    case = build_case("bert", "ragged")
    run = run_of(case, SOUND)
    tensors, name = (
        (run.gradients, tensor.removeprefix("gradients."))
        if tensor.startswith("gradients.")
        else (run.taps, tensor)
    )
    tensors[name] = UNKNOWN[kind](tensors[name], np.random.default_rng(3)).astype(np.float32)
    verdict = verdict_of(case, dataclasses.replace(run, output=run.taps["logits"]))
    assert verdict.first_divergence.tensor == tensor
    assert verdict.cause is None


def test_causes_that_are_alike_are_named_together():
    """The first sample has no padding: its mask for all is no mask at all."""
    case = build_case("bert", "ragged")
    cause = verdict_of(
        case, run_of(case, step("*.masked_scores", lambda run, name, y: run.beside(name, "scores")))
    ).cause
    assert cause.hypothesis == "mask_ignored or mask_of_other_sample"
    assert (
        "may be explained by this: padding is not masked (MSK-1) or by this: the mask of the first sample "
        "is used for all (MSK-7)" in cause.text
    )
    assert not cause.confident


def test_a_value_that_cannot_be_told_from_others_is_not_sure():
    case = build_case("nndl-paddle", "peaked")
    cause = verdict_of(case, run_of(case, option(norm_epsilon=1e-8), "float32")).cause
    assert cause.hypothesis.startswith("norm_epsilon")
    assert "norm_epsilon = 1e-08 instead of 1e-05 (NRM-2) or by" in cause.text
    assert not cause.confident


def test_a_mask_value_that_nobody_uses_is_read_off():
    for home, value in (("nndl-paddle", -54321.0), ("vanilla-encoder", -77.0)):
        case = build_case(home, "ragged")
        cause = verdict_of(case, run_of(case, option(mask_value=value))).cause
        assert cause == Cause("mask_value", cause.text, confident=False)
        assert f"may be explained by mask_value = {value:g} instead of" in cause.text


@pytest.mark.parametrize(
    ("scenario", "dtype", "placement", "value", "said"),
    [
        ("tiny", "float32", "inside", 2e-6, "2e-06 instead of 1e-12"),
        ("ragged", "float32", "inside", 3.7e-3, "0.0037 instead of 1e-12"),
        ("ragged", "float64", "outside", 3.7e-2, "0.037 instead of 1e-12 outside the root"),
    ],
)
def test_an_epsilon_that_nobody_uses_is_not_sure(scenario, dtype, placement, value, said):
    case = build_case("bert", scenario)
    run = run_of(case, option(norm_epsilon=value, norm_epsilon_placement=placement), dtype)
    text = f"`embeddings.norm` may be explained by norm_epsilon = {said} (NRM-2)"
    assert verdict_of(case, run).cause == Cause("norm_epsilon", text, confident=False)


def test_scores_that_are_clamped_are_recognised():
    case = build_case("bert", "peaked")

    def clamped(run, name, y):
        high = run.a.replace(y, y.value < 5, 5.0)
        return run.a.replace(high, high.value > -5, -5.0)

    cause = verdict_of(case, run_of(case, step("*.scores", clamped))).cause
    assert cause == Cause(
        "clamped", f"`{SCORES}` is explained by numbers that are clamped to 5 (ATT-4)", confident=True
    )


# Parts, fused implementations, dropout, precisions.


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("dot_product", "softmax_over_queries"),
        ("attention", "score_scale_twice"),
        ("stack", "gelu_quick"),
        ("stack", "norm_variance_detached"),
        ("encoder", "norm_epsilon_1e5_for_1e12"),
    ],
)
def test_the_cause_is_named_in_parts(part, name):
    bug = BUGS[name]
    of_the_part = tuple(f"*{pattern.rpartition('.')[2]}" for pattern in bug.change.taps)
    case = build_case("bert", bug.scenario, part)
    cause = verdict_of(
        case,
        run_with(dataclasses.replace(bug, change=dataclasses.replace(bug.change, taps=of_the_part)), case),
    ).cause
    assert bug.diagnosed(cause.hypothesis) == "right"


@pytest.mark.parametrize(
    "name",
    [
        "score_scale_missing",
        "mask_causal_too",
        "softmax_over_heads",
        "weight_key_and_value_swapped",
        "heads_split_by_reshape",
    ],
)
def test_a_cause_within_a_fused_step_is_named_where_the_step_ends(name):
    case = build_case("bert", "ragged")
    run = run_with(BUGS[name], case)
    for tap in [tap for tap in run.taps if ".attention." in tap and not tap.endswith("output")]:
        del run.taps[tap]
    run.info["not_exposed"] = ["layers.*.attention.*"]
    verdict = verdict_of(case, run)
    assert verdict.first_divergence.tensor == "layers.0.attention.output"
    assert BUGS[name].diagnosed(verdict.cause.hypothesis) == "right", verdict.cause


def dropped(run, name, y):
    kept = (np.arange(math.prod(y.shape)).reshape(y.shape) % 5 > 0) / 0.8
    return run.a.multiply(y, run.a.leaf(kept))


def without_some_weights(run, name, y):
    context = run.a.einsum(
        "bhqs,bshk->bqhk", dropped(run, name, run.beside(name, "weights")), run.beside(name, "value")
    )
    return run.a.reshape(context, y.shape)


@pytest.mark.parametrize(
    ("tap", "change"),
    [
        ("embeddings.norm", dropped),
        ("*.outer", dropped),
        ("*.context", without_some_weights),
        ("*.residual1", None),
    ],
)
def test_dropout_that_was_left_on_is_recognised(tap, change):
    case = build_case("bert", "ragged")

    def residual(run, name, y):
        result = run.beside(name, "attention.output")
        return run.a.add(run.a.subtract(y, result), dropped(run, name, result))

    cause = verdict_of(case, run_of(case, step(tap, change or residual), "float64")).cause
    assert cause == Cause("dropout", cause.text, confident=True)
    assert "dropout of 20 %" in cause.text


# What the search stands on.


@pytest.mark.parametrize(
    "case",
    sample_of(
        standard_cases() + standard_cases(["bert"], "attention") + standard_cases(["bert"], "stack"),
        lambda place, case: place % 3 == 0 and quick_case(place, case),
    ),
    ids=lambda case: case.name,
)
def test_a_step_without_a_mistake_is_the_reference(case):
    truth = compute(case.config, case.weights, case.batch, Arithmetic("extended"), True, case.part)
    judged = Judged(case.config, case.weights, case.batch, case.part, "float64")
    for tensor in (*truth.taps, *(f"gradients.{name}" for name in list(truth.gradients)[::5])):
        question = Question(judged, {}, tensor, np.zeros(()))
        value = question.values(RIGHT)
        np.testing.assert_array_equal(
            value,
            truth.taps[tensor]
            if tensor in truth.taps
            else truth.gradients[tensor.removeprefix("gradients.")],
        )
