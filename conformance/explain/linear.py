"""Mistakes in linear layers: other weights, other inputs, other layouts (SPEC WGT-1 to WGT-4, ATT-1, ATT-2, FFN-1, HED-2, HED-3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, loaded, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.tape import Node

Array = NDArray[np.floating]

PROJECTIONS = ("*attention.query", "*attention.key", "*attention.value")
LINEAR = (
    *PROJECTIONS,
    "*attention.output",
    "layers.*.feed_forward.inner",
    "layers.*.feed_forward.outer",
    "pooler.dense",
    "logits",
)


def parameters_of(tap: str) -> str:
    """Return what the names of a linear layer's parameters begin with."""
    return {"pooler.dense": "pooler", "logits": "classifier"}.get(tap, tap)


def finished(m: Step, tap: str, y: Node) -> Node:
    """Return what becomes of a linear layer's result before it is tapped: heads for query, key and value."""
    if tap.endswith((".query", ".key", ".value")):
        if m.config.qkv_activation == "relu":
            y = m.a.relu(y, m.active(tap))
        y = m.a.reshape(y, (*y.shape[:2], m.config.num_heads, m.config.head_dim))
    return y


def applied_to(source: Callable[[Step], Node]) -> Change:
    """Return what applies a linear layer to something else."""
    return lambda m, tap, y: finished(m, tap, m.linear(parameters_of(tap), source(m)))


