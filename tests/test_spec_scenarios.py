"""Inputs on which real kernels take another path: a standard case shows what goes wrong there.

On the oracle alone, no framework takes part: a mistake is what it makes of one tensor of the reference, and
its effect is measured in standard deviations of what rounding does to that tensor. What a mutant of a backend
shows is not repeated here (``tests/test_mutants.py``).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from concord import spec
from concord.conformance.estimate import Z
from concord.conformance.tolerance import expect
from concord.spec.cases import LONG, OWN, build_case, scenarios_of, standard_cases

ENOUGH = 100.0
"""Standard deviations that a mistake has to make: ``Z`` of them are allowed."""

POSITIONS = "embeddings.position.weight"
ATTENTION, FEED_FORWARD = "layers.0.attention", "layers.0.feed_forward"


class Mistake(NamedTuple):
    """What somebody's kernel makes of one tensor; ``wrong`` returns None where it is right.

    ``concerns`` says of a configuration whether it is a mistake there.
    """

    name: str
    scenario: str
    tensor: str
    wrong: Callable
    concerns: Callable = lambda config: True


case_of = functools.cache(build_case)


@functools.cache
def expectation_of(variant, scenario):
    case = case_of(variant, scenario)
    return expect(case.config, case.weights, case.batch, dtype="float32")


def effect(mistake, variant, scenario):
    """Return the largest error of the mistake in standard deviations."""
    expected, name = expectation_of(variant, scenario), mistake.tensor
    with np.errstate(all="ignore"):
        wrong = mistake.wrong(case_of(variant, scenario), dict(expected.values))
        if wrong is None:
            return 0.0
        errors = np.abs(wrong - expected.values[name]) / expected.sigmas[name]
    return float(np.max(np.where(np.isnan(errors), np.inf, errors), initial=0.0))


def looked_up(change):
    """Return the mistake of looking up other ids: right where the ids are the same."""

    def wrong(case, right):
        ids, table = case.batch.required("input_ids"), case.weights["embeddings.token.weight"]
        found = table[np.clip(change(ids), 0, case.config.vocab_size - 1)]
        if case.config.embedding_scale == "sqrt_d_model":
            found = found * np.sqrt(case.config.d_model)
        return np.where((change(ids) == ids)[..., None], right["embeddings.token"], found)

    return wrong


def softmax(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def in_blocks(size, rescaled):
    """Return a mistake in an attention that takes ``size`` keys at a time; of one block it is right.

    The last keys are dropped, or what was summed before the running maximum grew is not rescaled.
    """

    def wrong(case, right):
        scores, weights = right[f"{ATTENTION}.masked_scores"], right[f"{ATTENTION}.weights"]
        count = scores.shape[-1]
        if count <= size:
            return None
        if rescaled:
            weights = np.where(np.arange(count) < count // size * size, weights, 0.0)
        else:
            tops = [scores[..., i : i + size].max(-1) for i in range(0, count, size)]
            running = np.maximum.accumulate(np.stack(tops, -1), -1)
            powers = np.exp(scores - np.repeat(running, size, -1)[..., :count])
            weights = powers / powers.sum(-1, keepdims=True)
        context = np.einsum("bhqs,bshk->bqhk", weights, right[f"{ATTENTION}.value"])
        return context.reshape(*context.shape[:2], -1)

    return wrong


def repeating(tensor, count):
    """Return the mistake of giving what lies beyond so many along axis 1 the results of the first ones."""
    return lambda case, right: right[tensor][:, np.arange(right[tensor].shape[1]) % count]


def activated(change):
    """Return a mistake in the activation, of its input and its right result."""
    return lambda case, right: change(right[f"{FEED_FORWARD}.inner"], right[f"{FEED_FORWARD}.activation"])


def loss_of(probabilities):
    """Return a mistake in the loss by what is taken for probabilities."""

    def wrong(case, right):
        labels, classes = case.batch.required("labels"), case.config.num_classes
        if classes == 1 or case.config.ignore_label is not None:
            return None
        return np.asarray(-np.log((probabilities(right["logits"]) * np.eye(classes)[labels]).sum(1)).mean())

    return wrong


def without_maximum(logits):
    powers = np.exp(logits.astype(np.float32)).astype(float)
    return powers / powers.sum(1, keepdims=True)


def mistakes():
    stored = {
        "uint8": lambda ids: ids & 0xFF,
        "int8": lambda ids: ids.astype(np.int8).astype(int),
        "uint16": lambda ids: ids & 0xFFFF,
        "int16": lambda ids: ids.astype(np.int16).astype(int),
        "float16": lambda ids: np.minimum(ids, 65504).astype(np.float16).astype(int),
        "bfloat16": lambda ids: spec.precision("bfloat16").round(ids.astype(float)).astype(int),
        "a clipped 16-bit number": lambda ids: np.minimum(ids, 65535),
        "a table without its last row": lambda ids: np.minimum(ids, 69_999),
    }
    for name, change in stored.items():
        yield Mistake(f"ids in {name}", "long", "embeddings.token", looked_up(change))
    for size in (32, 64, 128, 256):
        for rescaled, name in ((True, "last keys dropped"), (False, "sums not rescaled")):
            yield Mistake(
                f"{name}, blocks of {size}",
                "long",
                f"{ATTENTION}.context",
                in_blocks(size, rescaled),
                lambda config: config.query_mask == "none",
            )
    for size in (64, 128, 256):
        name = f"{ATTENTION}.context"
        yield Mistake(f"queries repeat after {size}", "long", name, repeating(name, size))
    for count in (2, 4):
        name = f"{ATTENTION}.scores"
        yield Mistake(f"heads repeat after {count}", "extreme", name, repeating(name, count))
    for kind in ("relu", "gelu"):
        for limit in (6, 10):
            yield Mistake(
                f"{kind} is clipped at {limit}",
                "extreme",
                f"{FEED_FORWARD}.activation",
                activated(lambda x, right, limit=limit: np.minimum(right, limit)),
                lambda config, kind=kind: kind in config.activation,
            )
    for limit in (20, 50):
        clipped = loss_of(lambda logits, limit=limit: softmax(np.clip(logits, -limit, limit)))
        yield Mistake(f"logits are clipped at {limit}", "extreme", "loss", clipped)
    yield Mistake(
        "loss without the maximum",
        "extreme",
        "loss",
        loss_of(without_maximum),
        lambda config: config.length_epsilon is None,
    )


MISTAKES = {mistake.name: mistake for mistake in mistakes()}


def home(mistake):
    return [
        name
        for name in spec.variants()
        if mistake.scenario in scenarios_of(name) and mistake.concerns(case_of(name, mistake.scenario).config)
    ]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_shows_in_one_standard_case_and_no_other(name):
    mistake = MISTAKES[name]
    for variant in home(mistake):
        assert effect(mistake, variant, mistake.scenario) > ENOUGH > Z, variant
    others = [scenario for scenario in scenarios_of(variant) if scenario != mistake.scenario]
    assert {scenario: size for scenario in others if (size := effect(mistake, variant, scenario)) > Z} == {}


def real_tokens(case):
    real = case.batch.required("input_ids") != case.config.pad_id
    return real


# A list of cases is a sequence.


WHOLE = [name for name in spec.variants() if name not in OWN]


def sizes(case):
    return (*case.batch.required("input_ids").shape, case.config.d_model, case.config.vocab_size)


@pytest.mark.parametrize("kept", ["mask", "weights", "inputs", "position of a shorter text"])
@pytest.mark.parametrize("variant", WHOLE)
def test_what_is_kept_from_an_earlier_call_shows(variant, kept):
    """Whatever a backend keeps by shape, some later case of that shape is another."""
    seen = {}
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
