"""Causes: what is wrong is named, and nothing is named that is not so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest

import spec
from backends.interface import Run
from conformance.causes import Cause
from conformance.causes.hypothesis import RIGHT
from conformance.causes.question import Exact, Question
from conformance.causes.step import Step
from conformance.comparison import Verdict
from conformance.expectation import Case as Judged
from conformance.judging import judge
from spec.arithmetic import Arithmetic
from spec.cases import Case, build_case, standard_cases
from spec.reference import compute
from spec.tape import Tensor
from tests.toys.mistakes import MISTAKES, SCORES, SOUND, WEIGHTS, Spoiled, option, right, run_of, step, weight


def verdict_of(case: Case, run: Run) -> Verdict:
    return judge(case.config, case.weights, case.batch, run, case.part)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", MISTAKES)
def test_the_cause_is_named(name, dtype):
    mistake = MISTAKES[name]
    case = build_case(mistake.home, mistake.scenario)
    verdict = verdict_of(case, run_of(case, mistake, dtype))
    cause = verdict.cause
    assert cause is not None, verdict.first_divergence
    assert mistake.cause in cause.hypothesis.split(" or "), cause
    assert mistake.words in cause.text
    assert f"`{verdict.first_divergence.tensor}` {'is' if cause.confident else 'may be'} explained by" in cause.text


def wrongly_sure(case: Case, meetings: Iterable[tuple[str, str]]) -> list[str]:
    """Return the mistakes, each met in a precision, that are given another's name with confidence in a case."""
    found = []
    for name, dtype in meetings:
        run = run_of(case, MISTAKES[name], dtype)
        cause = verdict_of(case, run).cause if run else None
        if cause and cause.confident and not right(cause, MISTAKES[name]):
            found.append(f"{case.name}, {dtype}: {name} is taken for {cause}")
    return found


@pytest.mark.parametrize("place", range(0, len(standard_cases()), 6))
def test_no_mistake_is_taken_for_another(place):
    """A sample of the whole table: some of the cases meet some of the mistakes."""
    dtype = ("float32", "float64")[place // 6 % 2]
    assert not wrongly_sure(standard_cases()[place], [(name, dtype) for i, name in enumerate(MISTAKES) if (i + place) % 7 == 0])


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(standard_cases())), ids=[case.name for case in standard_cases()])
def test_no_mistake_is_taken_for_another_in_any_case(place):
    """The whole table: every case meets every mistake, in one precision or the other."""
    meetings = [(name, ("float32", "float64")[(i + place) % 2]) for i, name in enumerate(MISTAKES)]
    assert not wrongly_sure(standard_cases()[place], meetings)


# What is not known is not named.

