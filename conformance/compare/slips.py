"""Slips that explain a divergence: what an operation gives that was written a little otherwise.

They are tried where no bug of the catalogue explains it. No proof counts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.compare.arithmetic import BLIND, value_of
from concord.conformance.compare.bugs import ACTIVATIONS, HIDDEN, NORMS, Found, Operation, OperationBug

aten = torch.ops.aten

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    "sigmoid": torch.sigmoid,
    "hardtanh": aten.hardtanh,
    "hardsigmoid": aten.hardsigmoid,
    "hardswish": aten.hardswish,
    "softplus": aten.softplus,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
}
"""Functions of one operand, of which one may stand for another."""

IN_PLACE_OF = {
    "add": "sub",
    "sub": "add",
    "mul": "add",
    "le": "lt",
    "lt": "le",
    "ge": "gt",
    "gt": "ge",
    "amax": "mean",
}
"""Operations of two operands, or over some axes, and what may stand in their place."""

BORDERS = {
    "reflect": "mirrored at its border",
    "replicate": "continued by its border",
    "circular": "wrapped around",
}

PARTS = 4
"""So many parts at most have another order."""

MOST_PLACES = 64
"""Along a longer axis no other place is tried."""


def slips(it: Operation) -> Iterator[OperationBug]:
    """Yield every slip that an operation may have."""
    kinds = (
        _omitted,
        _exchanged,
        _parts_exchanged,
        _masked,
        _counted,
        _epsilons,
        _convolved,
        _padded,
        _pooled,
        _moved,
        _looked_up,
        _laid_out,
        _repeated,
    )
    for kind in kinds:
        yield from starmap(OperationBug, kind(it))


def _moves(it: Operation) -> bool:
    return it.func.is_view or it.name in ("clone", "copy", "_to_copy", "_unsafe_view", "detach", "alias")


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else None


def _omitted(it: Operation) -> Found:
    """Yield what may be left out, where an operand has the shape of the result."""
    if not it.floats(1) or _moves(it) or it.func._schema.is_mutable:  # noqa: SLF001 – nothing else says it
        return
    if it.name in ("mul", "div", "sub", "rsub", "pow") and it.floats(2):
        names = {"mul": "factor", "div": "division", "sub": "subtraction"}
        if it.name in names and it.args[0].shape == torch.broadcast_shapes(*map(_shape, it.args[:2])):
            kept = it.args[0]
            yield "operand_left_out", f"leaving out the {names[it.name]}", partial(torch.clone, kept)
        if it.name == "mul" and it.args[1].shape == torch.broadcast_shapes(*map(_shape, it.args[:2])):
            yield "operand_left_out", "leaving out the first factor", partial(torch.clone, it.args[1])
    elif it.name == "addmm":
        spread = partial(torch.Tensor.expand, it.args[0], it.args[1].shape[0], it.args[2].shape[1])
        yield "product_left_out", "leaving out a product, as of a state that is not carried on", spread
    elif it.name == "mm":
        nothing = partial(torch.zeros, it.args[0].shape[0], it.args[1].shape[1])
        yield "product_left_out", "leaving out a product, as of a state that is not carried on", nothing
    elif it.name in SAME_SHAPE or it.name in NORMS:
        kept = partial(torch.clone, it.args[0])
        if it.name in NORMS:
            kept = partial(_first_of, it, it.args[0])
        yield f"{it.name}_left_out", f"leaving out {it.name}", kept


# fmt: off
SAME_SHAPE = frozenset(
    (
        "_softmax", "abs", "clamp", "clamp_max", "clamp_min", "cos", "cumsum", "exp", "flip", "gelu",
        "log", "log1p", "pow", "reciprocal", "roll", "round", "rsqrt", "sigmoid", "silu", "sin",
        "softplus", "sqrt", "square", "tanh"
    )
)
# fmt: on
"""Operations of one operand whose result has its shape."""


def _first_of(it: Operation, x: Tensor) -> Any:
    """Return a tensor in place of the first of several that an operation gives."""
    made = it()
    return (x.clone(), *made[1:]) if isinstance(made, tuple) else x.clone()


def _exchanged(it: Operation) -> Found:
    """Yield other operations, and other orders of operands and parts."""
    if (it.name in FUNCTIONS and it.name not in ACTIVATIONS) or it.name in ("tanh", "silu", "gelu", "relu"):
        for name, function in FUNCTIONS.items():
            known = it.name in ACTIVATIONS and name in ACTIVATIONS
            if name != it.name and not known:
                yield "another_function", f"{name} in place of {it.name}", partial(function, it.args[0])
    alike = it.floats(2) and (it.name != "mul" or it.args[0].shape == it.args[1].shape)
    if (other := IN_PLACE_OF.get(it.name)) and (alike or it.name not in ("add", "sub", "mul")):
        text = f"{other} in place of {it.name}"
        yield "another_operation", text, partial(getattr(aten, other), *it.args, **it.kwargs)
    if it.name == "mean" and len(it.args) > 1 and it.args[1]:
        yield "another_operation", "the largest in place of the mean", partial(aten.amax, *it.args[:3])
    if it.name in ("sub", "div") and it.floats(2) and it.args[0].shape == it.args[1].shape:
        opposite = (it.args[1], it.args[0], *it.args[2:])
        yield (
            "operands_exchanged",
            f"the operands of {it.name} exchanged",
            partial(it.func, *opposite, **it.kwargs),
        )
    if it.name == "where" and len(it.args) > 2:
        yield (
            "operands_exchanged",
            "the two sides of a choice exchanged",
            partial(aten.where, it.args[0], it.args[2], it.args[1]),
        )


def _parts_exchanged(it: Operation) -> Found:
    """Yield other orders of parts, and factors that are transposed."""
    if it.name in ("split", "split_with_sizes", "chunk", "unbind", "unsafe_split"):
        with _disable_current_modes():
            shapes = [part.shape for part in it()] if isinstance(it.args[0], Tensor) else []
        if 1 < len(shapes) <= PARTS and len(set(shapes)) == 1:
            for i, j in itertools.combinations(range(len(shapes)), 2):
                yield "parts_exchanged", f"parts {i} and {j} exchanged", partial(_with_exchanged, it, i, j)
    if it.name in ("bmm", "mm") and it.args[1].shape[-1] == it.args[1].shape[-2] > 1 and it.name == "bmm":
        turned = partial(it.replaced, 1, it.args[1].transpose(-1, -2))
        yield "operand_transposed", "a second factor that is transposed", turned


def _with_exchanged(it: Operation, i: int, j: int) -> Any:
    parts = list(it())
    parts[i], parts[j] = parts[j], parts[i]
    return type(parts)(parts)


def _masked(it: Operation) -> Found:
    """Yield other masks: another window or corner, a factor in place of what hides, and other blind rows."""
    hidden, make = _hiding(it)
    if hidden is not None:
        yield (
            "mask_as_factor",
            "a mask that multiplies scores by 0 and hides none",
            partial(
                torch.mul,
                it.args[0] if it.name != "where" else it.args[2 - _fill_place(it)],
                _floating(it, ~hidden),
            ),
        )
        for axis, what in ((-1, "key"), (-2, "query")):
            if hidden.ndim < 2 or hidden.shape[axis] < 2:
                continue
            for by, side in ((1, "earlier"), (-1, "later")):
                moved = _shifted(hidden, by, axis)
                if axis == -1:
                    yield (
                        "mask_wider",
                        f"a mask that shows one {side} {what} more",
                        partial(make, hidden & moved(True)),
                    )
                    yield (
                        "mask_narrower",
                        f"a mask that hides one {side} {what} more",
                        partial(make, hidden | moved(False)),
                    )
                for edge in (True, False):
                    yield "mask_moved", f"a mask that is moved by one {what}", partial(make, moved(edge))
    if it.name in ("_softmax", "_safe_softmax") and (rows := blind_rows(it.args[0], it.args[1])) is not None:
        for value, what in ((1 / it.args[0].shape[it.args[1]], "uniform"), (0.0, "zero")):
            yield (
                f"blind_rows_{what}",
                f"rows that see no key being {what}",
                partial(_filled, it, rows, value),
            )


def _fill_place(it: Operation) -> int:
    """Return whether the first side of a choice hides."""
    return int(not isinstance(it.args[1], Tensor) or it.args[1].numel() == 1)


def _hiding(it: Operation) -> tuple[Tensor | None, Callable[[Tensor], Any]]:
    """Return which scores an operation hides, and what makes it hide others."""
    with _disable_current_modes():
        if it.name == "masked_fill" and not isinstance(it.args[2], Tensor) and it.args[2] < HIDDEN:
            return it.args[1].bool(), partial(it.replaced, 1)
        for place in (1, 0) if it.name == "add" and it.floats(2) else ():
            added = value_of(it.args[place])
            hidden = (added < HIDDEN) | ~torch.isfinite(added)
            if bool(hidden.any()) and bool((hidden | (added == 0)).all()):
                least = added.min()

                def make(other: Tensor, place: int = place, least: Tensor = least) -> Any:
                    return it.replaced(place, _floating(it, other, float(least)))

                return hidden, make
    return None, lambda hidden: None


def _floating(it: Operation, flags: Tensor, value: float = 1.0) -> Tensor:
    """Return a value where flags are, and 0 elsewhere."""
    zeros = torch.zeros(flags.shape, dtype=it.args[0].dtype)
    return zeros.masked_fill(flags, value)


def _shifted(hidden: Tensor, by: int, axis: int) -> Callable[[bool], Tensor]:
    """Return what moves flags along an axis, the place that becomes free holding what it is given."""

    def moved(edge: bool) -> Tensor:
        made = torch.roll(hidden, by, axis)
        made.narrow(axis, 0 if by > 0 else -1 + hidden.shape[axis], 1).fill_(edge)
        return made

    return moved


def blind_rows(scores: Tensor, axis: int) -> Tensor | None:
    """Return which rows of a softmax see no key; None if all see one."""
    with _disable_current_modes():
        rows = value_of(scores).amax(axis, keepdim=True) <= BLIND
        return rows if bool(rows.any()) else None


def _filled(it: Operation, rows: Tensor, value: float) -> Any:
    return it().masked_fill(rows, value)


def _counted(it: Operation) -> Found:
    """Yield n / (n - 1), and where an epsilon is added."""
    if it.name == "mean":
        made = it.args[0].numel() / max(it().numel(), 1)
        if made > 1:
            yield (
                "count_less_one",
                "a sum that is divided by n - 1 in place of n",
                partial(_scaled, it, made / (made - 1)),
            )
    if it.name in ("var", "std", "var_mean"):
        other = 0 if it.kwargs.get("correction", 1) else 1
        words = (
            "the biased variance, divided by n," if not other else "the unbiased variance, divided by n - 1,"
        )
        if "correction" in it.kwargs:
            yield "norm_variance", words, partial(it.func, *it.args, **{**it.kwargs, "correction": other})
    if it.name == "native_group_norm":
        x, weight, bias, batch, channels, spatial, groups, epsilon = it.args
        count = channels * spatial // groups
        for other in (1, groups * 2, groups // 2, channels):
            if 0 < other != groups and channels % other == 0:
                changed = (*it.args[:6], other, epsilon)
                yield "groups", f"{other} groups in place of {groups}", partial(it.func, *changed)
        if count > 1 and weight is not None:
            share = 1 - 1 / count
            args = (x, weight * math.sqrt(share), bias, batch, channels, spatial, groups, epsilon * share)
            yield "norm_variance", "the unbiased variance, divided by n - 1,", partial(it.func, *args)


def _epsilons(it: Operation) -> Found:
    """Yield where an epsilon, or the 1 of a weight, is added."""
    if it.name == "add" and it.floats(1) and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2:
        x, epsilon = it.args[:2]
        yield (
            "epsilon_outside",
            "an epsilon that is added to the root",
            lambda: torch.square(x.sqrt() + epsilon),
        )
        yield (
            "epsilon_inside",
            "an epsilon that is added under the root",
            lambda: torch.sqrt(x.square() + epsilon),
        )
        yield "epsilon_least", "an epsilon below which nothing may be", partial(x.clamp_min, epsilon)
    if it.name == "mul" and it.floats(2):
        for place in (0, 1):
            if it.args[place].ndim == 1 < it.args[1 - place].ndim:
                yield (
                    "weight_plus_one",
                    "a weight to which 1 is added",
                    partial(it.replaced, place, it.args[place] + 1),
                )
                yield (
                    "weight_less_one",
                    "a weight of which 1 is taken",
                    partial(it.replaced, place, it.args[place] - 1),
                )
    if it.name == "cumsum" and it.floats(1):
        yield "cumsum_exclusive", "a running sum without the own place", lambda: it() - it.args[0]


def _scaled(it: Operation, factor: float) -> Any:
    return it() * factor


def _convolved(it: Operation) -> Found:
    """Yield other borders of convolutions, other kernels, and pixels that are moved by one."""
    if it.name == "convolution" and not it.args[6]:
        x, weight, bias, stride, padding, dilation, _, _, groups = it.args
        pads = [side for size in reversed(padding) for side in (size, size)]

        def convolved(padded: Tensor, kernel: Tensor = weight) -> Any:
            return aten.convolution(
                padded, kernel, bias, stride, [0] * len(padding), dilation, False, it.args[7], groups
            )

        if any(padding):
            for mode, what in BORDERS.items():
                if all(size < length for size, length in zip(padding, x.shape[2:], strict=True)):
                    yield (
                        "border",
                        f"an input that is {what}, in place of zeros",
                        lambda mode=mode: convolved(F.pad(x, pads, mode=mode)),
                    )
            for first in (True, False):
                sides = [
                    side for size in reversed(padding) for side in ((2 * size, 0) if first else (0, 2 * size))
                ]
                word = "before" if first else "behind"
                yield (
                    "padding_side",
                    f"padding that stands {word} the input alone",
                    lambda sides=sides: convolved(F.pad(x, sides)),
                )
        if weight[0, 0].numel() > 1:
            axes = list(range(2, weight.ndim))
            yield "kernel_flipped", "a kernel that is flipped", lambda: it.replaced(1, weight.flip(axes))
        if weight.ndim == 4 and weight.shape[2] == weight.shape[3] > 1:
            turned = weight.transpose(2, 3)
            yield (
                "kernel_transposed",
                "a kernel whose height and width are exchanged",
                partial(it.replaced, 1, turned),
            )


def _padded(it: Operation) -> Found:
    """Yield other borders, and borders on other sides."""
    if it.name == "constant_pad_nd":
        x, pads = it.args[0], list(it.args[1])
        pairs = [pads[i : i + 2] for i in range(0, len(pads), 2)]
        for by, side in ((1, "later"), (-1, "earlier")):
            moved = [n for a, b in pairs for n in ((a + by, b - by) if a + b else (a, b))]
            if min(moved) >= min(0, *pads):
                yield (
                    "padding_side",
                    f"padding by which all stands one place {side}",
                    partial(it.replaced, 1, moved),
                )
        opposite = [n for a, b in pairs for n in (b, a)]
        if opposite != pads:
            yield "padding_side", "padding on the opposite side", partial(it.replaced, 1, opposite)
        for mode, what in BORDERS.items() if x.ndim > len(pairs) and min(pads) >= 0 else ():
            if all(max(pair) < x.shape[-1 - i] for i, pair in enumerate(pairs)) and x.ndim - len(pairs) in (
                1,
                2,
            ):
                yield "border", f"an input that is {what}, in place of zeros", partial(F.pad, x, pads, mode)
    for mode, what in BORDERS.items() if it.name.endswith(("tion_pad1d", "tion_pad2d")) else ():
        if not it.name.startswith(mode[:7]):
            yield "border", f"an input that is {what}", partial(F.pad, it.args[0], list(it.args[1]), mode)
    if it.name.endswith(("tion_pad1d", "tion_pad2d")):
        yield "border", "zeros around the input", partial(F.pad, it.args[0], list(it.args[1]))


def _pooled(it: Operation) -> Found:
    """Yield other ways to pool and to interpolate."""
    if it.name == "avg_pool2d":
        args = (*it.args, *(None, [0, 0], False, True)[len(it.args) - 2 :]) if len(it.args) < 6 else it.args
        flipped = (*args[:5], not args[5], *args[6:])
        yield "border_counted", "a mean that counts the border otherwise", partial(it.func, *flipped)
        yield (
            "another_operation",
            "the largest in place of the mean",
            partial(F.max_pool2d, it.args[0], *it.args[1:4]),
        )
    if it.name.startswith("upsample_") and len(it.args) > 2 and isinstance(it.args[2], bool):
        yield (
            "corners",
            f"corners that are {'not ' * it.args[2]}aligned",
            partial(it.replaced, 2, not it.args[2]),
        )


def _moved(it: Operation) -> Found:
    """Yield places one off: of a slice, a step of time, a token, a position."""
    if it.name == "select" and isinstance(it.args[2], int):
        size, place = it.args[0].shape[it.args[1]], it.args[2] % it.args[0].shape[it.args[1]]
        for other in dict.fromkeys((place - 1, place + 1, 0, size - 1)):
            if 0 <= other < size <= MOST_PLACES and other != place:
                yield (
                    "place",
                    f"place {other} of axis {it.args[1]} in place of {place}",
                    partial(it.replaced, 2, other),
                )
    if it.name == "slice" and len(it.args) > 3:
        x, axis, start, end, *step = it.args
        end = min(end, x.shape[axis]) if end is not None else x.shape[axis]
        start = start or 0
        for by in (1, -1):
            if start + by >= 0 and end + by <= x.shape[axis]:
                changed = partial(it.func, x, axis, start + by, end + by, *step)
                yield (
                    "slice",
                    f"a slice of axis {axis} that starts at {start + by} in place of {start}",
                    changed,
                )
    if it.name == "arange" and not it.kwargs.get("requires_grad"):
        for by in (1, -1, 2):
            yield (
                "positions",
                f"positions that start {abs(by)} {'later' if by > 0 else 'earlier'}",
                lambda by=by: it() + by,
            )
    if it.name == "roll":
        for shifts, what in (
            ([-n for n in it.args[1]], "the other way"),
            ([n + 1 for n in it.args[1]], "by one more"),
        ):
            yield "roll", f"a roll {what}", partial(it.replaced, 1, shifts)


def _looked_up(it: Operation) -> Found:
    """Yield rows that are looked up one off, and steps in another order."""
    if it.name in ("embedding", "index_select") and it.args[1].ndim:
        place = 1 if it.name == "embedding" else 2
        for by in (2, -2):
            rows = (it.args[1] + by).clamp(0, len(it.args[0]) - 1)
            yield "index_shifted", f"rows that are looked up {by} off", partial(it.replaced, place, rows)
        yield (
            "index_reversed",
            "rows that are looked up in reverse order",
            lambda: it.replaced(1, it.args[1].flip(-1)),
        )
    if it.name in ("stack", "cat") and len(it.args[0]) > 2:
        parts = list(it.args[0])
        yield "steps_reversed", "parts in reverse order", partial(it.replaced, 0, parts[::-1])
        if len({part.shape for part in parts}) == 1:
            late = [torch.zeros_like(parts[0]), *parts[:-1]]
            yield "steps_late", "parts that stand one place later", partial(it.replaced, 0, late)


def _laid_out(it: Operation) -> Found:
    """Yield axes that are joined in the opposite order, and places in reverse order."""
    shape = list(it.args[1]) if it.name in ("view", "_unsafe_view", "reshape") and it.floats(1) else []
    x = it.args[0] if it.args else None
    if shape and len(shape) == x.ndim - 1 and x.ndim > 3:
        for axis in range(x.ndim - 1):
            before, joined = list(x.shape), x.shape[axis] * x.shape[axis + 1]
            fits = [*before[:axis], joined, *before[axis + 2 :]] == shape
            if fits and min(x.shape[axis : axis + 2]) > 1:
                for a, b in {(axis, axis + 1), (max(axis - 1, 0), axis)}:
                    turned = partial(_joined, x, a, b, shape)
                    yield "axes_joined", "axes that are joined in another order, as of heads", turned
    if it.name == "transpose" and it.floats(1) and x.ndim > 2:
        first, second = it.args[1:3]
        if x.shape[first] != x.shape[second]:
            other = [x.shape[i] for i in range(x.ndim)]
            other[first], other[second] = other[second], other[first]
            yield "not_transposed", "a reshape in place of a transposition", partial(torch.reshape, x, other)
    if it.name in ("bmm", "clone") and it.floats(1) and x.ndim > 2:
        for axis in range(1, x.ndim):
            if 1 < x.shape[axis] <= MOST_PLACES:
                last = len(it.args) - 1 if it.name == "bmm" else 0
                operand = it.args[last]
                if axis < operand.ndim:
                    flipped = partial(it.replaced, last, operand.flip(axis))
                    yield "axis_reversed", f"axis {axis} of {it.name} in reverse order", flipped


def _joined(x: Tensor, a: int, b: int, shape: Sequence[int]) -> Tensor:
    return x.transpose(a, b).reshape(shape)


def _repeated(it: Operation) -> Found:
    """Yield what is applied twice."""
    twice = it.name in NORMS or it.name in FUNCTIONS or it.name == "_softmax"
    if twice and it.floats(1):
        yield f"{it.name}_twice", f"{it.name} applied twice", partial(_twice, it)


def _twice(it: Operation) -> Any:
    made = it()
    return it.replaced(0, made[0] if isinstance(made, tuple) else made)
