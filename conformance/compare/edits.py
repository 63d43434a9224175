"""Bugs of any model, each an edit of an operation.

Put into a copy of the reference, an edit is a mutant that a comparison has to find; put into the reference's
own arithmetic, it is an explanation of what a candidate computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from concord.conformance.compare.arithmetic import Computed, affine

aten = torch.ops.aten

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "gelu": aten.gelu,
    "gelu_tanh": lambda x: aten.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(x * 1.702),
}
EPSILONS = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3, 0.0)
NORMS = {"native_layer_norm": 4, "_fused_rms_norm": 3, "native_group_norm": 7}
"""Norms, and which operand of each is epsilon."""

HIDDEN = -1e3
"""What is added to a score to hide its key is below this."""

Given = Sequence[Any]
Applies = Callable[[str, Given, Mapping[str, Any]], bool]
Change = Callable[[Any, Given, dict[str, Any]], Any]
"""Takes the operation and its operands; returns what the bug makes of them."""


@dataclass(frozen=True)
class ModelBug:
    """A bug that an operation may have.

    Attributes:
        name: of the bug.
        text: what it is, in words that follow "is explained by".
        applies: whether an operation, by name and operands, can have it.
        change: what it makes of the operands.
    """

    name: str
    text: str
    applies: Applies
    change: Change


class Injected:
    """A bug in one of the operations that can have it, or in all.

    Args:
        site: the number of the operation; None: all of them.

    Attributes:
        sites: how many operations could have it so far.
    """

    def __init__(self, bug: ModelBug, site: int | None = None) -> None:
        self.bug, self.site, self.sites, self.busy = bug, site, 0, False

    def applies(self, func: Any, args: Given, kwargs: Mapping[str, Any]) -> bool:
        """Return whether this operation has the bug, and count those that can."""
        if self.busy or not self.bug.applies(func.overloadpacket.__name__, args, kwargs):
            return False
        self.sites += 1
        return self.site is None or self.site == self.sites - 1

    def made(self, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
        """Return what the operation gives with the bug."""
        self.busy = True
        try:
            return self.bug.change(func, args, kwargs)
        finally:
            self.busy = False


class Sites:
    """Counts, for each bug, the operations that can have it, and changes none."""

    def __init__(self) -> None:
        self.found: Counter[ModelBug] = Counter()
        self.busy = False

    def applies(self, func: Any, args: Given, kwargs: Mapping[str, Any]) -> bool:
        """Count."""
        name = func.overloadpacket.__name__
        if not self.busy:
            self.busy = True
            self.found.update(bug for bug in BUGS if bug.applies(name, args, kwargs))
            self.busy = False
        return False

    def made(self, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
        """Return what the operation gives."""
        return func(*args, **kwargs)


class Mutant(TorchDispatchMode):
    """Runs whatever is in its block with a bug."""

    def __init__(self, edited: Injected | Sites) -> None:
        super().__init__()
        self.edited = edited

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Given = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if self.edited.applies(func, args, named):
            return self.edited.made(func, args, named)
        return func(*args, **named)


# Which operations, and what of them.


def _is(*names: str) -> Applies:
    return lambda name, args, kwargs: name in names


def _with(place: int, value: Callable[[Any], Any]) -> Change:
    """Return the change of one operand."""
    return lambda func, args, kwargs: func(*args[:place], value(args[place]), *args[place + 1 :], **kwargs)


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _on_values(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of the numbers that a tensor holds, whatever arithmetic it is computed in."""

    def applied(x: Tensor) -> Tensor:
        with _disable_current_modes():
            return Computed(function(x.value), x.dtype) if isinstance(x, Computed) else function(x)

    return applied


def _rounded(dtype: torch.dtype, x: Tensor) -> Tensor:
    return _on_values(lambda values: values.to(dtype).to(values.dtype))(x)