UNKNOWN: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "one element off": lambda x, random: x + 1e-3 * abs(x).max() * (np.arange(x.size).reshape(x.shape) == x.size // 2),
    "noise": lambda x, random: x + 1e-3 * abs(x).max() * random.standard_normal(x.shape),
    "faint noise": lambda x, random: x * (1 + 2e-5 * random.standard_normal(x.shape)),
    "last half off": lambda x, random: np.where(np.arange(x.size).reshape(x.shape) < x.size // 2, x, 1.01 * x),
}
TENSORS = (
    "embeddings.token", "embeddings.norm", "layers.0.attention.query", SCORES, WEIGHTS, "layers.1.attention.context", "layers.1.residual2",
    "layers.1.norm2", "pooler.dense", "logits", "log_probabilities", "gradients.layers.1.feed_forward.inner.weight",
    "gradients.embeddings.token.weight",
)  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_mistake_is_given_no_name(kind, tensor):
    case = build_case("bert", "ragged")
    run = run_of(case, SOUND)
    tensors, name = (run.gradients, tensor.removeprefix("gradients.")) if tensor.startswith("gradients.") else (run.taps, tensor)
    tensors[name] = UNKNOWN[kind](tensors[name], np.random.default_rng(3)).astype(np.float32)
    verdict = verdict_of(case, dataclasses.replace(run, output=run.taps["logits"]))
    assert verdict.first_divergence.tensor == tensor
    assert verdict.cause is None


def test_scores_that_are_scaled_a_little_have_no_cause():
    case = build_case("bert", "ragged")
    spoiled = step("", "", "*.scores", lambda run, name, y: run.a.scale(y, 1.001))
    verdict = verdict_of(case, run_of(case, spoiled))
    assert verdict.first_divergence.tensor == SCORES
    assert verdict.cause is None


def test_what_is_missing_has_no_cause():
    case = build_case("bert", "ragged")
    run = run_of(case, SOUND)
    del run.taps[SCORES]
    assert verdict_of(case, run).cause is None
    assert verdict_of(case, run_of(case, SOUND)).cause is None


def test_causes_that_are_alike_are_named_together():
    """The first sample has no padding: its mask for all is no mask at all."""
    case = build_case("bert", "ragged")
    cause = verdict_of(case, run_of(case, MISTAKES["mask ignored"])).cause
    assert cause.hypothesis == "mask_ignored or mask_of_other_sample"
    assert "may be explained by no mask at all (MSK-1) or by the mask of the first sample for all (MSK-7)" in cause.text
    assert not cause.confident


def test_a_value_that_cannot_be_told_from_others_is_not_sure():
    case = build_case("nndl-paddle", "peaked")
    cause = verdict_of(case, run_of(case, option("", "nndl-paddle", norm_epsilon=1e-8), "float32")).cause
    assert cause.hypothesis.startswith("norm_epsilon")
    assert "norm_epsilon = 1e-08 instead of 1e-05 (NRM-2) or by" in cause.text
    assert not cause.confident


def test_a_mask_value_that_nobody_uses_is_read_off():
    for home, value in (("nndl-paddle", -54321.0), ("vanilla-encoder", -77.0)):
        case = build_case(home, "ragged")
        cause = verdict_of(case, run_of(case, option("", home, mask_value=value))).cause
        assert cause == Cause("mask_value", cause.text, confident=False)
        assert f"may be explained by mask_value = {value:g} instead of" in cause.text


def test_an_epsilon_that_nobody_uses_is_not_sure():
    case = build_case("bert", "tiny")
    cause = verdict_of(case, run_of(case, option("", "bert", norm_epsilon=2e-6))).cause
    assert cause == Cause(
        "norm_epsilon", "`embeddings.norm` may be explained by norm_epsilon = 2e-06 instead of 1e-12 (NRM-2)", confident=False
    )


def test_scores_that_are_clamped_are_recognised():
    case = build_case("bert", "peaked")

    def clamped(run: Spoiled, name: str, y: Tensor) -> Tensor:
        high = run.a.replace(y, y.value < 5, 5.0)
        return run.a.replace(high, high.value > -5, -5.0)

    cause = verdict_of(case, run_of(case, step("", "", "*.scores", clamped))).cause
    assert cause == Cause("clamped", f"`{SCORES}` is explained by numbers that are clamped to 5 (ATT-4)", confident=True)


# Parts, fused implementations, dropout, precisions.


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("dot_product", "softmax over queries"),
        ("attention", "transposed attention"),
        ("attention", "scale twice"),
        ("stack", "quick gelu"),
        ("stack", "variance detached"),
        ("encoder", "epsilon 1e-5 for 1e-12"),
    ],
)
def test_the_cause_is_named_in_parts(part, name):
    mistake = MISTAKES.get(name) or weight("transposed_weight", "transposed", "attention.key.weight", np.transpose)
    case = build_case("bert", mistake.scenario, part)
    cause = verdict_of(case, run_of(case, mistake)).cause
    assert cause is not None
    assert mistake.cause in cause.hypothesis.split(" or ")


@pytest.mark.parametrize(
    "name", ["no score scale", "mask inverted", "softmax over heads", "key and value swapped", "heads split by a reshape"]
)
def test_a_cause_within_a_fused_step_is_named_where_the_step_ends(name):
    case = build_case("bert", "ragged")
    run = run_of(case, MISTAKES[name])
    for tap in [tap for tap in run.taps if ".attention." in tap and not tap.endswith("output")]:
        del run.taps[tap]
    run.info["undelivered_taps"] = ["layers.*.attention.*"]
    verdict = verdict_of(case, run)
    assert verdict.first_divergence.tensor == "layers.0.attention.output"
    assert right(verdict.cause, MISTAKES[name]), verdict.cause


def dropped(run: Spoiled, name: str, y: Tensor) -> Tensor:
    kept = (np.arange(math.prod(y.shape)).reshape(y.shape) % 5 > 0) / 0.8
    return run.a.multiply(y, run.a.leaf(kept))


def without_some_weights(run: Spoiled, name: str, y: Tensor) -> Tensor:
    context = run.a.einsum("bhqs,bshk->bqhk", dropped(run, name, run.beside(name, "weights")), run.beside(name, "value"))
    return run.a.reshape(context, y.shape)


