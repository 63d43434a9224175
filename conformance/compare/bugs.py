"""Bugs of any model, each a change of what one operation gives.

Put into a run of the reference, a bug is a mutant that a comparison has to find; put into a stretch, computed
exactly, it is an explanation of what a candidate computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from concord.conformance.compare.arithmetic import Computed

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

UNFIT = (RuntimeError, ValueError, IndexError, TypeError)
"""What an operation raises that a bug does not fit."""


@dataclass(frozen=True)
class Operation:
    """An ATen operation and its operands."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        """Compute it."""
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """What it is called, without its overload and whether it works in place."""
        return str(self.func.overloadpacket.__name__).rstrip("_")

    def changed(self, place: int, value: Callable[[Any], Any]) -> Any:
        """Compute it with another operand in one place."""
        args = (*self.args[:place], value(self.args[place]), *self.args[place + 1 :])
        return self.func(*args, **self.kwargs)

    def replaced(self, place: int, value: Any) -> Any:
        """Compute it with a value in one place."""
        return self.changed(place, lambda _: value)

    def operand(self, place: int) -> Any:
        """Return an operand as the result, in a tensor of its own."""
        return self.args[place] + 0.0

    def floats(self, count: int) -> bool:
        """Return whether so many of its first operands are tensors of floating-point numbers."""
        return len(self.args) >= count and all(
            isinstance(x, Tensor) and x.is_floating_point() for x in self.args[:count]
        )


class Watched(TorchDispatchMode):
    """Has a function make what each operation in its block gives; its own operations are not watched."""

    def __init__(self, make: Callable[[Operation], Any]) -> None:
        super().__init__()
        self.make = make

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.make(Operation(func, args, kwargs or {}))


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


class Injected:
    """Makes what operations give: with a bug in one of those that can have it, or in all of them.

    Args:
        bug: by default none.
        site: the number of the operation; None: all of them.

    Attributes:
        sites: how many operations could have had each bug.
    """

    def __init__(self, bug: OperationBug | None = None, site: int | None = None) -> None:
        self.bug, self.site = bug, site
        self.sites = Counter[OperationBug]()

    def __call__(self, operation: Operation) -> Any:
        """Return what an operation gives."""
        for bug in bugs(operation):
            number = self.sites[bug]
            self.sites[bug] += 1
            if bug == self.bug and self.site in (None, number):
                return bug.make()
        return operation()


def bugs(it: Operation) -> Iterator[OperationBug]:
    """Yield every bug that an operation may have."""
    for kind in (_of_activations, _of_norms, _of_sums, _of_masks, _of_numbers, _of_layouts, _of_formats):
        yield from kind(it)


def _of_activations(it: Operation) -> Iterator[OperationBug]:
    form = it.kwargs.get("approximate", "none")
    own = it.name if form == "none" else f"gelu_{form}"
    if own not in (*ACTIVATIONS, "sigmoid") or not it.floats(1):
        return
    yield OperationBug("activation_left_out", "an activation that is left out", partial(it.operand, 0))
    for kind, function in ACTIVATIONS.items():
        if kind != own and own != "sigmoid":
            text = f"another activation: {kind.replace('_', ' ')}"
            yield OperationBug(f"activation_{kind}", text, partial(function, it.args[0]))


def _of_norms(it: Operation) -> Iterator[OperationBug]:
    place = NORMS.get(it.name, 0)
    if it.name == "add" and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2:
        place = 1
    for epsilon in EPSILONS if place else ():
        if it.args[place] not in (None, epsilon):
            yield OperationBug(
                "norm_epsilon", f"an epsilon of {epsilon:g}", partial(it.replaced, place, epsilon)
            )
    if it.name == "native_layer_norm" and math.prod(it.args[1]) > 1:
        yield OperationBug("norm_variance", "the unbiased variance", partial(_unbiased, *it.args))
        yield OperationBug("norm_uncentered", "a norm whose mean is not taken off", partial(_uncentered, it))
        for operand, what in ((2, "weight"), (3, "bias")):
            if it.args[operand] is not None:
                made = partial(it.replaced, operand, None)
                yield OperationBug(f"norm_without_{what}", f"a norm without its {what}", made)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _unbiased(x: Tensor, shape: Sequence[int], weight: Any, bias: Any, epsilon: float) -> Any:
    count = math.prod(shape)
    # (v n / (n - 1) + e) is the same but for a factor of the whole: v + e (n - 1) / n.
    y, *rest = aten.native_layer_norm(x, shape, None, None, epsilon * (count - 1) / count)
    return _affine(y * math.sqrt((count - 1) / count), weight, bias), *rest


def _uncentered(it: Operation) -> Any:
    x, shape, weight, bias, epsilon = it.args
    square = torch.mean(x * x, tuple(range(-len(shape), 0)), keepdim=True)
    return _affine(x * torch.rsqrt(square + epsilon), weight, bias), *it()[1:]


def _of_sums(it: Operation) -> Iterator[OperationBug]:
    """Yield bugs of sums of two tensors, and of a tensor and a row."""
    if it.name == "addmm":
        yield OperationBug(
            "bias_left_out", "a bias that is left out", partial(torch.mm, it.args[1], it.args[2])
        )
    if it.name != "add" or not it.floats(2):
        return
    first, second = it.args[:2]
    if second.ndim == 1 < first.ndim:
        yield OperationBug("bias_left_out", "a bias that is left out", partial(it.operand, 0))
    if first.shape == second.shape and first.ndim > 1 and _mask_place(it) is None:
        yield OperationBug("first_left_out", "a sum without its first term", partial(it.operand, 1))
        yield OperationBug("second_left_out", "a sum without its second term", partial(it.operand, 0))


def _mask_place(it: Operation) -> int | None:
    """Return which operand of an addition is a mask: it hides, and is 0 elsewhere."""
    for place in (1, 0) if it.name == "add" and it.floats(2) else ():
        hidden = (it.args[place] < HIDDEN) | ~torch.isfinite(it.args[place])
        if bool(hidden.any()) and bool((hidden | (it.args[place] == 0)).all()):
            return place
    return None


def _of_masks(it: Operation) -> Iterator[OperationBug]:
    place = _mask_place(it)
    if place is not None:
        left_out = partial(it.operand, 1 - place)
    elif it.name == "masked_fill" and not isinstance(it.args[2], Tensor) and it.args[2] < HIDDEN:
        place, left_out = 1, partial(it.operand, 0)
    else:
        return
    yield OperationBug("mask_left_out", "a mask that is left out", left_out)
    for by, side in ((1, "right"), (-1, "left")):
        shifted = partial(it.changed, place, partial(torch.roll, shifts=by, dims=-1))
        yield OperationBug("mask_shifted", f"a mask that is one key too far {side}", shifted)
    exchanged = partial(it.changed, place, partial(torch.transpose, dim0=-1, dim1=-2))
    yield OperationBug("mask_transposed", "a mask whose queries and keys are exchanged", exchanged)


def _of_numbers(it: Operation) -> Iterator[OperationBug]:
    """Yield bugs of what is multiplied by or added, and of signs."""
    if it.name == "neg":
        yield OperationBug("sign", "a sign that is left out", partial(it.operand, 0))
    number = it.args[1] if len(it.args) > 1 and it.floats(1) else None
    if not isinstance(number, float):
        return
    if it.name == "add" and number == 1.0:
        yield OperationBug("constant_left_out", "a constant that is not added", partial(it.operand, 0))
    if it.name in ("mul", "div") and number not in (0.0, 1.0):
        yield OperationBug("scale_left_out", "a scale that is left out", partial(it.operand, 0))
        yield OperationBug("scale_squared", "a scale that is squared", partial(it.replaced, 1, number**2))
        yield OperationBug("scale_inverted", "the reciprocal of a scale", partial(it.replaced, 1, 1 / number))


def _of_layouts(it: Operation) -> Iterator[OperationBug]:
    """Yield bugs of axes, of indices, and of the order of elements."""
    right = _weight_place(it)
    if it.name in ("mm", "addmm") and (shape := it.args[right].shape)[0] == shape[1] > 1:
        made = partial(it.changed, right, torch.t)
        yield OperationBug("weight_transposed", "a square weight that is transposed", made)
    if it.name == "_softmax" and it.args[0].ndim > 1:
        axis = -2 if it.args[1] in (-1, it.args[0].ndim - 1) else -1
        yield OperationBug("softmax_axis", "a softmax over another axis", partial(it.replaced, 1, axis))
    if _splits(it):
        text = "heads that are split the other way round"
        yield OperationBug("heads_interleaved", text, partial(_interleaved, *it.args))
    for by, side in ((1, "far"), (-1, "early")) if it.name == "embedding" else ():
        rows = (it.args[1] + by).clamp(0, len(it.args[0]) - 1)
        text = f"rows that are looked up one too {side}"
        yield OperationBug("index_shifted", text, partial(it.replaced, 1, rows))
    if it.name == "cat" and len(it.args[0]) == 2 and all(x.is_floating_point() for x in it.args[0]):
        opposite = partial(it.replaced, 0, it.args[0][::-1])
        yield OperationBug("order", "parts that are joined in the opposite order", opposite)
        text = "a rotation of neighbours instead of halves"
        yield OperationBug("rotary_interleaved", text, partial(_alternating, *it.args[0]))


def _splits(it: Operation) -> bool:
    """Return whether an operation takes features apart into heads."""
    if it.name not in ("view", "_unsafe_view", "reshape") or not it.floats(1) or it.args[0].ndim < 2:
        return False
    shape = list(it.args[1])
    apart = len(shape) == it.args[0].ndim + 1 and shape[-1] != 1 and shape[-2] != 1
    return apart and -1 not in shape[-2:] and shape[-1] * shape[-2] == it.args[0].shape[-1]


def _interleaved(x: Tensor, shape: Sequence[int]) -> Tensor:
    *lead, heads, width = shape
    return torch.transpose(torch.reshape(x, (*lead, width, heads)), -1, -2).contiguous()


def _alternating(first: Tensor, second: Tensor) -> Tensor:
    """Return what a rotation of halves, (-b, a) of (a, b), gives of numbers that stand next to each other."""
    x = torch.cat([second, -first], -1)
    pairs = torch.reshape(x, (*x.shape[:-1], -1, 2))
    return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)


def _of_formats(it: Operation) -> Iterator[OperationBug]:
    """Yield bugs of precision."""
    right = _weight_place(it)
    for form, rounded in FORMATS.items():
        of_values = partial(_on_values, rounded)
        if it.name in ("mm", "addmm"):
            yield OperationBug(f"weight_{form}", f"a weight in {form}", partial(it.changed, right, of_values))
        if it.name in ("mm", "addmm", "bmm", "baddbmm") and form != "int8":
            text = f"a product of {form} numbers"
            yield OperationBug(f"product_{form}", text, partial(_multiplied, it, right, of_values))
        if it.name == "_softmax" and form in ("bfloat16", "float16"):
            text = f"a softmax in {form}"
            yield OperationBug(f"softmax_{form}", text, partial(_computed_in, of_values, it))


def _computed_in(rounded: Callable[[Tensor], Tensor], it: Operation) -> Tensor:
    return rounded(it.changed(0, rounded))


def _weight_place(it: Operation) -> int:
    return 2 if it.name in ("addmm", "baddbmm") else 1


def _multiplied(it: Operation, right: int, function: Callable[[Tensor], Tensor]) -> Any:
    args = list(it.args)
    args[right - 1 : right + 1] = map(function, args[right - 1 : right + 1])
    return it.func(*args, **it.kwargs)


def _on_values(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to the numbers that a tensor holds, whatever arithmetic it is computed in."""
    with _disable_current_modes():
        return Computed(function(x.value), x.dtype) if isinstance(x, Computed) else function(x)


def _rounded(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _truncated(x: Tensor) -> Tensor:
    """Return numbers of 11 bits, as TF32 has."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**11) / 2.0**11, exponent)


def _quantized(x: Tensor) -> Tensor:
    """Return numbers of 8 bits, with a scale for each column."""
    scale = torch.amax(torch.abs(x), 0, keepdim=True) / 127.0
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale) * scale


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": partial(_rounded, torch.bfloat16),
    "float16": partial(_rounded, torch.float16),
    "int8": _quantized,
    "tf32": _truncated,
}
