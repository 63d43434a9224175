"""Bugs of operations beyond the catalogue."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.bugs.activations import USUAL
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.compare.aten_arithmetic import BLIND, value_of
from concord.conformance.compare.aten_operations import Operation, OperationBug, Unary, first, is_float
from concord.conformance.compare.operation_context import (
    ACTIVATIONS,
    SOFTMAXES,
    OperationContext,
    mask_of,
    of_catalogue,
    rounded,
)
from concord.conformance.wording import distinct
from concord.spec.arrays import Array
from concord.spec.precision import precision, round_to_bits

aten = torch.ops.aten

# Yields the name, the text and the computation of each bug.
Found = Iterator[tuple[str, str, Callable[[], Any]]]


def bugs(it: Operation) -> Iterator[OperationBug]:
    """Yield every bug of an operation."""
    yield from of_catalogue(it)
    for mechanism in MECHANISMS:
        yield from starmap(OperationBug, mechanism(it))


def _moves(it: Operation) -> bool:
    return it.func.is_view or it.name in ("clone", "_unsafe_view", "copy", "where", "detach", "alias")


# Omitted or repeated steps.

# Names of bugs by omitted item.
LEFT_OUT = {
    "scale": "score_scale_missing",
    "bias": "missing_bias",
    "weight": "norm_gain_missing",
    "first term": "residual_missing",
    "second term": "residual_missing",
}


# Operations that join two conditions, such as those of a mask.
CONDITIONS = ("bitwise_and", "bitwise_or", "logical_and", "logical_or")


def left_out(it: Operation) -> Found:
    """Yield omitted or repeated steps, and omitted operands."""
    if it.name in ("sum", "cumsum") and _is_mask(it.operands["self"]):
        yield "step_left_out", "leaving out the mask", partial(it.changed, "self", torch.ones_like)
    for name in ("self", "other") if it.name in CONDITIONS else ():
        alone = it.operands[name].expand(it.result.shape)
        yield "step_left_out", "leaving out one of two conditions", partial(it.giving, alone)
    if _moves(it) or mask_of(it) or not it.floats:
        return
    shape = first(it.result).shape
    for name, x in it.floats.items():
        part = _besides(it, name)
        if x.shape == shape or it.name == "add":
            if it.name not in ACTIVATIONS:  # the catalogue covers these
                alone = partial(_alone, it, x)
                yield LEFT_OUT.get(part, "step_left_out"), f"leaving out the {part}", alone
            if x is it.args[0] and x.shape == shape:
                twice = partial(it.having, **{name: first(it.result)})
                yield "done_twice", f"the {part} applied twice", twice
    for name in it.optional:
        text = f"{it.name} without its {name}"
        yield LEFT_OUT.get(name, "step_left_out"), text, partial(it.having, **{name: None})
    if is_float(it.operands.get("running_mean")):
        unshifted = partial(it.changed, "running_mean", torch.zeros_like)
        yield "step_left_out", f"{it.name} without its mean", unshifted
    if it.name == "addmm":
        yield "missing_bias", "leaving out the bias", partial(it.having, beta=0)
        yield "done_twice", "the bias added twice", partial(it.having, beta=2)
    if it.name in ("mm", "addmm"):
        text = "leaving out a product, as when a state is not carried over"
        yield "product_missing", text, partial(it.changed, "mat2", torch.zeros_like)


def _alone(it: Operation, x: Tensor) -> Any:
    return it.giving(x.expand(first(it.result).shape))


def _besides(it: Operation, kept: str) -> str:
    other = it.operands.get("self" if kept == "other" else "other")
    if it.name == "masked_fill" or (it.name == "mul" and _is_mask(other)):
        return "mask"
    if it.name in ("mul", "div", "sub"):
        words = {"mul": ("factor", "scale"), "div": ("division", "scale"), "sub": ("subtraction", "constant")}
        return words[it.name][not isinstance(other, Tensor)]
    if it.name != "add":
        return it.name.strip("_")
    if not isinstance(other, Tensor):
        return "constant"
    if other.ndim == 1 < it.operands[kept].ndim:
        return "bias"
    return "second term" if kept == "self" else "first term"


def _is_mask(x: Any) -> bool:
    if not isinstance(x, Tensor) or not x.numel():
        return False
    with _disable_current_modes():
        value = value_of(x)
        hidden, seen = value == 0, value == 1
        return bool((hidden | seen).all() and hidden.any() and seen.any())


# Other values.

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)

# Longest axis along which other indices are tried.
MOST_PLACES = 64

# Names of bugs by the changed number.
OF_NUMBERS = {"epsilon": "norm_epsilon", "correction": "norm_variance", "offset": "rows_off"}


def of_numbers(it: Operation) -> Found:
    """Yield other arguments; arbitrary values are fitted elsewhere."""
    softmax = it.name in SOFTMAXES
    for name, value in it.operands.items():
        for other in _others(it, name, value):
            if other != value:
                word = {"eps": "epsilon", "other": "offset" if type(value) is int else "epsilon"}.get(
                    name, name
                )
                last = ", the last," * (
                    name == "index" and other == it.operands["self"].shape[it.operands["dim"]] - 1
                )
                actual, right = distinct(other, value) if isinstance(value, float) else (other, value)
                text = f"{word} {actual}{last} in place of {right} in {it.name.strip('_')}"
                kind = "softmax_axis" if softmax else OF_NUMBERS.get(word, "another_number")
                yield kind, text, partial(it.having, **{name: other})
    if it.name == "slice":
        size = it.operands["self"].shape[it.operands["dim"]]
        start, end, _ = slice(it.operands["start"], it.operands["end"]).indices(size)
        for other in {start + 1, start - 1, size - end} - {start}:
            if 0 <= other <= size - (end - start):
                text = f"a slice of axis {it.operands['dim']} that starts at {other} in place of {start}"
                yield "another_number", text, partial(it.having, start=other, end=other + end - start)


def _others(it: Operation, name: str, value: Any) -> Iterable[Any]:
    x = next((x for x in it.operands.values() if isinstance(x, Tensor)), None)
    if name == "eps" or (it.name == "add" and type(value) is float and 0 < value <= 1e-2):
        return EPSILONS if value is not None else ()
    if name == "other" and type(value) is int and it.name in ("add", "sub") and not is_float(x):
        return (0, value - 1, value + 1)  # an offset of positions or ids
    if name in ("align_corners", "count_include_pad", "periodic"):
        return (not value,)
    if name == "correction":
        return (0, 1)
    if name == "group":
        return (n for n in range(1, it.operands["C"] + 1) if it.operands["C"] % n == 0)
    if name == "shifts":
        return ([-by for by in value],)
    if x is None or (it.func.is_view and name != "index"):
        return ()
    if name == "dim" and isinstance(value, int):
        return (axis for axis in range(x.ndim) if axis != value % x.ndim)
    if name == "dim" and isinstance(value, list):
        right, every = sorted(axis % x.ndim for axis in value), range(x.ndim)
        others = (*itertools.combinations(every, len(value)), every)
        return ([*axes] for axes in others if [*axes] != right)
    if name == "index" and isinstance(value, int):
        size = x.shape[it.operands["dim"]]
        near = (value % size - 1, value % size + 1, 0, size - 1)
        # A number in a table, as of a schedule, is looked up once; a loop may pass over any longer axis.
        is_tried = size <= MOST_PLACES or x.ndim == 1
        return [n for n in dict.fromkeys(near) if 0 <= n < size and n != value % size and is_tried]
    return ()


# Other operands and operations.

# Names of the factors of products.
FACTORS = {
    **dict.fromkeys(("mm", "bmm"), ("self", "mat2")),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "convolution": ("input", "weight"),
}

# Index and table operands of lookups.
INDICES = {"embedding": ("indices", "weight"), "index_select": ("index", "self"), "gather": ("index", "self")}

# Operations and their wrong substitutes.
IN_PLACE_OF: dict[str, Callable[..., Any]] = {
    "add": aten.sub,
    "sub": aten.add,
    "mul": aten.add,
    "le": aten.lt,
    "lt": aten.le,
    "ge": aten.gt,
    "gt": aten.ge,
    "sin": aten.cos,
    "cos": aten.sin,
    "mean": aten.amax,
    "amax": aten.mean,
    "minimum": aten.maximum,
    "maximum": aten.minimum,
    "rsqrt": aten.reciprocal,
    "log": aten.log10,
    "log10": aten.log,
    "max_pool2d_with_indices": aten.avg_pool2d,
}

# Maximum number of a result's parts that are tried in all orders, of exchanged parts, and of heads into which
# parts may be grouped.
PARTS, MOST_PARTS, MOST_HEADS = 4, 8, 33


def of_factors(it: Operation) -> Found:
    """Yield transposed or reversed factors."""
    for place, name in enumerate(FACTORS.get(it.name, ())):
        x, ordinal = it.operands[name], ("first", "second")[place]
        if place and x.shape[-1] == x.shape[-2] > 1:
            transposed = partial(torch.transpose, dim0=-1, dim1=-2)
            yield "transposed_weight", "a transposed square weight", partial(it.changed, name, transposed)
        for axis in range(x.ndim) if x.ndim > 2 else ():
            reverse = partial(it.changed, name, partial(torch.flip, dims=[axis]))
            yield "reversed", f"axis {axis} of the {ordinal} factor in reverse order", reverse
        if place and it.name == "convolution":
            reverse = partial(it.changed, name, partial(torch.flip, dims=[*range(2, x.ndim)]))
            yield "reversed", "a flipped kernel", reverse


def of_indices(it: Operation) -> Found:
    """Yield shifted lookups and positions."""
    for by in (1, -1, 2, -2) if it.name in INDICES else ():
        indices, table = INDICES[it.name]
        far = f"{'one' if abs(by) == 1 else 'two'} too {'high' if by > 0 else 'low'}"
        rows = (it.operands[indices] + by).clamp(0, it.operands[table].shape[it.operands.get("dim", 0)] - 1)
        kind = "other_rows" if abs(by) == 1 else "rows_off"
        yield kind, f"lookups that are {far}", partial(it.having, **{indices: rows})
    # Of a mask, the first sample's rows would be those of a mask left out.
    looks_up = it.name == "index" and is_float(it.operands["self"])
    for place, index in enumerate(it.operands["indices"] if looks_up else ()):
        for at, word in ((0, "first"), (-1, "last")) if isinstance(index, Tensor) else ():
            places = [*it.operands["indices"]]
            places[place] = torch.full_like(index, at)
            text = f"the {word} place of axis {place} in every lookup"
            yield "other_rows", text, partial(it.having, indices=places)
    for by in (1, -1, 2) if it.name == "arange" else ():
        text = f"positions that are {abs(by)} too {'high' if by > 0 else 'low'}"
        yield "other_positions", text, partial(torch.add, it.result, by)


def of_operations(it: Operation) -> Found:
    """Yield other operations, operands and parts."""
    operand: Any = it.operands.get("self")
    other: Any = it.operands.get("other")
    pair = isinstance(operand, Tensor) and isinstance(other, Tensor)
    same_shape = pair and operand.shape == other.shape
    if it.name in IN_PLACE_OF and (same_shape or it.name != "mul") and not mask_of(it):
        function = IN_PLACE_OF[it.name]
        sign = "the opposite sign, " * (it.name in ("add", "sub"))
        text = f"{sign}{function.__name__} in place of {it.name}"
        yield "other_operation", text, partial(_another, it, function)
    for name in [*USUAL][1:] if it.name == "mul" and same_shape and is_float(operand) else ():
        text = f"{name} in place of a product, such as that of x and its gate"
        yield "activation", text, partial(USUAL[name], OperationContext(operand, it.result), operand)
    if it.name in ("sub", "div", "where") and pair:
        text = f"the operands of {it.name} swapped"
        yield "operands_exchanged", text, partial(it.having, self=other, other=operand)
    if it.name == "sigmoid":
        text = "1 - sigmoid(x) in place of sigmoid(x), as when a gate's two branches are swapped"
        yield "operands_exchanged", text, partial(torch.rsub, it.result, 1.0)
    for name, x in it.operands.items() if it.name == "mul" and pair else ():
        for by in (1.0, -1.0) if x.ndim == 1 < it.result.ndim else ():
            text = "1 added to a weight" if by > 0 else "1 subtracted from a weight"
            yield "weight_plus_one", text, partial(it.having, **{name: x + by})
    parts: Any = it.operands["tensors"] if it.name in ("cat", "stack") else ()
    for order in _orders(len(parts)) if len(parts) <= PARTS else ():
        words = "opposite order" if len(parts) == 2 else f"order {', '.join(map(str, order))}"
        joined = partial(it.having, tensors=[parts[place] for place in order])
        yield "order", f"parts joined in the {words}", joined
    if len({part.shape for part in parts}) == 1 and it.operands["dim"] in (-1, it.result.ndim - 1):
        join, text = (torch.stack, "interleaved") if it.name == "cat" else (torch.cat, "joined as blocks")
        yield "order", f"parts {text}", lambda: join(parts, -1).reshape(it.result.shape)


def of_splits(it: Operation) -> Found:
    """Yield other parts of a split."""
    x: Any = it.operands.get("self")
    if it.name == "glu":
        axis = it.operands["dim"]
        halves = partial(torch.roll, shifts=x.shape[axis] // 2, dims=axis)
        yield "parts_exchanged", "the halves of glu swapped", partial(it.changed, "self", halves)
    parts: Any = it.result if it.name in ("split", "split_with_sizes", "unbind", "unsafe_split") else ()
    if not 1 < len(parts) <= MOST_PARTS:
        return
    shapes = [part.shape for part in parts]
    for order in _orders(len(parts)):
        if [shapes[place] for place in order] != shapes:
            continue
        moved = [place for place, part in enumerate(order) if place != part]
        text = f"the parts of a split in the order {', '.join(map(str, order))}"
        if len(moved) == 2:
            text = f"parts {moved[0]} and {moved[1]} of a split swapped"
        yield "parts_exchanged", text, partial(_in_order, it, order)
    if shapes.count(shapes[0]) < len(parts):
        return
    axis = it.operands["dim"] % x.ndim
    size = x.shape[axis] // len(parts)
    for heads in range(2, size + 1):
        if size % heads == 0 and (heads <= MOST_HEADS or heads == size):
            text = f"a split into parts that are grouped by head ({heads} heads), instead of into {BLOCKS}"
            if heads == size:
                text = INTERLEAVED
            sizes = (heads, len(parts), size // heads)
            yield "fused_weight", text, partial(_of_heads, it, axis, sizes)


BLOCKS, ALTERNATING = "contiguous blocks", "interleaved parts"
INTERLEAVED = f"a split into {ALTERNATING} instead of into {BLOCKS}"


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield wrong orders of parts: exchanged pairs, and all orders of each block of few parts."""
    places = range(count)
    blocks = [size for size in range(2, min(count, PARTS) + 1) if count % size == 0]
    exchanged = (
        tuple({one: other, other: one}.get(place, place) for place in places)
        for one, other in itertools.combinations(places, 2)
    )
    ordered = (
        tuple(place - place % size + order[place % size] for place in places)
        for size in blocks
        for order in itertools.permutations(range(size))
    )
    orders = dict.fromkeys(itertools.chain(exchanged, ordered))
    yield from (order for order in orders if order != tuple(places))