@pytest.mark.parametrize(
    ("tap", "change"), [("embeddings.norm", dropped), ("*.outer", dropped), ("*.context", without_some_weights), ("*.residual1", None)]
)
def test_dropout_that_was_left_on_is_recognised(tap, change):
    case = build_case("bert", "ragged")

    def residual(run: Spoiled, name: str, y: Tensor) -> Tensor:
        result = run.beside(name, "attention.output")
        return run.a.add(run.a.subtract(y, result), dropped(run, name, result))

    cause = verdict_of(case, run_of(case, step("dropout", "", tap, change or residual), "float64")).cause
    assert cause == Cause("dropout", cause.text, confident=True)
    assert "dropout of 20 %" in cause.text


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_step_that_was_computed_with_fewer_bits_is_recognised(name):
    case = build_case("vanilla-encoder", "ragged")

    def norm(run: Spoiled, tap: str, y: Tensor) -> Tensor:
        x = run.beside(tap, "residual1")
        short = Spoiled(run.config, {n: w.value for n, w in run.weights.items()}, run.batch, "float32", Arithmetic(name), {}, {})
        return run.a._record(short.norm(tap, short.a.leaf(x.value)).value, (y, lambda g: g))

    cause = verdict_of(case, run_of(case, step("", "", "layers.0.norm1", norm))).cause
    assert cause == Cause(f"computed_in_{name}", f"`layers.0.norm1` is explained by a step that was computed in {name} (PRC-2)", True)


@pytest.mark.parametrize("scores", [False, True])
def test_products_of_shortened_factors_are_recognised(scores):
    case = build_case("bert", "ragged")
    run = run_of(case, SOUND, "float32")
    model = compute(case.config, case.weights, case.batch, Arithmetic("tf32", shuffle=3), True, dtype="float32")
    names = list(model.taps)
    if scores:  # the first products are those of the projections
        run.taps = {name: (run if names.index(name) < names.index(SCORES) else model).taps[name] for name in names}
        q, k = (spec.precision("tf32").round_factor(run.taps[f"layers.0.attention.{role}"]).astype(np.float64) for role in ("query", "key"))
        run.taps[SCORES] = (np.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(7)).astype(np.float32)
    else:
        run = Run(model.output, model.loss, dict(model.taps), dict(model.gradients), "numpy", "float32")
    verdict = verdict_of(case, dataclasses.replace(run, output=run.taps["logits"], loss=run.taps["loss"]))
    assert verdict.first_divergence.tensor == (SCORES if scores else "layers.0.attention.query")
    assert verdict.cause.hypothesis == "tf32_products"
    assert verdict.cause.confident


def test_a_variance_by_squares_is_recognised():
    case = build_case("vanilla-encoder", "ragged")

    def norm(run: Spoiled, tap: str, y: Tensor) -> Tensor:
        x, a, own = run.beside(tap, "residual1"), run.a, tap
        x = a.shift(x, 0.0)
        mean = a.divide_by(a.sum(x, -1), run.config.d_model)
        power = a.subtract(a.divide_by(a.sum(a.multiply(x, x), -1), run.config.d_model), a.multiply(mean, mean))
        centered = a.divide(a.subtract(x, mean), a.sqrt(a.shift(power, run.config.norm_epsilon)))
        return a.add(a.multiply(centered, run.weights[f"{own}.weight"]), run.weights[f"{own}.bias"])

    far = weight("", "", "layers.0.attention.output.bias", lambda bias: bias + 1000)
    case = dataclasses.replace(case, weights={**case.weights, **far.weights(case)})
    cause = verdict_of(case, run_of(case, step("", "", "layers.0.norm1", norm))).cause
    assert cause.hypothesis == "variance_by_squares"


# What the search stands on.


@pytest.mark.parametrize(
    "case", standard_cases() + standard_cases(["bert"], "attention") + standard_cases(["bert"], "stack"), ids=lambda case: case.name
)
def test_a_step_without_a_mistake_is_the_reference(case):
    truth = compute(case.config, case.weights, case.batch, Arithmetic("extended"), True, case.part)
    judged = Judged(case.config, case.weights, case.batch, case.part, "float64")
    for tensor in (*truth.taps, *(f"gradients.{name}" for name in list(truth.gradients)[::5])):
        question = Question(judged, {}, tensor, np.zeros(()))
        value = question.values(RIGHT)
        np.testing.assert_array_equal(
            value, truth.taps[tensor] if tensor in truth.taps else truth.gradients[tensor.removeprefix("gradients.")]
        )


def test_layers_before_the_tensor_are_not_computed_where_the_run_tells():
    case = build_case("bert", "ragged")
    run = run_of(case, SOUND)
    judged = Judged(case.config, case.weights, case.batch)
    taps = {name: array.astype(np.float64) for name, array in run.taps.items() if name != "loss"}
    for tensor, first in (
        ("layers.1.attention.query", "layers.0.norm2"),
        ("gradients.layers.1.norm1.weight", "layers.0.norm2"),
        ("embeddings.sum", "embeddings.token"),
    ):
        step = Question(judged, taps, tensor, np.zeros(())).run(RIGHT, Exact("float32"))
        assert isinstance(step, Step)
        assert first in step.now
        assert not any(name.startswith("layers.0.attention") for name in step.taps)
