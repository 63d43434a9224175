"""Which other weights would explain a tensor.

Of linear layers and norms; of tables, rounded ones (SPEC WGT-1 to WGT-4, NRM-2).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.context import norm_of, parameters_of
from concord.conformance.bugs.norms import NORMS
from concord.conformance.bugs.precision import LINEAR
from concord.conformance.bugs.weights import cut_from_fused
from concord.conformance.explain.hypothesis import Hypothesis, loaded
from concord.conformance.explain.question import SHORTER, Question, rounding
from concord.spec.arrays import Array
from concord.spec.parameters import parameters

Made = Mapping[str, Callable[[], Array]]


def of_weights(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the weights of a tap's step."""
    if fits(tap, LINEAR):
        yield from _of_linear(question, parameters_of(tap), tap)
        yield from _rounded(question, parameters_of(tap))
    elif fits(tap, NORMS):
        yield from _of_norm(question, norm_of(question.config.norm_sharing, tap))
        yield from _rounded(question, norm_of(question.config.norm_sharing, tap))
    elif tap in ("embeddings.token", "embeddings.position", "embeddings.segment"):
        yield from _rounded(question, tap)


def _rounded(question: Question, own: str) -> Iterator[Hypothesis]:
    """Yield parameters of a step that were rounded."""
    weights = question.case.weights
    names = [name for name in (f"{own}.weight", f"{own}.bias") if name in weights]
    for name in SHORTER.get(question.case.dtype, ()):
        short: Made = {parameter: partial(_shorter, name, weights[parameter]) for parameter in names}
        for chosen in dict.fromkeys((*((parameter,) for parameter in names), tuple(names))):
            text = " and ".join(f"`{parameter}`" for parameter in chosen)
            made = {parameter: short[parameter] for parameter in chosen}
            yield loaded(f"weight_in_{name}", f"{text} rounded to {name}", "PRC-2", made)


def _shorter(name: str, array: Array) -> Array:
    return rounding(name)(array.astype(np.float64))


# Linear layers.


def _of_linear(question: Question, own: str, tap: str) -> Iterator[Hypothesis]:
    config, weights = question.config, question.case.weights
    name, bias = f"{own}.weight", f"{own}.bias"
    weight = weights[name]
    if bias in weights:
        yield loaded("missing_bias", f"`{bias}` left out", "WGT-2", {bias: lambda: 0 * weights[bias]})
    if weight.shape[0] == weight.shape[1]:
        yield loaded("transposed_weight", f"`{name}` transposed", "WGT-2", {name: lambda: weight.T})
    else:
        for word, read in (
            ("read", lambda: weight.reshape(-1).reshape(weight.shape, order="F")),
            ("stored", lambda: weight.T.reshape(weight.shape)),
        ):
            text = f"`{name}` {word} in the wrong memory order"
            yield loaded("weight_in_wrong_order", text, "WGT-2", {name: read})
    if own == "classifier":
        reversed_classes = {n: partial(np.flip, weights[n], -1) for n in (name, bias)}
        yield loaded("classes_reversed", "classes in reverse order", "HED-3", reversed_classes)
        if config.pooling == "flatten":
            for shape in ((-1, config.d_model), (config.d_model, -1)):
                swapped = partial(_swapped, weight, (*shape, weight.shape[1]))
                text = f"rows of `{name}` for features before tokens"
                yield loaded("flatten_order", text, "HED-1", {name: swapped})
    yield from _of_other_layers(question, own)
    if tap.endswith((".query", ".key", ".value", "attention.output")):
        yield from _of_heads(question, own, tap)


def _swapped(weight: Array, shape: tuple[int, ...]) -> Array:
    return weight.reshape(shape).swapaxes(0, 1).reshape(weight.shape)


