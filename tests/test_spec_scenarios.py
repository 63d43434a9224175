"""Inputs on which real kernels take another path.

For each kind of mistake there is a standard case that shows it.

On the oracle alone, no framework takes part: a mistake is what it makes of one tensor of the reference, and
its effect is measured in standard deviations of what rounding does to that tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from concord import spec
from concord.conformance.check import check_jobs, sequence
from concord.conformance.estimate import Z
from concord.conformance.expectation import Expectation
from concord.conformance.tolerance import expect
from concord.spec.cases import LANDMARKS, LONG, OWN, SCENARIOS, Case, build_case, scenarios_of, standard_cases
from concord.spec.masks import mask_constant

Array = NDArray[np.floating]
Tensors = dict[str, Array]

ENOUGH = 100.0
"""Standard deviations that a mistake has to make: ``Z`` of them are allowed."""

FIRST = "layers.0."
POSITIONS = "embeddings.position.weight"


@dataclass(frozen=True)
class Mistake:
    """What somebody's kernel makes of one tensor.

    Attributes:
        scenario: the standard case that shows it.
        wrong: from the case and the right tensors, the wrong ones by name.
        concerns: the configurations in which it is a mistake.
        dtype: the precision that shows it.
        alone: whether no other standard case of a variant shows it.
    """

    scenario: str
    wrong: Callable[[Case, Tensors], Tensors]
    concerns: Callable[[spec.EncoderConfig], bool] = lambda config: True
    dtype: str = "float32"
    alone: bool = False


@functools.cache
def case_of(variant: str, scenario: str) -> Case:
    return build_case(variant, scenario)


@functools.cache
def expectation_of(variant: str, scenario: str, dtype: str) -> Expectation:
    case = case_of(variant, scenario)
    return expect(case.config, case.weights, case.batch, dtype=dtype)


def effect(mistake: Mistake, variant: str, scenario: str) -> float:
    """Return the largest error of the mistake in standard deviations."""
    expected = expectation_of(variant, scenario, mistake.dtype)
    wrong = mistake.wrong(case_of(variant, scenario), dict(expected.values))
    with np.errstate(all="ignore"):
        errors = [
            np.abs(array - expected.values[name]) / expected.sigmas[name] for name, array in wrong.items()
        ]
    return float(
        max((np.max(np.where(np.isnan(error), np.inf, error), initial=0.0) for error in errors), default=0.0)
    )


# Ids, positions, labels and segments.


def looked_up(change: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> Callable[[Case, Tensors], Tensors]:
    """Return the mistake of looking up other ids: right where the ids are the same."""

    def wrong(case: Case, right: Tensors) -> Tensors:
        ids, table = case.batch.required("input_ids"), case.weights["embeddings.token.weight"]
        found = table[np.clip(change(ids), 0, case.config.vocab_size - 1)]
        if case.config.embedding_scale == "sqrt_d_model":
            found = found * np.sqrt(case.config.d_model)
        return {
            "embeddings.token": np.where((change(ids) == ids)[..., None], right["embeddings.token"], found)
        }

    return wrong


def last_position_clipped(case: Case, right: Tensors) -> Tensors:
    table, found = case.weights["embeddings.position.weight"], right["embeddings.position"]
    return {"embeddings.position": np.where((found == table[-1]).all(-1, keepdims=True), table[-2], found)}


def positions_from_first_real_token(case: Case, right: Tensors) -> Tensors:
    real = case.batch.required("input_ids") != case.config.pad_id
    numbers = np.maximum(np.cumsum(real, 1) - 1, 0) + case.config.position_start
    table = case.weights["embeddings.position.weight"]
    return {"embeddings.position": np.where(real[..., None], table[numbers], right["embeddings.position"])}


def last_use_alone(case: Case, right: Tensors) -> Tensors:
    """Write the gradient of a row where it has to be added.

    The model with a row for each use says what that gives.
    """
    ids, config = case.batch.required("input_ids"), case.config
    uses = np.where(ids == config.pad_id, config.pad_id, 2 + np.arange(ids.size).reshape(ids.shape))
    table = case.weights["embeddings.token.weight"]
    apart = np.zeros((2 + ids.size, config.d_model))
    apart[uses.ravel()] = table[ids.ravel()]
    batch = dataclasses.replace(case.batch, input_ids=uses)
    weights = {**case.weights, "embeddings.token.weight": apart}
    each = spec.reference(config.replace(vocab_size=len(apart)), weights, batch, gradients=True).gradients[
        "embeddings.token.weight"
    ]
    name = "gradients.embeddings.token.weight"
    wrong = right[name].copy()
    for row in set(ids.ravel().tolist()) - {config.pad_id}:
        wrong[row] = each[uses[ids == row][-1]]
    return {name: wrong}


# Masks and pooling.


def masked(case: Case, right: Tensors, visible: NDArray[np.bool_]) -> Tensors:
    """Return the scores with another mask, (B, S)."""
    scores, constant = right[f"{FIRST}attention.scores"], mask_constant(case.config, "float32")
    hidden = constant if case.config.mask_fill == "replace" else scores + constant
    return {f"{FIRST}attention.masked_scores": np.where(visible[:, None, None, :], scores, hidden)}


def real_tokens(case: Case) -> NDArray[np.bool_]:
    real: NDArray[np.bool_] = case.batch.required("input_ids") != case.config.pad_id
    return real


def mask_lost_for_one_sample(case: Case, right: Tensors) -> Tensors:
    real = real_tokens(case)
    return masked(case, right, np.ones_like(real) if len(real) == 1 else real) if len(real) == 1 else {}


def mask_by_length(case: Case, right: Tensors) -> Tensors:
    real = real_tokens(case)
    return masked(case, right, np.arange(real.shape[1]) < real.sum(1)[:, None])


def all_padded_on_the_left(case: Case, right: Tensors) -> Tensors:
    """Take a batch for padded on the left as soon as one sample is."""
    real = real_tokens(case)
    left = np.arange(real.shape[1]) >= real.shape[1] - real.sum(1)[:, None]
    return masked(case, right, left) if not real[:, 0].all() else {}


def first_real_token_pooled(case: Case, right: Tensors) -> Tensors:
    if case.config.pooler != "none":
        return {}
    last = right[[name for name in right if name.startswith("layers.") and name.count(".") == 2][-1]]
    first = last[np.arange(len(last)), real_tokens(case).argmax(1)]
    return {"logits": first @ case.weights["classifier.weight"] + case.weights["classifier.bias"]}


# Attention in blocks, and its heads.


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights: Array = powers / powers.sum(-1, keepdims=True)
    return weights


def attended(case: Case, right: Tensors, weights: Array) -> Tensors:
    value = right[f"{FIRST}attention.value"]
    context = np.einsum("bhqs,bshk->bqhk", weights, value)
    return {f"{FIRST}attention.context": context.reshape(*context.shape[:2], -1)}


def in_blocks(size: int, wrong: Callable[[Array, Array, int], Array]) -> Callable[[Case, Tensors], Tensors]:
    """Return a mistake in an attention that takes ``size`` keys at a time.

    Where the text fits one block, it is right.
    """

    def mistake(case: Case, right: Tensors) -> Tensors:
        scores, weights = right[f"{FIRST}attention.masked_scores"], right[f"{FIRST}attention.weights"]
        if scores.shape[-1] <= size or case.config.query_mask == "overwrite":
            return {}
        return attended(case, right, wrong(scores, weights, size))

    return mistake


def last_block_dropped(scores: Array, weights: Array, size: int) -> Array:
    whole = scores.shape[-1] // size * size
    return np.where(np.arange(scores.shape[-1]) < whole, weights, 0.0)


def not_rescaled(scores: Array, weights: Array, size: int) -> Array:
    """Forget to rescale what was summed before the running maximum grew."""
    starts = range(0, scores.shape[-1], size)
    running = np.maximum.accumulate(np.stack([scores[..., i : i + size].max(-1) for i in starts], -1), -1)
    powers = np.exp(scores - np.repeat(running, size, -1)[..., : scores.shape[-1]])
    unscaled: Array = powers / powers.sum(-1, keepdims=True)
    return unscaled


def queries_beyond(size: int) -> Callable[[Case, Tensors], Tensors]:
    """Return the mistake of giving each further block of queries the results of the first."""

    def wrong(case: Case, right: Tensors) -> Tensors:
        name = f"{FIRST}attention.context"
        return {name: right[name][:, np.arange(right[name].shape[1]) % size]}

    return wrong


def heads_beyond(count: int) -> Callable[[Case, Tensors], Tensors]:
    """Return the mistake of giving further heads the scores of the first ones."""

    def wrong(case: Case, right: Tensors) -> Tensors:
        name = f"{FIRST}attention.scores"
        return {name: right[name][:, np.arange(right[name].shape[1]) % count]}

    return wrong


# Activations and the loss.


def activated(change: Callable[[Array, Array], Array]) -> Callable[[Case, Tensors], Tensors]:
    """Return a mistake in the activation, of its input and its right result."""

    def wrong(case: Case, right: Tensors) -> Tensors:
        name = f"{FIRST}feed_forward.activation"
        return {name: change(right[f"{FIRST}feed_forward.inner"], right[name])}

    return wrong


def padded_erf(x: Array, right: Array) -> Array:
    """Take erf for ±1 from 3 on: x / sqrt 2 there."""
    return np.where(abs(x) > 3 * np.sqrt(2), np.maximum(x, 0), right)


def loss_of(change: Callable[[Array, Array], Array]) -> Callable[[Case, Tensors], Tensors]:
    """Return a mistake in the loss: from logits (B, C) and one-hot labels to the loss of each sample."""

    def wrong(case: Case, right: Tensors) -> Tensors:
        labels, classes = case.batch.required("labels"), case.config.num_classes
        if classes == 1 or case.config.ignore_label is not None:
            return {}
        with np.errstate(all="ignore"):
            return {"loss": np.mean(change(right["logits"], np.eye(classes)[labels]))}

    return wrong


def through_probabilities(logits: Array, one: Array) -> Array:
    return -np.log((softmax(logits) * one).sum(1) + 1e-12)


def without_maximum(logits: Array, one: Array) -> Array:
    powers = np.exp(logits.astype(np.float32)).astype(float)
    return -(np.log(powers / powers.sum(1, keepdims=True)) * one).sum(1)


def clipped_at(limit: float) -> Callable[[Array, Array], Array]:
    def wrong(logits: Array, one: Array) -> Array:
        clipped = np.clip(logits, -limit, limit)
        return -(np.log(softmax(clipped)) * one).sum(1)

    return wrong


def last_class_missing(logits: Array, one: Array) -> Array:
    rows = np.where(one[:, -1:] == 1, np.roll(one, -1, 1), one)
    return -(np.log(softmax(logits)) * rows).sum(1)


def sigmoid_loss(change: Callable[[Array, Array], Array]) -> Callable[[Case, Tensors], Tensors]:
    def wrong(case: Case, right: Tensors) -> Tensors:
        if case.config.num_classes != 1:
            return {}
        x, labels = right["logits"][:, 0], case.batch.required("labels")
        exact = np.maximum(x, 0) - x * labels + np.log1p(np.exp(-abs(x)))
        with np.errstate(all="ignore"):
            return {"loss": right["loss"] - exact.mean() + change(x, labels).mean()}

    return wrong


def naive_sigmoid(x: Array, labels: Array) -> Array:
    return np.log1p(np.exp(x.astype(np.float32)).astype(float)) - x * labels


def sigmoid_through_probabilities(x: Array, labels: Array) -> Array:
    p = np.clip(1 / (1 + np.exp(-x)), 1e-7, 1 - 1e-7)
    return -np.log(np.where(labels == 1, p, 1 - p))


def relu_like(config: spec.EncoderConfig) -> bool:
    return config.activation == "relu"


MISTAKES = {
    **{
        f"ids in {name}": Mistake("long", looked_up(change), alone=True)
        for name, change in {
            "uint8": lambda ids: ids & 0xFF,
            "int8": lambda ids: ids.astype(np.int8).astype(int),
            "uint16": lambda ids: ids & 0xFFFF,
            "int16": lambda ids: ids.astype(np.int16).astype(int),
            "float16": lambda ids: np.minimum(ids, 65504).astype(np.float16).astype(int),
            "a bfloat16 of 8 bits": lambda ids: (
                spec.precision("bfloat16").round(ids.astype(float)).astype(int)
            ),
            "a clipped 16-bit number": lambda ids: np.minimum(ids, 65535),
        }.items()
    },
    "the last row is out of range": Mistake(
        "long", looked_up(lambda ids: np.minimum(ids, 69_999)), alone=True
    ),
    "the last position is clipped": Mistake("long", last_position_clipped),
    "positions count from the first real token": Mistake(
        "extreme", positions_from_first_real_token, lambda config: config.position_of_padding != "pad_row"
    ),
    "gradients of a row are written, not added": Mistake("long", last_use_alone),
    "one sample has no mask": Mistake("long", mask_lost_for_one_sample, alone=True),
    "masks by length": Mistake("extreme", mask_by_length),
    "masks by length of one sample": Mistake("long", mask_by_length),
    "all padded on the left if one is": Mistake("extreme", all_padded_on_the_left),
    "the first real token is pooled": Mistake(
        "extreme",
        first_real_token_pooled,
        lambda config: config.pooling == "first" and config.pooler == "none" and not config.final_norm,
    ),
    **{
        f"{what}, blocks of {size}": Mistake(
            "long", in_blocks(size, wrong), lambda config: config.query_mask == "none", alone=True
        )
        for size in (32, 64, 128, 256)
        for what, wrong in {
            "last keys dropped": last_block_dropped,
            "sums not rescaled": not_rescaled,
        }.items()
    },
    **{
        f"queries repeat after {size}": Mistake("long", queries_beyond(size), alone=True)
        for size in (64, 128, 256)
    },
    **{
        f"heads repeat after {count}": Mistake("extreme", heads_beyond(count), alone=True) for count in (2, 4)
    },
    "ReLU is clipped at 6": Mistake(
        "extreme", activated(lambda x, right: np.minimum(right, 6)), relu_like, alone=True
    ),
    "ReLU is clipped at 10": Mistake(
        "extreme", activated(lambda x, right: np.minimum(right, 10)), relu_like, alone=True
    ),
    "GELU by the other form": Mistake(
        "extreme",
        activated(lambda x, right: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
        lambda config: config.activation == "gelu_erf",
    ),
    "GELU is ReLU beyond 3": Mistake(
        "extreme",
        activated(lambda x, right: np.where(abs(x) > 3, np.maximum(x, 0), right)),
        lambda config: "gelu" in config.activation,
    ),
    "GELU saturates early": Mistake(
        "extreme", activated(padded_erf), lambda config: config.activation == "gelu_erf", dtype="float64"
    ),
    "GELU is clipped at 10": Mistake(
        "extreme",
        activated(lambda x, right: np.minimum(right, 10)),
        lambda config: "gelu" in config.activation,
        alone=True,
    ),
    "loss through probabilities": Mistake("extreme", loss_of(through_probabilities)),
    "loss without the maximum": Mistake(
        "extreme", loss_of(without_maximum), lambda config: config.length_epsilon is None, alone=True
    ),
    "logits are clipped at 20": Mistake("extreme", loss_of(clipped_at(20)), alone=True),
    "logits are clipped at 50": Mistake("extreme", loss_of(clipped_at(50)), alone=True),
    "the last class counts as the one before": Mistake("extreme", loss_of(last_class_missing)),
    "sigmoid loss through powers": Mistake("sigmoid", sigmoid_loss(naive_sigmoid)),
    "sigmoid loss through probabilities": Mistake("sigmoid", sigmoid_loss(sigmoid_through_probabilities)),
}


def home(mistake: Mistake) -> list[str]:
    return [
        name
        for name in spec.variants()
        if mistake.scenario in scenarios_of(name) and mistake.concerns(case_of(name, mistake.scenario).config)
    ]


@pytest.mark.parametrize(
    ("name", "variant"), [(name, variant) for name, mistake in MISTAKES.items() for variant in home(mistake)]
)
def test_mistake_shows_in_a_standard_case(name: str, variant: str) -> None:
    mistake = MISTAKES[name]
    assert effect(mistake, variant, mistake.scenario) > ENOUGH > Z


@pytest.mark.parametrize("name", [name for name, mistake in MISTAKES.items() if mistake.alone])
def test_mistake_shows_in_no_other_case(name: str) -> None:
    mistake = MISTAKES[name]
    variant = home(mistake)[-1]
    others = [scenario for scenario in scenarios_of(variant) if scenario != mistake.scenario]
    assert {scenario: size for scenario in others if (size := effect(mistake, variant, scenario)) > Z} == {}


# A list of cases is a sequence.


WHOLE = [name for name in spec.variants() if name not in OWN]


def sizes(case: Case) -> tuple[int, ...]:
    return (*case.batch.required("input_ids").shape, case.config.d_model, case.config.vocab_size)


@pytest.mark.parametrize("variant", WHOLE)
def test_the_first_sizes_come_back_after_others(variant: str) -> None:
    run = [sizes(case) for case in standard_cases([variant])]
    assert len(set(run)) == 3
    for other in set(run[1:]) - {run[0]}:
        assert run[0] in run[run.index(other) + 1 :]


@pytest.mark.parametrize("kept", ["mask", "weights", "inputs", "position of a shorter text"])
@pytest.mark.parametrize("variant", WHOLE)
def test_what_is_kept_from_an_earlier_call_shows(variant: str, kept: str) -> None:
    """Whatever a backend keeps by shape, some later case of that shape is another."""
    seen: dict[tuple[int, ...], list[Case]] = {}
    for case in standard_cases([variant]):
        seen.setdefault(sizes(case), []).append(case)
    first, *later = next(iter(seen.values()))
    ids = first.batch.required("input_ids")
    if kept == "mask":
        assert any(not np.array_equal(real_tokens(first), real_tokens(case)) for case in later)
    elif kept == "weights":
        assert all(
            any(not np.array_equal(first.weights[name], case.weights.get(name)) for case in later)
            for name in first.weights
            if name != POSITIONS or variant == "bert"
        )
    elif kept == "inputs":
        assert any(not np.array_equal(ids, case.batch.required("input_ids")) for case in later)
    else:
        longer = case_of(variant, "long").config
        assert longer.max_positions > first.config.max_positions
        assert longer.max_positions == LONG + longer.position_start


@pytest.mark.parametrize("variant", spec.variants())
def test_a_check_runs_a_case_twice_and_the_shortest_text_before_and_after_longer_ones(variant: str) -> None:
    jobs = check_jobs([variant])
    run = [(job.case.removeprefix(f"{variant}-"), job.dtype) for job in sequence(jobs)]
    twice, short = ("ragged", "float32"), ("single", "float32")
    assert run == [
        short,
        run[1],
        twice,
        *((job.case.removeprefix(f"{variant}-"), job.dtype) for job in jobs[1:]),
    ]
    assert {each: job.times for each, job in zip(run, sequence(jobs), strict=True) if job.times > 1} == {
        twice: 2,
        short: 2,
    }
    longer = case_of(variant, "full" if variant in WHOLE else "single")
    model = case_of(variant, "single")
    assert longer.config.replace(max_positions=model.config.max_positions) == model.config


def test_cases_that_are_chosen_run_twice_too() -> None:
    (alone,) = check_jobs(["bert"], ["float32"], cases=["bert-long"])
    assert [(job.case, job.times) for job in sequence([alone])] == [("bert-long", 2)] * 2


def test_the_long_text_uses_the_rows_at_which_numbers_end() -> None:
    for variant in WHOLE:
        case = case_of(variant, "long")
        ids, counts = np.unique(case.batch.required("input_ids"), return_counts=True)
        assert set(LANDMARKS) - {case.config.pad_id} == set(ids.tolist()) - {case.config.pad_id}
        assert max(counts) > 10
        assert len(case.batch.required("input_ids")) == 1
        assert case.batch.required("input_ids")[0, 0] == case.config.pad_id


def test_what_one_precision_shows_is_checked_in_one() -> None:
    def run(**asked: list[str]) -> set[tuple[str, str]]:
        return {(job.case, job.dtype) for job in check_jobs(["bert"], **asked)}

    both = ["float64", "float32"]
    for scenario, entry in SCENARIOS.items():
        if not entry.only:
            assert {dtype for case, dtype in run(dtypes=both) if case == f"bert-{scenario}"} == (
                {"float32"} if entry.once else set(both)
            )
    assert {scenario for scenario, entry in SCENARIOS.items() if not entry.once} == {
        "ragged",
        "peaked",
        "tiny",
        "offset",
        "full",
        "equal",
    }
    assert {dtype for case, dtype in run(dtypes=["float64"]) if case == "bert-long"} == {"float64"}
    assert run(dtypes=both, cases=["bert-long"]) == {("bert-long", dtype) for dtype in both}
