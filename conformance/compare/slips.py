"""Slips that explain a divergence: what an operation gives that was written a little otherwise.

They are tried where no bug of the catalogue explains it. No proof counts them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.compare.aten_arithmetic import BLIND, value_of
from concord.conformance.compare.bugs import ACTIVATIONS, HIDDEN, NORMS, Operation, OperationBug

aten = torch.ops.aten

Slips = Iterator[tuple[str, Callable[[], Any]]]
"""Of each slip its text, and what makes it."""

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **ACTIVATIONS,
    **{name: getattr(aten, name) for name in ("sigmoid", "hardtanh", "hardsigmoid", "hardswish", "softplus")},
    **{name: getattr(aten, name) for name in ("exp", "sin", "cos")},
}
"""Functions of one operand, of which one may stand for another."""

SAME_SHAPE = (
    *FUNCTIONS,
    *NORMS,
    "sqrt",
    "rsqrt",
    "abs",
    "log",
    "clamp",
    "cumsum",
    "flip",
    "roll",
    "_softmax",
    "pow",
)
"""Operations that may be left out, since their result has the shape of their first operand."""

IN_PLACE_OF = {"add": "sub", "sub": "add", "mul": "add", "le": "lt", "lt": "le", "ge": "gt", "gt": "ge"}
"""Operations of two operands, and what may stand in their place."""

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
    """Yield every slip that an operation may have. Of those that come to the same, one is told."""
    for kind in (_omitted, _exchanged, _masked, _counted, _convolved, _padded, _moved, _laid_out):
        yield from starmap(partial(OperationBug, "slip"), kind(it))


def _omitted(it: Operation) -> Slips:
    """Yield what is left out, or done twice."""
    first: Any = it.args[0] if it.floats(1) else None
    if it.name in ("mul", "div", "sub") and it.floats(2):
        whole = torch.broadcast_shapes(first.shape, it.args[1].shape)
        if first.shape == whole:
            words = {"mul": "factor", "div": "division", "sub": "subtraction"}
            yield f"leaving out the {words[it.name]}", partial(torch.clone, first)
        if it.name == "mul" and it.args[1].shape == whole:
            yield "leaving out the first factor", partial(torch.clone, it.args[1])
    elif it.name in ("mm", "addmm") and it.floats(2):
        rows = it.args[-2].new_zeros(it.args[-2].shape[0], it.args[-1].shape[1])
        bias = it.args[0] if it.name == "addmm" else 0
        yield "leaving out a product, as of a state that is not carried on", lambda: rows + bias
    elif it.name in SAME_SHAPE and first is not None:
        yield f"leaving out {it.name}", lambda: _first(it(), first.clone())
        yield f"{it.name} applied twice", lambda: it.replaced(0, _first(it()))


def _first(made: Any, other: Tensor | None = None) -> Any:
    """Return the first of several results, or all with another in its place."""
    if not isinstance(made, tuple):
        return made if other is None else other
    return made[0] if other is None else (other, *made[1:])


def _exchanged(it: Operation) -> Slips:
    """Yield other operations, and other orders of operands and parts."""
    for name, function in FUNCTIONS.items() if it.name in FUNCTIONS else ():
        if name != it.name and not {name, it.name} <= ACTIVATIONS.keys():
            yield f"{name} in place of {it.name}", partial(function, it.args[0])
    if it.name == "mean" and len(it.args) > 1 and it.args[1]:
        yield "the largest in place of the mean", partial(aten.amax, *it.args[:3])
    if len(it.args) > 1 and isinstance(it.args[1], Tensor) and it.name in (*IN_PLACE_OF, "div"):
        alike = it.args[0].shape == it.args[1].shape
        if it.name in IN_PLACE_OF and (alike or it.name != "mul"):
            other = IN_PLACE_OF[it.name]
            yield f"{other} in place of {it.name}", partial(getattr(aten, other), *it.args, **it.kwargs)
        if it.name in ("sub", "div") and alike:
            opposite = (it.args[1], it.args[0], *it.args[2:])
            yield f"the operands of {it.name} exchanged", partial(it.func, *opposite, **it.kwargs)
    if it.name == "bmm" and it.args[1].shape[-1] == it.args[1].shape[-2] > 1:
        yield "a second factor that is transposed", partial(it.replaced, 1, it.args[1].transpose(-1, -2))
    if it.name in ("split", "split_with_sizes", "unbind", "unsafe_split"):
        with _disable_current_modes():
            shapes = [part.shape for part in it()]
        for i, j in itertools.combinations(range(len(shapes)), 2) if len(shapes) <= PARTS else ():
            if shapes[i] == shapes[j]:
                yield f"parts {i} and {j} exchanged", partial(_with_exchanged, it, i, j)


def _with_exchanged(it: Operation, i: int, j: int) -> Any:
    parts = list(it())
    parts[i], parts[j] = parts[j], parts[i]
    return type(parts)(parts)


def _masked(it: Operation) -> Slips:
    """Yield other masks: another window or corner, a factor in place of what hides, and other blind rows."""
    hidden, hide = _hiding(it)
    if hidden is not None and hidden.ndim > 1:
        scores = it.args[0] if it.args[0].ndim >= hidden.ndim else it.args[1]
        yield "a mask that multiplies scores by 0 and hides none", lambda: scores * (~hidden).to(scores.dtype)
        for axis, by in itertools.product((-1, -2), (1, -1)):
            side, what = "earlier" if by > 0 else "later", "key" if axis == -1 else "query"
            for text, other in (
                (f"a mask that shows one {side} {what} more", hidden & _shifted(hidden, by, axis, True)),
                (f"a mask that hides one {side} {what} more", hidden | _shifted(hidden, by, axis, False)),
                (f"a mask that is moved by one {what}", _shifted(hidden, by, axis, True)),
                (
                    f"a mask that is moved by one {what}, whose edge is seen",
                    _shifted(hidden, by, axis, False),
                ),
            ):
                yield text, partial(hide, other)
    if it.name in ("_softmax", "_safe_softmax") and (rows := blind_rows(*it.args[:2])) is not None:
        for value, what in ((1 / it.args[0].shape[it.args[1]], "uniform"), (0.0, "zero")):
            yield f"rows that see no key being {what}", partial(_filled, it, rows, value)


def _hiding(it: Operation) -> tuple[Tensor | None, Callable[[Tensor], Any]]:
    """Return which scores an operation hides, and what makes it hide others."""
    with _disable_current_modes():
        if it.name == "masked_fill" and not isinstance(it.args[2], Tensor) and it.args[2] < HIDDEN:
            return it.args[1].bool(), partial(it.replaced, 1)
        for place in (1, 0) if it.name == "add" and it.floats(2) else ():
            added = value_of(it.args[place])
            hidden = (added < HIDDEN) | ~torch.isfinite(added)
            if bool(hidden.any()) and bool((hidden | (added == 0)).all()):
                zeros, least = torch.zeros(added.shape, dtype=it.args[place].dtype), float(added.min())
                return hidden, partial(_hidden, it, place, zeros, least)
    return None, bool


def _hidden(it: Operation, place: int, zeros: Tensor, least: float, hidden: Tensor) -> Any:
    return it.replaced(place, zeros.masked_fill(hidden, least))


def _shifted(hidden: Tensor, by: int, axis: int, edge: bool) -> Tensor:
    """Return flags one place on along an axis, and a value in the place that becomes free."""
    made = torch.roll(hidden, by, axis)
    made.narrow(axis, 0 if by > 0 else hidden.shape[axis] - 1, 1).fill_(edge)
    return made


def blind_rows(scores: Tensor, axis: int) -> Tensor | None:
    """Return which rows of a softmax see no key; None if all see one."""
    with _disable_current_modes():
        rows = value_of(scores).amax(axis, keepdim=True) <= BLIND
        return rows if bool(rows.any()) else None


def _counted(it: Operation) -> Slips:
    """Yield n - 1 in place of n, and where an epsilon, or the 1 of a weight, is added."""
    if it.name == "mean":
        with _disable_current_modes():
            count = it.args[0].numel() / max(it().numel(), 1)
        if count > 1:
            yield "a sum that is divided by n - 1 in place of n", lambda: it() * (count / (count - 1))
    if it.name in ("var", "std", "var_mean") and "correction" in it.kwargs:
        free = 0 if it.kwargs["correction"] else 1
        text = f"the variance divided by n{' - 1' * free}"
        yield text, partial(it.func, *it.args, **{**it.kwargs, "correction": free})
    if it.name == "add" and it.floats(1) and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2:
        x, epsilon = it.args[:2]
        yield "an epsilon that is added to the root", lambda: torch.square(x.sqrt() + epsilon)
        yield "an epsilon that is added under the root", lambda: torch.sqrt(x.square() + epsilon)
    for place in (0, 1) if it.name == "mul" and it.floats(2) else ():
        if it.args[place].ndim == 1 < it.args[1 - place].ndim:
            yield "a weight to which 1 is added", partial(it.replaced, place, it.args[place] + 1)
            yield "a weight of which 1 is taken", partial(it.replaced, place, it.args[place] - 1)
    if it.name == "cumsum":
        yield "a running sum without the own place", lambda: it() - it.args[0]


def _convolved(it: Operation) -> Slips:
    """Yield other borders of convolutions, and other kernels."""
    if it.name == "convolution" and not it.args[6]:
        x, kernel, _, _, padding = it.args[:5]
        sizes = padding[::-1]

        def bordered(pads: list[int], mode: str = "constant") -> Any:
            without = (*it.args[:4], [0] * len(padding), *it.args[5:])
            return it.func(F.pad(x, pads, mode), *without[1:], **it.kwargs)

        if any(padding):
            for mode, what in BORDERS.items():
                around = [side for size in sizes for side in (size, size)]
                yield f"an input that is {what}, in place of zeros", partial(bordered, around, mode)
            before, behind = ([n for size in sizes for n in pair(2 * size)] for pair in (_before, _behind))
            yield "padding that stands before the input alone", partial(bordered, before)
            yield "padding that stands behind the input alone", partial(bordered, behind)
        yield "a kernel that is flipped", lambda: it.replaced(1, kernel.flip(list(range(2, kernel.ndim))))
        if kernel.ndim == 4 and kernel.shape[2] == kernel.shape[3]:
            exchanged = partial(it.replaced, 1, kernel.transpose(2, 3))
            yield "a kernel whose height and width are exchanged", exchanged
    if it.name == "avg_pool2d":
        args = (*it.args, *(None, [0, 0], False, True)[len(it.args) - 2 :])
        yield "a mean that counts the border otherwise", partial(it.func, *args[:5], not args[5], *args[6:])
    if it.name.startswith("upsample_") and len(it.args) > 2 and isinstance(it.args[2], bool):
        text = f"corners that are {'not ' * it.args[2]}aligned"
        yield text, partial(it.replaced, 2, not it.args[2])


def _before(size: int) -> tuple[int, int]:
    return size, 0


def _behind(size: int) -> tuple[int, int]:
    return 0, size


def _padded(it: Operation) -> Slips:
    """Yield other borders, and borders on other sides."""
    if it.name == "constant_pad_nd":
        x, pads = it.args[0], list(it.args[1])
        sides = list(zip(pads[::2], pads[1::2], strict=True))
        for by, side in ((1, "later"), (-1, "earlier")):
            moved = [n for a, b in sides for n in ((a + by, b - by) if a + b else (a, b))]
            yield f"padding by which all stands one place {side}", partial(it.replaced, 1, moved)
        yield "padding on the opposite side", partial(it.replaced, 1, [n for a, b in sides for n in (b, a)])
        for mode, what in BORDERS.items():
            yield f"an input that is {what}, in place of zeros", partial(F.pad, x, pads, mode)
    elif it.name.startswith(("reflection_pad", "replication_pad")):
        for mode, what in {**BORDERS, "constant": "continued by zeros"}.items():
            yield f"an input that is {what}", partial(F.pad, it.args[0], list(it.args[1]), mode)


def _moved(it: Operation) -> Slips:
    """Yield places one off: a step of time, a slice, a position, a row of a table."""
    if it.name == "select" and isinstance(it.args[2], int):
        axis, size = it.args[1], it.args[0].shape[it.args[1]]
        place = it.args[2] % size
        words = {1: "a step that is skipped, ", -1: "the step before once more, "}
        for other in dict.fromkeys((place - 1, place + 1, 0, size - 1)):
            if 0 <= other < size <= MOST_PLACES and other != place:
                text = f"{words.get(other - place, '')}place {other} of axis {axis} in place of {place}"
                yield text, partial(it.replaced, 2, other)
    if it.name == "slice" and len(it.args) > 3:
        x, axis, start, end, *step = it.args
        start, end = start or 0, x.shape[axis] if end is None else min(end, x.shape[axis])
        for by in (1, -1):
            if start + by >= 0 and end + by <= x.shape[axis]:
                text = f"a slice of axis {axis} that starts at {start + by} in place of {start}"
                yield text, partial(it.func, x, axis, start + by, end + by, *step)
    for by in (1, -1, 2) if it.name == "arange" else ():
        text = f"positions that start {abs(by)} {'later' if by > 0 else 'earlier'}"
        yield text, partial(_added, it, by)
    for by in (2, -2) if it.name == "embedding" else ():
        rows = (it.args[1] + by).clamp(0, len(it.args[0]) - 1)
        yield f"rows that are looked up {by} off", partial(it.replaced, 1, rows)


def _laid_out(it: Operation) -> Slips:
    """Yield axes that are joined in another order, and places in reverse order."""
    x = it.args[0] if it.floats(1) else None
    if x is None or x.ndim < 3:
        return
    if it.name in ("view", "_unsafe_view", "reshape") and len(it.args[1]) == x.ndim - 1:
        for axis in range(x.ndim - 1):
            if x.shape[axis : axis + 2].numel() == it.args[1][axis] > max(x.shape[axis : axis + 2]):
                text = "axes that are joined in another order, as of heads"
                yield text, partial(_joined, it, axis)
                if axis:
                    yield f"{text} before they change places", partial(_joined, it, axis - 1)
                break
    if it.name == "bmm" and x.ndim == it.args[1].ndim:
        for axis in range(2):
            yield (
                f"axis {axis} of a second factor in reverse order",
                partial(it.replaced, 1, it.args[1].flip(axis)),
            )


def _joined(it: Operation, axis: int) -> Tensor:
    return it.args[0].transpose(axis, axis + 1).reshape(it.args[1])


def _filled(it: Operation, rows: Tensor, value: float) -> Any:
    return it().masked_fill(rows, value)


def _added(it: Operation, by: int) -> Any:
    return it() + by
