"""Bugs of any model, each a change of what one operation gives, under the names that the family's have.

Put into a run of the reference, a bug is a mutant that a comparison has to find; put into a stretch, computed
exactly, it is an explanation of what a candidate computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from concord.conformance.compare.aten_arithmetic import Computed, value_of
from concord.spec.arrays import Array
from concord.spec.precision import precision, round_to_bits

aten = torch.ops.aten


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x * 1.702)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": aten.silu,
    "tanh": torch.tanh,
    "gelu": aten.gelu,
    "gelu_tanh": partial(aten.gelu, approximate="tanh"),
    "gelu_quick": _quick_gelu,
}
NORMS = {"native_layer_norm": 4, "_fused_rms_norm": 3, "native_group_norm": 7}
"""Norms, and which operand of each is epsilon."""

EPSILONS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3)

HIDDEN = -1e3
"""What is added to a score to hide its key is below this."""


@dataclass(frozen=True)
class Operation:
    """An ATen operation, its operands, and its number in a run."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    number: int

    def __call__(self) -> Any:
        """Compute it."""
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """What it is called, without its overload and whether it works in place."""
        return str(self.func.overloadpacket.__name__).rstrip("_")

    def replaced(self, place: int, value: Any) -> Any:
        """Compute it with another operand in one place."""
        return self.func(*self.args[:place], value, *self.args[place + 1 :], **self.kwargs)

    def changed(self, place: int, function: Callable[[Any], Any]) -> Any:
        """Compute it with what a function makes of the operand in one place."""
        return self.replaced(place, function(self.args[place]))

    def floats(self, count: int) -> bool:
        """Return whether so many of its first operands are tensors of floating-point numbers."""
        return len(self.args) >= count and all(
            isinstance(x, Tensor) and x.is_floating_point() for x in self.args[:count]
        )


Make = Callable[[Operation], Any]
"""Makes what an operation gives."""