def of_halves(it: Operation) -> Found:
    """Yield halves of an axis that are interleaved instead of contiguous, or the opposite."""
    if it.name == "slice" and is_float(x := it.operands["self"]):
        size, start, step = x.shape[it.operands["dim"]], it.operands["start"] or 0, it.operands["step"]
        half, length = size // 2, min(size, it.operands["end"] or size) - start
        if size < FEWEST or size % 2:
            return
        if step == 1 and start in (0, half) and length == half:
            yield "fused_weight", INTERLEAVED, partial(it.having, start=start // half, end=size, step=2)
        if step == 2 and start + length == size:
            text = f"a split into {BLOCKS} instead of into {ALTERNATING}"
            begin = start * half
            yield "fused_weight", text, partial(it.having, start=begin, end=begin + half, step=1)


def _in_order(it: Operation, order: Iterable[int]) -> Any:
    parts = it()
    return type(parts)([parts[place] for place in order])


def _of_heads(it: Operation, axis: int, sizes: tuple[int, ...]) -> Any:
    parts = it.operands["self"].unflatten(axis, sizes).unbind(axis + 1)
    return type(it.result)([part.flatten(axis, axis + 1) for part in parts])


# Modes of interpolation, and whether they use antialiasing.
INTERPOLATIONS = [("nearest", False), *itertools.product(("bilinear", "bicubic"), (False, True))]


def of_layers(it: Operation) -> Found:
    """Yield other layers of images."""
    x: Any = it.operands.get("self")
    for mode, smooth in INTERPOLATIONS if "upsample_" in it.name and it.result.ndim == 4 else ():
        if mode not in it.name or smooth != it.name.endswith("_aa"):
            text = f"{mode} interpolation{' with antialiasing' * smooth} in place of {it.name}"
            other = partial(F.interpolate, x, it.result.shape[2:], mode=mode, antialias=smooth)
            yield "other_operation", text, other
    if it.name == "native_batch_norm" and not it.operands["training"]:
        of_batch = partial(it.having, training=True, running_mean=None, running_var=None)
        yield "batch_statistics", "batch statistics instead of running statistics", of_batch
    if it.name == "native_group_norm":
        text = "groups of interleaved channels instead of contiguous ones"
        yield "channels_interleaved", text, partial(_of_channels, it)
    channels = {"pixel_shuffle": ("self", 1), "convolution": ("weight", 0)}
    if it.name in channels:
        name, axis = channels[it.name]
        inner = it.operands["groups"] if it.name == "convolution" else it.operands["upscale_factor"] ** 2
        outer = it.operands[name].shape[axis] // inner
        for sizes in ((inner, outer), (outer, inner)) if inner > 1 < outer else ():
            text = f"channels that are split as {sizes[0]} x {sizes[1]} and transposed"
            crossed = partial(it.changed, name, partial(_crossed, axis=axis, sizes=sizes))
            yield "channels_interleaved", text, crossed


def _of_channels(it: Operation) -> Any:
    groups, channels = it.operands["group"], it.operands["C"]
    sizes = (channels // groups, groups)
    names = {"input": 1, **dict.fromkeys(it.optional, 0)}
    crossed = {name: _crossed(it.operands[name], axis, sizes) for name, axis in names.items()}
    return it.giving(_crossed(first(it.having(**crossed)), 1, sizes[::-1]))


def _crossed(x: Tensor, axis: int, sizes: Sequence[int], order: Sequence[int] = (1, 0)) -> Tensor:
    places = [axis + place for place in order]
    return x.unflatten(axis, sizes).movedim(sorted(places), places).flatten(axis, max(places))


def _another(it: Operation, function: Callable[..., Any]) -> Any:
    return it.giving(function(*it.args[:4], **it.kwargs))


# Rotary positions.

# Common bases of frequencies, and common factors by which longer contexts slow them down.
BASES = (20, 1e2, 1e3, 1e4, 1e5, 1.5e5, 1.6e5, 5e5, 1e6, 1e7)
CONTEXT_FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)

# Fewest frequencies in a sequence, and the largest deviation of their rounded logarithms from a line.
FEWEST, STRAIGHT = 3, 1e-4


def of_rotary(it: Operation) -> Found:
    """Yield rotations of other pairs of features."""
    if it.name in ("cat", "stack") and len(it.args[0]) == 2 and is_float(it.result):
        first, second = it.args[0]
        last = it.operands["dim"] in (-1, it.result.ndim - 1)
        # Equal parts are angles, which are joined but not rotated.
        if last and first.shape == second.shape and not _equal(first, second):
            for text, order in layouts(2 * first.shape[-1], halves=it.name == "cat"):
                yield "rotary_interleaved", text, partial(_rotated, it, order)
    for name, x in it.floats.items() if it.name == "mul" else ():
        if x.ndim and x.shape[-1] > 2 and x.shape[-1] % 2 == 0:
            for halves, pair in ((True, x.chunk(2, -1)), (False, (x[..., ::2], x[..., 1::2]))):
                for text, order in layouts(x.shape[-1], halves) if _equal(*pair) else ():
                    other = partial(it.having, **{name: x[..., order.argsort()]})
                    yield "rotary_interleaved", text, other


def _equal(first: Tensor, second: Tensor) -> bool:
    with _disable_current_modes():
        return torch.equal(value_of(first), value_of(second))


def layouts(width: int, halves: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield other layouts of rotated features, each with its text and its order."""
    neighbours = torch.arange(width).view(-1, 2).T.flatten()
    orders = (neighbours, neighbours.argsort()) if halves else (neighbours.argsort(), neighbours)
    pairs = "neighbours instead of halves" if halves else "halves instead of neighbours"
    yield f"rotary positions that pair {pairs}", orders[0]
    yield "queries and keys whose features are in the order of the other rotary layout", orders[1]


def _rotated(it: Operation, order: Tensor) -> Tensor:
    start = -2 if it.name == "stack" else -1  # axes of pairs
    second, first = it.args[0]
    x = it.having(tensors=[first, -second])
    moved = x.flatten(start)[..., order].reshape(x.shape)
    first, second = moved.unbind(-1) if it.name == "stack" else moved.chunk(2, -1)
    rotated = it.having(tensors=[-second, first])
    return rotated.flatten(start)[..., order.argsort()].reshape(x.shape)


def of_frequencies(it: Operation) -> Found:
    """Yield frequencies of another base, and multiples of them."""
    for name, x in it.floats.items() if it.name in ("mul", "div", "mm", "bmm") else ():
        if (found := _exponents(x)) is None:
            continue
        base, exponents = found
        size = exponents.numel()
        changes = {
            f"frequencies of base {other:g} instead of {base:.6g}": (other / base) ** exponents
            for other in BASES
            if abs(other / base - 1) > STRAIGHT
        }
        for count in (size - 1, size + 1):
            text = f"frequencies spread over {count} steps instead of {size}"
            changes[text] = base ** (exponents * (size / count - 1))
        for factor in CONTEXT_FACTORS:
            changes[f"frequencies multiplied by {factor:g}"] = torch.tensor(factor)
        for text, factors in changes.items():
            yield "other_frequencies", text, partial(it.changed, name, partial(_times, factors))


def _times(factors: Tensor, x: Tensor) -> Tensor:
    return (x * factors).to(x.dtype)  # the factors are double


def _exponents(x: Tensor) -> tuple[float, Tensor] | None:
    """Base and exponents, if the tensor is a geometric sequence along an axis."""
    with _disable_current_modes():
        value = value_of(x)
        for axis, size in enumerate(x.shape if x.numel() else ()):
            # A single line usually rules out a sequence, without a comparison of the whole tensor.
            line = value[tuple(slice(None) if place == axis else slice(1) for place in range(x.ndim))]
            if size < FEWEST or not (line > 0).all():
                continue
            logarithms, places = line.flatten().log(), torch.arange(size, dtype=torch.float64)
            for steps in (places / size, places // 2 * 2 / size):  # of sines, and each also of a cosine
                slope = (logarithms[-1] - logarithms[0]) / steps[-1]
                is_straight = (logarithms - logarithms[0] - slope * steps).abs().max() < STRAIGHT
                if is_straight and abs(slope) > STRAIGHT and (value == line).all():
                    return float(slope.abs().exp()), (steps * slope.sign()).reshape(line.shape)
    return None


def of_slopes(it: Operation) -> Found:
    """Yield slopes of linear biases (ALiBi) for another number of heads."""
    for name, x in it.floats.items() if it.name == "mul" else ():
        count = x.numel()
        if not 1 < count <= MOST_HEADS or count not in x.shape:
            continue
        below = 1 << count.bit_length() - 1
        heads = dict.fromkeys((count, below, 2 * below, 2 * count, 4 * below))
        slopes = {
            text: values[:count].reshape(x.shape)
            for number in heads
            for text, values in _slopes(number)
            if len(values) >= count
        }
        with _disable_current_modes():
            errors = {text: (values / value_of(x) - 1).abs().max() for text, values in slopes.items()}
        own = [text for text, error in errors.items() if error < STRAIGHT]
        for text, values in slopes.items() if own else ():
            if text not in own:
                times = partial(_times, values / slopes[own[0]])
                yield "other_slopes", f"{text} instead of {own[0]}", partial(it.changed, name, times)


def _slopes(heads: int) -> Iterator[tuple[str, Tensor]]:
    def sequence(count: int) -> Tensor:
        return 2 ** (-8 * torch.arange(1, count + 1, dtype=torch.float64) / count)

    below = 1 << heads.bit_length() - 1
    yield f"the slopes of {heads} heads", sequence(heads)
    if heads > below:  # the published code continues the slopes of a power of two
        joined = torch.cat([sequence(below), sequence(2 * below)[::2][: heads - below]])
        yield f"the slopes of {heads} heads, of which {below} are a power of two", joined


# Other masks.

# Mask constants that hide too little for large scores.
CONSTANTS = (-10.0, -100.0, -1e3, -1e4)


def of_masks(it: Operation) -> Found:
    """Yield other masks, constants, and rows that see no key."""
    if (rows := blind_rows(it)) is not None:
        for value, fill in ((1 / it.result.shape[it.operands["dim"]], "uniform"), (0.0, "zero")):
            filled = partial(torch.masked_fill, it.result, rows, value)
            yield "blind_rows", f"{fill} weights in rows that see no key", filled
    if (mask := mask_of(it)) is None or mask.hidden.ndim < 2:
        return
    for constant in CONSTANTS:
        yield "mask_constant", f"a mask constant of {constant:g}", partial(mask.hide, mask.hidden, constant)
    multiplied = partial(torch.mul, mask.scores, (~mask.hidden).to(mask.scores.dtype))
    yield "mask_by_factor", "a mask that multiplies scores by 0 and hides no key", multiplied
    for kind, text, hidden in _other_masks(mask.hidden):
        yield kind, f"a mask {text}", partial(mask.hide, hidden)


def _other_masks(hidden: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    yield "mask_of_other_tokens", "whose queries and keys are swapped", hidden.transpose(-1, -2)
    for by, side in ((1, "right"), (-1, "left")):
        yield "mask_of_other_tokens", f"shifted one key too far to the {side}", torch.roll(hidden, by, -1)
    for axis, by in itertools.product((-1, -2), (1, -1)):
        role, side = "key", "later" if by > 0 else "earlier"
        more, fewer = f"leaves one more {side} key visible", f"also hides one {side} key"
        if axis == -2:
            role, more = "query", f"leaves keys visible to one more {side} query"
            fewer = f"hides keys from one more {side} query"
        covered, shown = (torch.roll(hidden, by, axis) for _ in range(2))
        for moved, edge in ((covered, True), (shown, False)):
            moved.narrow(axis, 0 if by > 0 else hidden.shape[axis] - 1, 1).fill_(edge)
        yield "mask_moved", f"that {more}", hidden & covered
        yield "mask_moved", f"that {fewer}", hidden | shown
        yield "mask_moved", f"shifted by one {role}", covered
        yield "mask_moved", f"shifted by one {role}, with the vacated edge left visible", shown


def blind_rows(it: Operation) -> Tensor | None:
    """Rows of a softmax that see no key, if any."""
    if it.name not in SOFTMAXES:
        return None
    with _disable_current_modes():
        rows = value_of(it.operands["self"]).amax(it.operands["dim"], keepdim=True) <= BLIND
        return rows if bool(rows.any()) else None


# Other divisors of means, and other places for an epsilon.


def of_statistics(it: Operation) -> Found:
    """Yield other divisors of means, and other places for an epsilon."""
    x, epsilon = it.operands.get("self"), it.operands.get("other")
    if not is_float(x):
        return
    if it.name == "mean" and (count := x.numel() / max(it.result.numel(), 1)) > 1:
        less = partial(torch.mul, it.result, count / (count - 1))
        yield "norm_variance", "a sum divided by n - 1 instead of n", less
        yield "sum_for_mean", "a sum in place of a mean", partial(torch.mul, it.result, count)
        axes: Any = it.operands.get("dim") or ()
        for place, word in ((0, "first"), (-1, "last")) if len(axes) == 1 else ():
            text = f"the {word} element in place of a mean"
            yield "other_operation", text, partial(_element, it, axes[0], place)
    if it.name == "select" and x.shape[it.operands["dim"]] > 1:
        yield "other_operation", "a mean in place of one element", partial(x.mean, it.operands["dim"])
    if it.name == "cumsum":
        yield (
            "own_place_missing",
            "a running sum that excludes the current element",
            partial(torch.sub, it.result, x),
        )
    if it.name == "add" and type(epsilon) is float and 0 < epsilon <= 1e-2:
        for inner, outer, where in (
            (torch.sqrt, torch.square, "outside"),
            (torch.square, torch.sqrt, "inside"),
        ):
            text = f"an epsilon added {where} the square root"
            yield "norm_epsilon_placement", text, partial(_added_within, x, epsilon, inner, outer)


def _element(it: Operation, axis: int, place: int) -> Tensor:
    return it.operands["self"].select(axis, place).reshape(it.result.shape)


def _added_within(x: Tensor, number: float, inner: Unary, outer: Unary) -> Tensor:
    return outer(inner(x) + number)


# Other formats.


def quantized(x: Array, axis: int = 0) -> Array:
    """Round to 8 bits, with the largest value along an axis as the scale."""
    scale = abs(x).max(axis, keepdims=True) / 127
    return np.round(x / np.where(scale > 0, scale, 1)) * scale


FORMATS: dict[str, Callable[[Array], Array]] = {
    "bfloat16": precision("bfloat16").round,
    "float16": precision("float16").round,
    "int8": quantized,
    "tf32": partial(round_to_bits, bits=11),
}


def of_formats(it: Operation) -> Found:
    """Yield operands and results in shorter formats."""
    operation = it.name.strip("_")
    is_real = it.floats and is_float(first(it.result))
    for form, rounding in FORMATS.items() if is_real and not _moves(it) else ():
        shorter = partial(rounded, rounding=rounding)
        if factors := FACTORS.get(it.name):
            if it.name not in ("bmm", "baddbmm"):
                yield f"weight_in_{form}", f"a weight in {form}", partial(it.changed, factors[1], shorter)
            if form != "int8":
                yield f"{form}_products", f"a product of {form} values", partial(_with, it, factors, shorter)
        elif form in ("bfloat16", "float16"):
            for kind, text, names, after in (
                ("computed", f"{operation} computed", [*it.floats], shorter),
                ("given", f"the input of {operation}", [*it.floats][:1], torch.clone),
                ("stored", f"the result of {operation}", [], shorter),
            ):
                yield f"{kind}_in_{form}", f"{text} in {form}", partial(_result_in, it, names, shorter, after)


def _with(it: Operation, names: Iterable[str], function: Unary) -> Any:
    return it.having(**{name: function(it.operands[name]) for name in names})


def _result_in(it: Operation, names: Iterable[str], before: Unary, after: Unary) -> Any:
    return it.giving(after(first(_with(it, names, before))))


# Other orders of elements.

# Maximum number of joined axes for which other orders are tried.
MOST_JOINED = 3


def of_layouts(it: Operation) -> Found:
    """Yield split heads and joined axes in other orders."""
    x: Any = it.operands.get("self")
    if it.name in ("permute", "transpose") and is_float(x):
        text = "a reshape in place of a transposition"
        yield "axes_ordered", text, partial(x.reshape, it.result.shape)
    if it.name not in ("view", "_unsafe_view", "reshape") or not is_float(x):
        return
    result = it.result
    shape = list(result.shape)
    joined = x.ndim - len(shape) + 1
    if 1 < (split := 2 - joined) <= MOST_JOINED:
        axis = next(place for place, size in enumerate([*x.shape, 0]) if shape[place] != size)
        sizes = shape[axis : axis + split]
        is_split = min(sizes) > 1 and [*x.shape, 0][axis] == math.prod(sizes)
        for order in list(itertools.permutations(range(split)))[1:] if is_split else ():
            others = [sizes[place] for place in order]
            other = partial(it.changed, "self", partial(_crossed, axis=axis, sizes=others, order=order))
            if axis == x.ndim - 1 and split == 2:
                noun = "pairs of features" if sizes[1] == 2 else "heads"
                text = f"split as {sizes[1]} x {sizes[0]} and transposed, instead of {sizes[0]} x {sizes[1]}"
                yield "heads_interleaved", f"{noun} {text}", other
            yield "axes_ordered", _ordered(axis, sizes, order), other
    for axis in range(len(shape)) if 1 < joined <= MOST_JOINED and x.ndim > 2 else ():
        merged = x.shape[axis : axis + joined]
        if merged.numel() == shape[axis] > max(merged) and x.shape[:axis] == result.shape[:axis]:
            for start in {max(axis - 1, 0), axis}:  # the axes may have been transposed before
                for order in list(itertools.permutations(range(start, start + joined)))[1:]:
                    axes = [*range(start), *order, *range(start + joined, x.ndim)]
                    text = f"axes permuted to {axes} before they are joined, as when heads are joined"
                    yield "axes_ordered", text, partial(_permuted, x, axes, shape)
            if joined == 2:
                crossed = partial(_crossed, result, axis=axis, sizes=merged)
                yield "axes_ordered", _ordered(axis, merged), crossed


def _ordered(axis: int, sizes: Sequence[int], order: Sequence[int] = (1, 0)) -> str:
    """The bug of a split and of the join that reverts it."""
    other = " x ".join(str(sizes[place]) for place in order)
    return f"axis {axis} ordered as {other} and transposed, instead of {' x '.join(map(str, sizes))}"


def _permuted(x: Tensor, axes: list[int], result: list[int]) -> Tensor:
    return x.permute(axes).reshape(result)


# Other borders.

BORDERS = {
    "reflect": "mirrored at its border",
    "replicate": "padded by replicating its border",
    "circular": "wrapped around",
    "constant": "padded with zeros",
}


def of_borders(it: Operation) -> Found:
    """Yield other padding values and sides."""
    pads = [*(it.operands.get("pad") or it.operands.get("padding") or ())]
    if it.name == "convolution" and it.operands["transposed"]:
        for by, word in ((-1, "earlier"), (1, "later")):
            yield "padding_aside", f"an output that begins one position {word}", partial(_begun, it, pads, by)
        return
    if it.name == "convolution" and max(dilation := it.operands["dilation"]) > 1:
        padding = [pad // by for pad, by in zip(pads, dilation, strict=True)]
        text = f"dilation 1 in place of {dilation[0]}"
        yield "another_number", text, partial(it.having, dilation=[1] * len(pads), padding=padding)
    if it.name == "convolution" and any(pads):
        pads = [n for n in pads[::-1] for _ in range(2)]
    elif not it.name.startswith(("constant_pad", "reflection_pad", "replication_pad")):
        return
    sides = list(zip(pads[::2], pads[1::2], strict=True))
    own = next((mode for mode in BORDERS if it.name.startswith(mode[:7])), "constant")
    for mode, description in BORDERS.items():
        yield "border", f"an input {description}", partial(_bordered, it, pads, mode)
    for text, side in (
        ("placed entirely before the input", lambda a, b: (a + b, 0)),
        ("placed entirely after the input", lambda a, b: (0, a + b)),
        ("that shifts everything one position later", lambda a, b: (a + 1, b - 1) if a + b else (0, 0)),
        ("that shifts everything one position earlier", lambda a, b: (a - 1, b + 1) if a + b else (0, 0)),
        ("on the opposite side", lambda a, b: (b, a)),
    ):
        moved = list(itertools.chain(*starmap(side, sides)))
        yield "padding_aside", f"padding {text}", partial(_bordered, it, moved, own)


def _begun(it: Operation, pads: list[int], by: int) -> Any:
    whole = it.having(padding=[0] * len(pads), output_padding=[0] * len(pads))
    starts = [pad + by for pad in pads]
    sizes = zip(starts, it.result.shape[2:], whole.shape[2:], strict=True)
    cuts = [(-start, start + size - full) for start, size, full in sizes]
    return F.pad(whole, [*itertools.chain(*cuts[::-1])])


def _bordered(it: Operation, pads: list[int], mode: str) -> Any:
    x = F.pad(it.args[0], pads, mode)
    return it.having(input=x, padding=[0] * len(it.operands["padding"])) if it.name == "convolution" else x


MECHANISMS = (
    *(left_out, of_numbers, of_factors, of_indices, of_operations, of_splits, of_layers),
    *(of_rotary, of_halves, of_frequencies, of_slopes),
    *(of_masks, of_statistics, of_formats, of_layouts, of_borders),
)

# Bugs that a proof of sensitivity counts: common mistakes that usual inputs reveal.
COUNTED = {
    *(bug.name for bug in BUGS.values() if bug.scenario == "ragged"),
    *LEFT_OUT.values(),
    *("activation", "norm_epsilon", "norm_variance", "softmax_axis", "mask_of_other_tokens"),
    *("transposed_weight", "heads_interleaved", "other_rows", "order", "rotary_interleaved"),
    *(f"{prefix}_{form}" for form in FORMATS for prefix in ("weight_in", "computed_in")),
    *(f"{form}_products" for form in FORMATS),
}
