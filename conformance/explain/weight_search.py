"""Wrong weights that a conversion may yield (SPEC WGT-1 to WGT-4, NRM-2).

A search tries them; a certificate injects some to prove that it detects them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from concord.conformance.bugs.bug import fits
from concord.conformance.bugs.context import norm_of, parameters_of
from concord.conformance.bugs.norms import NORMS
from concord.conformance.bugs.rounding import LINEAR
from concord.conformance.explain.hypothesis import Hypothesis, loaded
from concord.conformance.explain.question import SHORTER, Question, rounding
from concord.conformance.judging.expectation import JudgedProblem
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters

# Replacement arrays by parameter name, computed on demand, since those of a large model do not all fit in
# memory.
WrongArrays = Mapping[str, Callable[[], Array]]

LEAVES = ("weight", "bias")
PROJECTED = (".query", ".key", ".value")


class WrongWeights(NamedTuple):
    """A mistake in parameters: kind, words, broken clause, and wrong arrays."""

    name: str
    text: str
    clause: str
    arrays: WrongArrays


def of_weights(question: Question, tap: str) -> Iterator[Hypothesis]:
    return (loaded(*mistake) for mistake in wrong_weights(question.case, tap))


def wrong_weights(case: JudgedProblem, tap: str) -> Iterator[WrongWeights]:
    norm = fits(tap, NORMS)
    module = norm_of(case.config.norm_sharing, tap) if norm else parameters_of(tap)
    if fits(tap, LINEAR):
        yield from _of_linear(case, module, tap)
    if norm:
        yield from _of_norm(case, module)
    names = [name for name in (f"{module}.{leaf}" for leaf in LEAVES) if name in case.weights]
    for storage in SHORTER.get(case.dtype, ()):
        rounded = {name: partial(_shorter, storage, case.weights[name]) for name in names}
        yield from _each(f"weight_in_{storage}", f"rounded to {storage}", "PRC-2", rounded)


def _each(name: str, text: str, clause: str, arrays: WrongArrays) -> Iterator[WrongWeights]:
    for subset in dict.fromkeys(((*arrays,), *((key,) for key in arrays))):
        if subset:
            names = " and ".join(f"`{key}`" for key in subset)
            yield WrongWeights(name, f"{names} {text}", clause, {key: arrays[key] for key in subset})


def _shorter(name: str, array: Array) -> Array:
    return rounding(name)(array.astype(np.float64))


def _of_another(case: JudgedProblem, module: str, other: str) -> WrongArrays:
    weights = case.weights
    pairs = [(f"{module}.{leaf}", f"{other}.{leaf}") for leaf in LEAVES]
    return {
        target: partial(weights.__getitem__, source)
        for target, source in pairs
        if target in weights and source in weights and weights[target].shape == weights[source].shape
    }


# Linear layers.


def _of_linear(case: JudgedProblem, module: str, tap: str) -> Iterator[WrongWeights]:
    config, weights = case.config, case.weights
    name, bias = f"{module}.weight", f"{module}.bias"
    weight = weights[name]
    if bias in weights:
        yield WrongWeights(
            "missing_bias", f"`{bias}` left out", "WGT-2", {bias: lambda: np.zeros_like(weights[bias])}
        )
    if weight.shape[0] == weight.shape[1]:
        yield WrongWeights("transposed_weight", f"`{name}` transposed", "WGT-2", {name: lambda: weight.T})
    else:
        for word, make in (
            ("read", lambda: weight.reshape(-1).reshape(weight.shape, order="F")),
            ("stored", lambda: weight.T.reshape(weight.shape)),
        ):
            text = f"`{name}` {word} in the wrong memory order"
            yield WrongWeights("weight_in_wrong_order", text, "WGT-2", {name: make})
    if module == "classifier":
        reversed_classes = {n: partial(np.flip, weights[n], -1) for n in (name, bias)}
        yield WrongWeights("classes_reversed", "classes in reverse order", "HED-3", reversed_classes)
        if config.pooling == "flatten":
            for shape in ((-1, config.d_model), (config.d_model, -1)):
                swapped = partial(_swapped, weight, (*shape, weight.shape[1]))
                text = f"rows of `{name}` ordered by feature first, then by token"
                yield WrongWeights("flatten_order", text, "HED-1", {name: swapped})
    yield from _of_other_layers(case, module)
    if tap.endswith((*PROJECTED, "attention.output")):
        yield from _of_heads(case, module, outputs=tap.endswith(PROJECTED))


def _swapped(weight: Array, shape: tuple[int, ...]) -> Array:
    return weight.reshape(shape).swapaxes(0, 1).reshape(weight.shape)


def _of_other_layers(case: JudgedProblem, module: str) -> Iterator[WrongWeights]:
    layer, _, role = module.partition(".attention.")
    siblings = [f"{layer}.attention.{other}" for other in ("query", "key", "value", "output")] if role else []
    inside = module.split(".", 2)[2:] if module.startswith("layers.") else []
    elsewhere = [f"layers.{i}.{name}" for name in inside for i in range(case.config.num_layers)]
    for other in (*siblings, *elsewhere):
        if other != module:
            kind = "swapped_weights" if other in siblings else "weights_of_another_layer"
            yield from _each(kind, f"taken from `{other}`", "WGT-1", _of_another(case, module, other))


def _of_heads(case: JudgedProblem, module: str, outputs: bool) -> Iterator[WrongWeights]:
    """Yield permuted heads and wrong splits of a fused weight; ``outputs``: heads are columns."""
    config, weights = case.config, case.weights
    numbers = np.arange(config.d_model).reshape(config.num_heads, config.head_dim)
    leaves = [
        f"{module}.{leaf}" for leaf in (LEAVES if outputs else LEAVES[:1]) if f"{module}.{leaf}" in weights
    ]
    for order in _orders(config.num_heads):
        columns, axis = numbers[list(order)].reshape(-1), -1 if outputs else 0
        permuted = {name: partial(np.take, weights[name], columns, axis=axis) for name in leaves}
        text = f"with heads in the order {', '.join(map(str, order))}"
        yield from _each("heads_permuted", text, "ATT-2", permuted)
    if outputs:
        prefix, _, role = module.rpartition(".")
        third = {
            f"{module}.{leaf}": partial(_cut_from_fused, config, weights, prefix, role, leaf)
            for leaf in LEAVES
            if all(f"{prefix}.{other}.{leaf}" in weights for other in ("query", "key", "value"))
        }
        text = "a fused weight that holds query, key and value head by head, cut into thirds"
        yield WrongWeights("fused_weight", text, "WGT-1", third)


def _cut_from_fused(config: EncoderConfig, weights: Weights, prefix: str, role: str, leaf: str) -> Array:
    """A role's third of a fused weight that is stored head by head."""
    roles = ("query", "key", "value")
    parts = [weights[f"{prefix}.{other}.{leaf}"] for other in roles]
    split = [part.reshape(*part.shape[:-1], config.num_heads, config.head_dim) for part in parts]
    fused = np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], 3 * config.d_model)
    return np.split(fused, 3, axis=-1)[roles.index(role)]