@_on_values
def _truncated(x: Tensor) -> Tensor:
    """Return numbers of 11 bits, as TF32 has."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 2.0**11) / 2.0**11, exponent)


@_on_values
def _quantized(x: Tensor) -> Tensor:
    """Return numbers of 8 bits, with a scale for each column."""
    scale = torch.amax(torch.abs(x), 0, keepdim=True) / 127.0
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale) * scale


def _operands(name: str) -> tuple[int, int]:
    return (1, 2) if name in ("addmm", "baddbmm") else (0, 1)


def _factors(value: Callable[[Tensor], Tensor], both: bool) -> Change:
    def change(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
        left, right = _operands(func.overloadpacket.__name__)
        given = list(args)
        given[right] = value(given[right])
        if both:
            given[left] = value(given[left])
        return func(*given, **kwargs)

    return change


def _square(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    weight = args[_operands(name)[1]] if name in ("mm", "addmm") else None
    return weight is not None and weight.shape[0] == weight.shape[1] > 1


def _epsilon_place(name: str, args: Given) -> int | None:
    if name in NORMS:
        return NORMS[name]
    small = name == "add" and len(args) > 1 and isinstance(args[1], float) and 0 < args[1] <= 1e-2
    return 1 if small else None


def _another_epsilon(epsilon: float, name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    place = _epsilon_place(name, args)
    return place is not None and args[place] is not None and args[place] != epsilon


def _with_epsilon(epsilon: float, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    place = _epsilon_place(func.overloadpacket.__name__, args)
    assert place is not None
    return _with(place, lambda _: epsilon)(func, args, kwargs)


def _unbiased(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    x, shape, weight, bias, epsilon = args
    count = math.prod(shape)
    # (v n / (n - 1) + e) is the same but for a factor of the whole: v + e (n - 1) / n.
    y, mean, reciprocal = func(x, shape, None, None, epsilon * (count - 1) / count)
    return affine(y * math.sqrt((count - 1) / count), weight, bias), mean, reciprocal


def _uncentered(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    x, shape, weight, bias, epsilon = args
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(torch.mean(x * x, dims, keepdim=True) + epsilon)
    _, mean, reciprocal = func(*args)
    return affine(y, weight, bias), mean, reciprocal


def _normed(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    return name == "native_layer_norm" and math.prod(args[1]) > 1


def _scales(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    return (
        name in ("mul", "div")
        and len(args) > 1
        and _floats(args[0])
        and isinstance(args[1], float)
        and args[1] not in (0.0, 1.0)
    )


def _mask_place(name: str, args: Given) -> int | None:
    """Return which operand of an addition is a mask: it hides, and is 0 elsewhere."""
    if name != "add" or len(args) < 2 or not all(map(_floats, args[:2])):
        return None
    for place in (1, 0):
        hidden = (args[place] < HIDDEN) | ~torch.isfinite(args[place])
        if bool(hidden.any()) and bool((hidden | (args[place] == 0)).all()):
            return place
    return None


def _masks(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    return _mask_place(name, args) is not None or (
        name in ("masked_fill", "masked_fill_") and not isinstance(args[2], Tensor) and args[2] < HIDDEN
    )


def _unmasked(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    place = _mask_place(func.overloadpacket.__name__, args)
    return args[0] if place is None else args[1 - place]


def _mask_moved(by: int, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    place = _mask_place(func.overloadpacket.__name__, args)
    return _with(1 if place is None else place, lambda mask: torch.roll(mask, by, -1))(func, args, kwargs)


def _adds(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    same = name in ("add", "add_") and len(args) > 1 and all(map(_floats, args[:2]))
    return same and args[0].shape == args[1].shape and args[0].ndim > 1 and _mask_place("add", args) is None


def _adds_row(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    return name == "addmm" or (
        name == "add" and len(args) > 1 and all(map(_floats, args[:2])) and args[1].ndim == 1 < args[0].ndim
    )


def _without_row(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    return args[0] if func.overloadpacket.__name__ == "add" else torch.mm(args[1], args[2])


def _splits(name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation takes features apart into heads."""
    if name not in ("view", "_unsafe_view", "reshape") or not _floats(args[0]) or args[0].ndim < 2:
        return False
    shape = list(args[1])
    apart = len(shape) == args[0].ndim + 1 and shape[-1] != 1 and shape[-2] != 1
    return apart and -1 not in shape[-2:] and shape[-1] * shape[-2] == args[0].shape[-1]