def _of_other_layers(question: Question, own: str) -> Iterator[Hypothesis]:
    """Yield parameters of the same shape: of the same sublayer, or the same of other layers."""
    weights = question.case.weights
    layer, _, role = own.partition(".attention.")
    beside = [f"{layer}.attention.{other}" for other in ("query", "key", "value", "output")] if role else []
    inside = own.split(".", 2)[2:] if own.startswith("layers.") else []
    elsewhere = [f"layers.{i}.{name}" for name in inside for i in range(question.config.num_layers)]
    for other in (*beside, *elsewhere):
        found = {
            f"{own}.{leaf}": partial(weights.__getitem__, f"{other}.{leaf}")
            for leaf in ("weight", "bias")
            if f"{own}.{leaf}" in weights and f"{other}.{leaf}" in weights
        }
        if other == own or f"{own}.weight" not in found:
            continue
        if weights[f"{other}.weight"].shape != weights[f"{own}.weight"].shape:
            continue
        kind = "swapped_weights" if other in beside else "weights_of_another_layer"
        yield loaded(kind, f"the weights of `{other}` instead of its own", "WGT-1", found)
        for name in found if len(found) > 1 else ():
            text = f"`{name.replace(own, other)}` instead of `{name}`"
            yield loaded(kind, text, "WGT-1", {name: found[name]})


def _of_heads(question: Question, own: str, tap: str) -> Iterator[Hypothesis]:
    """Yield weights whose heads stand in another order, or that were cut out of a fused one wrongly."""
    config, weights = question.config, question.case.weights
    numbers = np.arange(config.d_model).reshape(config.num_heads, config.head_dim)
    outputs = not tap.endswith("output")
    leaves = [f"{own}.weight", *([f"{own}.bias"] if outputs and f"{own}.bias" in weights else [])]
    for order in _orders(config.num_heads):
        columns, axis = numbers[list(order)].reshape(-1), -1 if outputs else 0
        moved = {name: partial(np.take, weights[name], columns, axis=axis) for name in leaves}
        said = f"heads in the order {', '.join(map(str, order))}"
        yield loaded("heads_permuted", said, "ATT-2", moved)
        if len(leaves) > 1:
            yield loaded(
                "heads_permuted", f"`{leaves[0]}` with {said}", "ATT-2", {leaves[0]: moved[leaves[0]]}
            )
    if outputs:
        prefix, _, role = own.rpartition(".")
        third = {
            f"{own}.{leaf}": partial(cut_from_fused, config, weights, prefix, role, leaf)
            for leaf in ("weight", "bias")
            if all(f"{prefix}.{one}.{leaf}" in weights for one in ("query", "key", "value"))
        }
        text = "a fused weight that holds query, key and value head by head, cut into thirds"
        yield loaded("fused_weight", text, "WGT-1", third)


def _orders(heads: int) -> list[tuple[int, ...]]:
    """Return orders of heads: all of a few, reversed and rolled ones of many."""
    straight = tuple(range(heads))
    if heads <= 3:
        return [order for order in itertools.permutations(straight) if order != straight]
    return [straight[::-1], (*straight[1:], 0), (heads - 1, *straight[:-1])]


# Norms.


def _of_norm(question: Question, own: str) -> Iterator[Hypothesis]:
    weights, config = question.case.weights, question.config
    gain, offset = weights[f"{own}.weight"], weights[f"{own}.bias"]

    def norm(name: str, text: str, gain: Array, offset: Array, clause: str = "NRM-2") -> Hypothesis:
        made: Made = {f"{own}.weight": lambda: gain, f"{own}.bias": lambda: offset}
        return loaded(name, text, clause, made)

    yield norm("norm_gain_and_offset_missing", "gain 1 and offset 0", gain * 0 + 1, offset * 0)
    yield norm("norm_gain_and_offset_swapped", "gain and offset in each other's place", offset, gain)
    for name, parameter in parameters(config, question.case.part).items():
        other = name.removesuffix(".weight")
        if parameter.kind != "gamma" or other == own:
            continue
        sibling = other[:-1] == own[:-1] and own.startswith("layers.")
        kind, clause = ("norm_sharing", "NRM-5") if sibling else ("weights_of_another_norm", "WGT-1")
        text = f"the gain and offset of `{other}` instead of its own"
        yield norm(kind, text, weights[name], weights[f"{other}.bias"], clause)