def of_linear(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with a linear layer."""
    own = parameters_of(tap)
    yield from of_bias(question, own)
    yield from of_layout(question, own)
    yield from of_other_layers(question, own)
    if tap.endswith((".query", ".key", ".value", "attention.output")):
        yield from of_heads_in_weights(question, own, tap)
    yield from of_input(question, tap)


def of_bias(question: Question, own: str) -> Iterator[Hypothesis]:
    """Yield other uses of the bias."""
    name = f"{own}.bias"
    if name in question.case.weights:
        bias = question.case.weights[name]
        yield loaded("missing_bias", f"`{name}` left out", "WGT-2", {name: lambda: 0 * bias})
        yield loaded("bias_twice", f"`{name}` added twice", "WGT-2", {name: lambda: 2 * bias})


def of_layout(question: Question, own: str) -> Iterator[Hypothesis]:
    """Yield other layouts of the weight."""
    name = f"{own}.weight"
    weight = question.case.weights[name]
    rows, columns = weight.shape
    if rows == columns:
        yield loaded("transposed_weight", f"`{name}` transposed", "WGT-2", {name: lambda: weight.T})
    else:
        for word, read in (
            ("read", lambda: weight.reshape(-1).reshape(weight.shape, order="F")),
            ("stored", lambda: weight.T.reshape(weight.shape)),
        ):
            yield loaded(
                "weight_in_wrong_order", f"`{name}` {word} in the wrong memory order", "WGT-2", {name: read}
            )
    if own == "classifier":
        leaves = (name, "classifier.bias")
        yield loaded(
            "classes_reversed",
            "classes in reverse order",
            "HED-3",
            {n: partial(_reversed, question.case.weights[n]) for n in leaves},
        )
        if question.config.pooling == "flatten":
            for shape in ((-1, question.config.d_model, columns), (question.config.d_model, -1, columns)):
                swapped = partial(_swapped, weight, shape)
                yield loaded(
                    "flatten_order", f"rows of `{name}` for features before tokens", "HED-1", {name: swapped}
                )


def _reversed(array: Array) -> Array:
    return array[..., ::-1]


def _swapped(weight: Array, shape: tuple[int, ...]) -> Array:
    return weight.reshape(shape).swapaxes(0, 1).reshape(weight.shape)


def of_other_layers(question: Question, own: str) -> Iterator[Hypothesis]:
    """Yield the parameters of other linear layers of the same shape: of the same sublayer, or the same of other layers."""
    weights = question.case.weights
    layer, _, role = own.partition(".attention.")
    same = (
        [
            name
            for name in (f"{layer}.attention.{other}" for other in ("query", "key", "value", "output"))
            if name != own
        ]
        if role
        else []
    )
    if own.startswith("layers."):
        inside = own.split(".", 2)[2]
        same += [
            f"layers.{i}.{inside}" for i in range(question.config.num_layers) if f"layers.{i}.{inside}" != own
        ]
    for other in same:
        found = {
            f"{own}.{leaf}": partial(weights.__getitem__, f"{other}.{leaf}")
            for leaf in ("weight", "bias")
            if f"{own}.{leaf}" in weights and f"{other}.{leaf}" in weights
        }
        if f"{own}.weight" not in found or weights[f"{other}.weight"].shape != weights[f"{own}.weight"].shape:
            continue
        kind = "swapped_weights" if role and other.startswith(f"{layer}.") else "weights_of_another_layer"
        yield loaded(kind, f"the weights of `{other}` instead of its own", "WGT-1", found)
        for name in found if len(found) > 1 else []:
            taken = name.replace(own, other)
            yield loaded(kind, f"`{taken}` instead of `{name}`", "WGT-1", {name: found[name]})


def of_heads_in_weights(question: Question, own: str, tap: str) -> Iterator[Hypothesis]:
    """Yield weights whose heads stand in another order."""
    config, weights = question.config, question.case.weights
    width, heads = config.head_dim, config.num_heads
    numbers = np.arange(config.d_model).reshape(heads, width)
    outputs = not tap.endswith("output")
    leaves = [f"{own}.weight", *([f"{own}.bias"] if outputs and f"{own}.bias" in weights else [])]
    for order in orders(heads):
        columns = numbers[list(order)].reshape(-1)
        moved = {name: partial(np.take, weights[name], columns, axis=-1 if outputs else 0) for name in leaves}
        yield loaded("heads_permuted", f"heads in the order {', '.join(map(str, order))}", "ATT-2", moved)
        if len(leaves) > 1:
            text = f"`{own}.weight` with heads in the order {', '.join(map(str, order))}"
            yield loaded("heads_permuted", text, "ATT-2", {leaves[0]: moved[leaves[0]]})
    if outputs:
        yield from of_fused_weight(question, own, tap)


def orders(heads: int) -> list[tuple[int, ...]]:
    """Return orders of heads: all of a few, reversed and rolled ones of many."""
    straight = tuple(range(heads))
    if heads <= 3:
        return [order for order in itertools.permutations(straight) if order != straight]
    return [straight[::-1], (*straight[1:], 0), (heads - 1, *straight[:-1])]


def of_fused_weight(question: Question, own: str, tap: str) -> Iterator[Hypothesis]:
    """Yield what a weight is that was cut out of a fused one in the wrong way."""
    config, weights, roles = question.config, question.case.weights, ("query", "key", "value")
    prefix, found = own.rpartition(".")[0], {}

    def third(parts: list[Array]) -> Array:
        split = [part.reshape(*part.shape[:-1], config.num_heads, config.head_dim) for part in parts]
        fused = np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], 3 * config.d_model)
        return np.split(fused, 3, axis=-1)[roles.index(tap.rpartition(".")[2])]

    for leaf in ("weight", "bias"):
        parts = [weights[f"{prefix}.{role}.{leaf}"] for role in roles if f"{prefix}.{role}.{leaf}" in weights]
        if len(parts) == len(roles):
            found[f"{own}.{leaf}"] = partial(third, parts)
    text = "a fused weight that holds query, key and value head by head, cut into thirds"
    yield loaded("fused_weight", text, "WGT-1", found)


def of_input(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield linear layers that are left out, or applied to something else."""
    weight = question.case.weights[f"{parameters_of(tap)}.weight"]
    config = question.config
    if weight.shape[0] == weight.shape[1]:
        yield changed(
            "linear_missing", "no linear layer at all", "WGT-2", lambda m, tap, y: m.a.reshape(m.x, y.shape)
        )
    if tap.endswith((".query", ".key", ".value", ".inner")):
        yield from options(config, "norm_placement", ("post", "pre"), "NRM-1")
    if tap.endswith(".inner"):
        layer = tap.partition(".feed_forward")[0]
        yield changed(
            "sublayers_in_parallel",
            "the input of the layer instead of its first sublayer's",
            "RES-1",
            applied_to(lambda m: m.entered[f"{layer}.norm1"]),
        )
    if tap.endswith(".outer"):
        inner = tap.replace(".outer", ".inner")
        yield changed(
            "activation_skipped",
            f"`{inner}` instead of what the activation makes of it",
            "FFN-2",
            applied_to(lambda m: m.now[inner]),
        )
    if tap == "logits" and config.pooler != "none":
        yield changed(
            "pooler_skipped",
            "`pooling` instead of `pooler.output`",
            "HED-2",
            applied_to(lambda m: m.now["pooling"]),
        )
        yield changed(
            "pooler_activation_skipped",
            "`pooler.dense` instead of `pooler.output`",
            "HED-2",
            applied_to(lambda m: m.now["pooler.dense"]),
        )