def _interleaved(func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    *lead, heads, width = args[1]
    return torch.transpose(torch.reshape(args[0], (*lead, width, heads)), -1, -2).contiguous()


def _looked_up(by: int, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    weight, ids, *rest = args
    return func(weight, torch.clamp(ids + by, 0, weight.shape[0] - 1), *rest, **kwargs)


def _activates(kind: str, name: str, args: Given, kwargs: Mapping[str, Any]) -> bool:
    own = f"gelu_{kwargs['approximate']}" if kwargs.get("approximate", "none") != "none" else name.rstrip("_")
    return own in ACTIVATIONS and own != kind and _floats(args[0])


def _activated(kind: str, func: Any, args: Given, kwargs: dict[str, Any]) -> Any:
    return ACTIVATIONS[kind](args[0])


BUGS: tuple[ModelBug, ...] = (
    *(
        ModelBug(
            f"activation_{kind}",
            f"another activation: {kind.replace('_', ' ')}",
            partial(_activates, kind),
            partial(_activated, kind),
        )
        for kind in ACTIVATIONS
    ),
    ModelBug(
        "activation_left_out",
        "an activation that is left out",
        lambda name, args, kwargs: name.rstrip("_") in (*ACTIVATIONS, "sigmoid"),
        lambda func, args, kwargs: args[0],
    ),
    *(
        ModelBug(
            "norm_epsilon",
            f"an epsilon of {epsilon:g}",
            partial(_another_epsilon, epsilon),
            partial(_with_epsilon, epsilon),
        )
        for epsilon in EPSILONS
    ),
    ModelBug("mask_left_out", "a mask that is left out", _masks, _unmasked),
    ModelBug("mask_shifted", "a mask that is one key too far right", _masks, partial(_mask_moved, 1)),
    ModelBug("mask_shifted", "a mask that is one key too far left", _masks, partial(_mask_moved, -1)),
    ModelBug("bias_left_out", "a bias that is left out", _adds_row, _without_row),
    ModelBug("weight_transposed", "a square weight that is transposed", _square, _factors(torch.t, False)),
    ModelBug("scale_left_out", "a scale that is left out", _scales, lambda func, args, kwargs: args[0]),
    ModelBug("scale_squared", "a scale that is squared", _scales, _with(1, lambda scale: scale * scale)),
    ModelBug(
        "scale_root",
        "the root of a scale",
        _scales,
        _with(1, lambda scale: math.copysign(abs(scale) ** 0.5, scale)),
    ),
    ModelBug("scale_inverted", "the reciprocal of a scale", _scales, _with(1, lambda scale: 1 / scale)),
    ModelBug("norm_variance", "the unbiased variance", _normed, _unbiased),
    ModelBug("norm_uncentered", "a norm whose mean is not taken off", _normed, _uncentered),
    ModelBug(
        "norm_without_weight",
        "a norm without its weight",
        lambda name, args, kwargs: name == "native_layer_norm" and args[2] is not None,
        _with(2, lambda _: None),
    ),
    ModelBug(
        "norm_without_bias",
        "a norm without its bias",
        lambda name, args, kwargs: name == "native_layer_norm" and args[3] is not None,
        _with(3, lambda _: None),
    ),
    ModelBug(
        "first_left_out", "a sum without its first term", _adds, lambda func, args, kwargs: args[1] + 0.0
    ),
    ModelBug(
        "second_left_out", "a sum without its second term", _adds, lambda func, args, kwargs: args[0] + 0.0
    ),
    ModelBug(
        "softmax_axis",
        "a softmax over another axis",
        lambda name, args, kwargs: name == "_softmax" and args[0].ndim > 1,
        lambda func, args, kwargs: func(args[0], -2 if args[1] in (-1, args[0].ndim - 1) else -1, *args[2:]),
    ),
    ModelBug("heads_interleaved", "heads that are split the other way round", _splits, _interleaved),
    ModelBug(
        "index_shifted", "rows that are looked up one too far", _is("embedding"), partial(_looked_up, 1)
    ),
    ModelBug(
        "index_shifted", "rows that are looked up one too early", _is("embedding"), partial(_looked_up, -1)
    ),
    ModelBug("sign", "a sign that is left out", _is("neg"), lambda func, args, kwargs: args[0] + 0.0),
    ModelBug(
        "order",
        "parts that are joined in the opposite order",
        lambda name, args, kwargs: name == "cat" and len(args[0]) == 2 and _floats(args[0][0]),
        lambda func, args, kwargs: func([args[0][1], args[0][0]], *args[1:], **kwargs),
    ),
    ModelBug(
        "sin_cos",
        "sine and cosine exchanged",
        _is("sin", "cos"),
        lambda func, args, kwargs: (torch.cos if func.overloadpacket.__name__ == "sin" else torch.sin)(
            args[0]
        ),
    ),
    *(
        ModelBug(
            f"weight_{name}",
            f"a weight in {name}",
            lambda op, args, kwargs: op in ("mm", "addmm"),
            _factors(value, False),
        )
        for name, value in (
            ("bfloat16", partial(_rounded, torch.bfloat16)),
            ("float16", partial(_rounded, torch.float16)),
            ("int8", _quantized),
            ("tf32", _truncated),
        )
    ),
    *(
        ModelBug(f"product_{name}", f"a product of {name} numbers", _is(*PRODUCTS), _factors(value, True))
        for name, value in (
            ("tf32", _truncated),
            ("bfloat16", partial(_rounded, torch.bfloat16)),
            ("float16", partial(_rounded, torch.float16)),
        )
    ),
    *(
        ModelBug(
            f"softmax_{str(dtype).removeprefix('torch.')}",
            f"a softmax in {str(dtype).removeprefix('torch.')}",
            _is("_softmax"),
            lambda func, args, kwargs, dtype=dtype: _rounded(  # type: ignore[misc]
                dtype, func(_rounded(dtype, args[0]), *args[1:], **kwargs)
            ),
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
)