class Watched(TorchDispatchMode):
    """Has a function make what each operation in its block gives; its own operations are not watched."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.numbers = make, count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.make(Operation(func, args, kwargs or {}, next(self.numbers)))


@dataclass(frozen=True)
class OperationBug:
    """A bug that an operation may have.

    Attributes:
        name: of the bug.
        text: what it is, in words that follow "is explained by".
        make: returns what the operation gives then.
    """

    name: str
    text: str
    make: Callable[[], Any] = field(compare=False)


Kinds = Callable[[Operation], Iterator[OperationBug]]
"""Yields bugs that an operation may have."""


def injected(bug: OperationBug, chosen: Collection[int], kinds: Kinds | None = None) -> Make:
    """Return what makes what operations give, with a bug in those with these numbers that can have it.

    Args:
        kinds: yields all bugs that an operation may have; by default those of the catalogue.
    """

    def make(operation: Operation) -> Any:
        own = (kinds or bugs)(operation) if operation.number in chosen else ()
        return next((one.make for one in own if one == bug), operation)()

    return make


def sites(run: Callable[[Make], Any], kinds: Kinds | None = None) -> Mapping[OperationBug, list[int]]:
    """Return the numbers of the operations of a run that may have each bug.

    Args:
        run: takes what makes what each operation gives.
        kinds: as :func:`injected` takes it.
    """
    found = defaultdict[OperationBug, list[int]](list)

    def note(operation: Operation) -> Any:
        for bug in (kinds or bugs)(operation):
            found[bug].append(operation.number)
        return operation()

    run(note)
    return found


Found = Iterator[tuple[str, str, Callable[[], Any]]]
"""Of each bug its name, its text, and what makes it."""


def bugs(it: Operation) -> Iterator[OperationBug]:
    """Yield every bug that an operation may have."""
    for kind in (_left_out, _of_activations, _of_norms, _of_masks, _of_scales, _of_layouts, _of_formats):
        yield from starmap(OperationBug, kind(it))


LEFT_OUT = {
    "activation": "activation",
    "scale": "score_scale_missing",
    "mask": "mask_missing",
    "bias": "missing_bias",
    "first term": "residual_missing",
    "second term": "residual_missing",
}
"""What is left out, and what the catalogue of :mod:`concord.conformance.bugs` calls that."""


def _left_out(it: Operation) -> Found:
    """Yield what may be left out, where that leaves one operand as it is."""
    left: dict[str, int] = {}
    if it.name in (*ACTIVATIONS, "sigmoid"):
        left["activation"] = 0
    elif it.name == "neg":
        left["sign"] = 0
    elif it.name == "add" and isinstance(it.args[1], float) and it.args[1] == 1.0:
        left["constant"] = 0
    elif _is_scale(it):
        left["scale"] = 0
    elif (mask := _mask_place(it)) is not None:
        left["mask"] = 1 - mask
    elif it.name == "add" and it.floats(2):
        first, second = it.args[:2]
        if second.ndim == 1 < first.ndim:
            left["bias"] = 0
        elif first.shape == second.shape and first.ndim > 1:
            left |= {"first term": 1, "second term": 0}
    for what, kept in left.items():
        yield (
            LEFT_OUT.get(what, "step_left_out"),
            f"leaving out the {what}",
            partial(torch.clone, it.args[kept]),
        )
    if it.name == "addmm":
        yield "missing_bias", "leaving out the bias", partial(torch.mm, *it.args[1:3])


def _of_activations(it: Operation) -> Found:
    form = it.kwargs.get("approximate", "none")
    own = it.name if form == "none" else f"gelu_{form}"
    for kind, function in ACTIVATIONS.items() if own in ACTIVATIONS else ():
        if kind != own:
            text = f"another activation: {kind.replace('_', ' ')}"
            yield "activation", text, partial(function, it.args[0])


def _of_norms(it: Operation) -> Found:
    place = NORMS.get(it.name, 0)
    if it.name == "add" and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2:
        place = 1
    for epsilon in EPSILONS if place else ():
        if it.args[place] not in (None, epsilon):
            yield "norm_epsilon", f"an epsilon of {epsilon:g}", partial(it.replaced, place, epsilon)
    if it.name == "native_layer_norm" and math.prod(it.args[1]) > 1:
        yield "norm_variance", "the unbiased variance", partial(_unbiased, *it.args)
        yield "norm_mean_kept", "a norm whose mean is not taken off", partial(_uncentered, *it.args)
        for operand, what, name in ((2, "weight", "norm_gain_missing"), (3, "bias", "norm_offset_missing")):
            if it.args[operand] is not None:
                yield name, f"a norm without its {what}", partial(it.replaced, operand, None)


def _unbiased(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    share = 1 - 1 / math.prod(shape)
    weight = x.new_ones(shape) if weight is None else weight
    # 1 / (v / s + e) is s / (v + e s).
    return aten.native_layer_norm(x, shape, weight * math.sqrt(share), bias, epsilon * share)


def _uncentered(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    y = torch.rms_norm(x, shape, weight, epsilon)
    _, *statistics = aten.native_layer_norm(x, shape, weight, bias, epsilon)
    return y if bias is None else y + bias, *statistics


def _mask_place(it: Operation) -> int | None:
    """Return which operand is a mask: it hides, and what is added is 0 elsewhere."""
    if it.name == "masked_fill" and not isinstance(it.args[2], Tensor) and it.args[2] < HIDDEN:
        return 1
    for place in (1, 0) if it.name == "add" and it.floats(2) else ():
        with _disable_current_modes():
            added = value_of(it.args[place])
            hidden = (added < HIDDEN) | ~torch.isfinite(added)
            if bool(hidden.any()) and bool((hidden | (added == 0)).all()):
                return place
    return None


def _of_masks(it: Operation) -> Found:
    if (place := _mask_place(it)) is None:
        return
    for by, side in ((1, "right"), (-1, "left")):
        shifted = partial(it.changed, place, partial(torch.roll, shifts=by, dims=-1))
        yield "mask_of_other_tokens", f"a mask that is one key too far {side}", shifted
    exchanged = partial(it.changed, place, partial(torch.transpose, dim0=-1, dim1=-2))
    yield "mask_of_other_tokens", "a mask whose queries and keys are exchanged", exchanged


def _is_scale(it: Operation) -> bool:
    number = it.args[1] if it.name in ("mul", "div") and it.floats(1) else None
    return isinstance(number, float) and number not in (0.0, 1.0)


def _of_scales(it: Operation) -> Found:
    if _is_scale(it):
        yield "scale_squared", "a scale that is squared", partial(it.replaced, 1, it.args[1] ** 2)
        yield "scale_inverted", "the reciprocal of a scale", partial(it.replaced, 1, 1 / it.args[1])


def _of_layouts(it: Operation) -> Found:
    """Yield bugs of axes, of indices, and of the order of elements."""
    right = _weight_place(it)
    if it.name in ("mm", "addmm") and (shape := it.args[right].shape)[0] == shape[1] > 1:
        text = "a square weight that is transposed"
        yield "transposed_weight", text, partial(it.changed, right, torch.t)
    if it.name == "_softmax" and it.args[0].ndim > 1:
        axis = -2 if it.args[1] in (-1, it.args[0].ndim - 1) else -1
        yield "softmax_axis", "a softmax over another axis", partial(it.replaced, 1, axis)
    if _splits(it):
        text = "heads that are split the other way round"
        yield "heads_interleaved", text, partial(_interleaved, *it.args)
    for by, side in ((1, "far"), (-1, "early")) if it.name == "embedding" else ():
        rows = (it.args[1] + by).clamp(0, len(it.args[0]) - 1)
        yield "other_rows", f"rows that are looked up one too {side}", partial(it.replaced, 1, rows)
    if it.name == "cat" and len(it.args[0]) == 2 and all(x.is_floating_point() for x in it.args[0]):
        opposite = partial(it.replaced, 0, it.args[0][::-1])
        yield "order", "parts that are joined in the opposite order", opposite
        text = "a rotation of neighbours instead of halves"
        yield "rotary_interleaved", text, partial(_alternating, *it.args[0])


def _splits(it: Operation) -> bool:
    """Return whether an operation takes features apart into heads."""
    shape = list(it.args[1]) if it.name in ("view", "_unsafe_view", "reshape") and it.floats(1) else []
    apart = len(shape) > 2 and len(shape) == it.args[0].ndim + 1
    return apart and min(shape[-2:]) > 1 and shape[-1] * shape[-2] == it.args[0].shape[-1]


def _interleaved(x: Tensor, shape: Sequence[int]) -> Tensor:
    *lead, heads, width = shape
    return x.reshape(*lead, width, heads).transpose(-1, -2).contiguous()


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    """Return what a rotation of halves, (-b, a) of (a, b), gives of numbers that stand next to each other."""
    x = torch.cat([second, -first], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def _of_formats(it: Operation) -> Found:
    """Yield bugs of precision."""
    right = _weight_place(it)
    for form in FORMATS:
        rounded = partial(_rounded, form)
        if it.name in ("mm", "addmm"):
            yield f"weight_in_{form}", f"a weight in {form}", partial(it.changed, right, rounded)
        if it.name in ("mm", "addmm", "bmm", "baddbmm") and form != "int8":
            yield f"{form}_products", f"a product of {form} numbers", partial(_multiplied, it, right, rounded)
        if it.name == "_softmax" and form in ("bfloat16", "float16"):
            yield f"computed_in_{form}", f"a softmax in {form}", partial(_computed_in, rounded, it)


def _weight_place(it: Operation) -> int:
    return 2 if it.name in ("addmm", "baddbmm") else 1


def _multiplied(it: Operation, right: int, function: Callable[[Tensor], Tensor]) -> Any:
    factors = map(function, it.args[right - 1 : right + 1])
    return it.func(*it.args[: right - 1], *factors, **it.kwargs)


def _computed_in(rounded: Callable[[Tensor], Tensor], it: Operation) -> Tensor:
    return rounded(it.changed(0, rounded))


def _rounded(form: str, x: Tensor) -> Tensor:
    """Return a tensor whose numbers have a format, whatever arithmetic it is computed in."""
    with _disable_current_modes():
        made = torch.from_numpy(np.asarray(FORMATS[form](value_of(x).numpy())))
        return Computed(made.double(), x.dtype) if isinstance(x, Computed) else made.to(x.dtype)


def _quantized(x: Array) -> Array:
    """Return numbers of 8 bits, with a scale for each column."""
    scale = abs(x).max(0, keepdims=True) / 127
    return np.round(x / np.where(scale > 0, scale, 1)) * scale


FORMATS: dict[str, Callable[[Array], Array]] = {
    "bfloat16": precision("bfloat16").round,
    "float16": precision("float16").round,
    "int8": _quantized,
    "tf32": partial(round_to_bits, bits=11),
}