def _orders(heads: int) -> list[tuple[int, ...]]:
    """Wrong orders of heads; only reversed and rolled for more than three."""
    straight = tuple(range(heads))
    if heads <= 3:
        return [order for order in itertools.permutations(straight) if order != straight]
    return [straight[::-1], (*straight[1:], 0), (heads - 1, *straight[:-1])]


# Norms.


def _of_norm(case: JudgedProblem, module: str) -> Iterator[WrongWeights]:
    weights, gain, offset = case.weights, f"{module}.weight", f"{module}.bias"
    defaults: WrongArrays = {
        gain: lambda: np.ones_like(weights[gain]),
        offset: lambda: np.zeros_like(weights[offset]),
    }
    swapped: WrongArrays = {gain: lambda: weights[offset], offset: lambda: weights[gain]}
    yield WrongWeights("norm_gain_and_offset_missing", "gain 1 and offset 0", "NRM-2", defaults)
    yield WrongWeights("norm_gain_and_offset_swapped", "gain and offset swapped", "NRM-2", swapped)
    for name, parameter in parameters(case.config, case.part).items():
        other = name.removesuffix(".weight")
        if parameter.kind != "gamma" or other == module:
            continue
        sibling = other[:-1] == module[:-1] and module.startswith("layers.")
        kind, clause = ("norm_sharing", "NRM-5") if sibling else ("weights_of_another_norm", "WGT-1")
        text = f"the gain and offset of `{other}` instead of its own"
        yield WrongWeights(kind, text, clause, _of_another(case, module, other))
