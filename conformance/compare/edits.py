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

from concord.conformance.compare.arithmetic import Computed, Operation, affine

aten = torch.ops.aten

WEIGHTED = ("mm", "addmm")
PRODUCTS = (*WEIGHTED, "bmm", "baddbmm")
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


Applies = Callable[[Operation], bool]
Change = Callable[[Operation], Any]
"""Returns what the bug makes of an operation."""


@dataclass(frozen=True)
class ModelBug:
    """A bug that an operation may have.

    Attributes:
        name: of the bug.
        text: what it is, in words that follow "is explained by".
        applies: whether an operation can have it.
        change: what it makes of it.
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

    def applies(self, operation: Operation) -> bool:
        """Return whether this operation has the bug, and count those that can."""
        if self.busy:
            return False
        self.busy = True  # what it asks an operation for is none of the model's
        fits = self.bug.applies(operation)
        self.busy = False
        if not fits:
            return False
        self.sites += 1
        return self.site is None or self.site == self.sites - 1

    def made(self, operation: Operation) -> Any:
        """Return what the operation gives with the bug."""
        self.busy = True
        try:
            return self.bug.change(operation)
        finally:
            self.busy = False


class Sites(Injected):
    """Counts, for each bug, the operations that can have it, and changes none."""

    def __init__(self) -> None:
        super().__init__(BUGS[0])
        self.found: Counter[ModelBug] = Counter()

    def applies(self, operation: Operation) -> bool:
        """Count."""
        if not self.busy:
            self.busy = True
            self.found.update(bug for bug in BUGS if bug.applies(operation))
            self.busy = False
        return False


class Mutant(TorchDispatchMode):
    """Runs whatever is in its block with a bug."""

    def __init__(self, edited: Injected) -> None:
        super().__init__()
        self.edited = edited

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = Operation(func, args, kwargs or {})
        return self.edited.made(operation) if self.edited.applies(operation) else operation.of(*args)


# Which operations, and what of them.


def _is(*names: str) -> Applies:
    return lambda it: it.name in names


def _first(it: Operation) -> Any:
    return it.args[0] + 0.0


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


def _weight_place(it: Operation) -> int:
    return 2 if it.name in ("addmm", "baddbmm") else 1


def _weight(value: Callable[[Tensor], Tensor]) -> Change:
    return lambda it: it.changed(_weight_place(it), value)


def _factors(value: Callable[[Tensor], Tensor]) -> Change:
    def change(it: Operation) -> Any:
        right = _weight_place(it)
        return it.of(
            *it.args[: right - 1], *map(value, it.args[right - 1 : right + 1]), *it.args[right + 1 :]
        )

    return change


def _square(it: Operation) -> bool:
    return it.name in WEIGHTED and (shape := it.args[_weight_place(it)].shape)[0] == shape[1] > 1


def _epsilon_place(it: Operation) -> int | None:
    if it.name in NORMS:
        return NORMS[it.name]
    small = it.name == "add" and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2
    return 1 if small else None


def _another_epsilon(epsilon: float, it: Operation) -> bool:
    place = _epsilon_place(it)
    return place is not None and it.args[place] not in (None, epsilon)


def _with_epsilon(epsilon: float, it: Operation) -> Any:
    return it.changed(_epsilon_place(it) or 0, lambda _: epsilon)


def _unbiased(it: Operation) -> Any:
    x, shape, weight, bias, epsilon = it.args
    count = math.prod(shape)
    # (v n / (n - 1) + e) is the same but for a factor of the whole: v + e (n - 1) / n.
    y, mean, reciprocal = it.of(x, shape, None, None, epsilon * (count - 1) / count)
    return affine(y * math.sqrt((count - 1) / count), weight, bias), mean, reciprocal


def _uncentered(it: Operation) -> Any:
    x, shape, weight, bias, epsilon = it.args
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(torch.mean(x * x, dims, keepdim=True) + epsilon)
    return affine(y, weight, bias), *it.of(*it.args)[1:]


def _normed(it: Operation) -> bool:
    return it.name == "native_layer_norm" and math.prod(it.args[1]) > 1


def _left_out(place: int) -> tuple[Applies, Change]:
    """Return the bug of a norm without one of its parameters."""
    return lambda it: _normed(it) and it.args[place] is not None, lambda it: it.changed(place, lambda _: None)


def _scales(it: Operation) -> bool:
    scaled = it.name in ("mul", "div") and it.floats(1) and isinstance(it.args[1], float)
    return scaled and it.args[1] not in (0.0, 1.0)


def _mask_place(it: Operation) -> int | None:
    """Return which operand of an addition is a mask: it hides, and is 0 elsewhere."""
    for place in (1, 0) if it.name == "add" and it.floats(2) else ():
        hidden = (it.args[place] < HIDDEN) | ~torch.isfinite(it.args[place])
        if bool(hidden.any()) and bool((hidden | (it.args[place] == 0)).all()):
            return place
    return None


def _masks(it: Operation) -> bool:
    filled = it.name in ("masked_fill", "masked_fill_") and not isinstance(it.args[2], Tensor)
    return _mask_place(it) is not None or (filled and it.args[2] < HIDDEN)


def _unmasked(it: Operation) -> Any:
    place = _mask_place(it)
    return it.args[0] if place is None else it.args[1 - place]


def _mask(value: Callable[[Tensor], Tensor]) -> Change:
    return lambda it: it.changed(1 if (place := _mask_place(it)) is None else place, value)


def _adds(it: Operation) -> bool:
    same = it.name in ("add", "add_") and it.floats(2) and it.args[0].shape == it.args[1].shape
    return same and it.args[0].ndim > 1 and _mask_place(it) is None


def _adds_row(it: Operation) -> bool:
    return it.name == "addmm" or (
        it.name == "add" and it.floats(2) and it.args[1].ndim == 1 < it.args[0].ndim
    )


def _without_row(it: Operation) -> Any:
    return it.args[0] if it.name == "add" else torch.mm(it.args[1], it.args[2])


def _splits(it: Operation) -> bool:
    """Return whether an operation takes features apart into heads."""
    if it.name not in ("view", "_unsafe_view", "reshape") or not it.floats(1) or it.args[0].ndim < 2:
        return False
    shape = list(it.args[1])
    apart = len(shape) == it.args[0].ndim + 1 and shape[-1] != 1 and shape[-2] != 1
    return apart and -1 not in shape[-2:] and shape[-1] * shape[-2] == it.args[0].shape[-1]


def _interleaved(it: Operation) -> Any:
    *lead, heads, width = it.args[1]
    return torch.transpose(torch.reshape(it.args[0], (*lead, width, heads)), -1, -2).contiguous()


def _looked_up(by: int) -> Change:
    return lambda it: it.changed(1, lambda ids: torch.clamp(ids + by, 0, it.args[0].shape[0] - 1))


def _joins(it: Operation) -> bool:
    return it.name == "cat" and len(it.args[0]) == 2 and all(x.is_floating_point() for x in it.args[0])


def _alternating(it: Operation) -> Any:
    """Return what a rotation of halves, (-b, a) of (a, b), gives of numbers that stand next to each other."""
    x = torch.cat([it.args[0][1], -it.args[0][0]], -1)
    pairs = torch.reshape(x, (*x.shape[:-1], -1, 2))
    return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)


def _activates(kind: str, it: Operation) -> bool:
    form = it.kwargs.get("approximate", "none")
    own = f"gelu_{form}" if form != "none" else it.name.rstrip("_")
    return own in ACTIVATIONS and own != kind and it.floats(1)


BUGS: tuple[ModelBug, ...] = (
    *(
        ModelBug(
            f"activation_{kind}",
            f"another activation: {kind.replace('_', ' ')}",
            partial(_activates, kind),
            lambda it, kind=kind: ACTIVATIONS[kind](it.args[0]),  # type: ignore[misc]
        )
        for kind in ACTIVATIONS
    ),
    ModelBug(
        "activation_left_out",
        "an activation that is left out",
        lambda it: it.name.rstrip("_") in (*ACTIVATIONS, "sigmoid"),
        lambda it: it.args[0],
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
    ModelBug(
        "mask_shifted",
        "a mask that is one key too far right",
        _masks,
        _mask(lambda mask: torch.roll(mask, 1, -1)),
    ),
    ModelBug(
        "mask_shifted",
        "a mask that is one key too far left",
        _masks,
        _mask(lambda mask: torch.roll(mask, -1, -1)),
    ),
    ModelBug(
        "mask_transposed", "a mask whose queries and keys are exchanged", _masks, _mask(lambda mask: mask.mT)
    ),
    ModelBug("bias_left_out", "a bias that is left out", _adds_row, _without_row),
    ModelBug("weight_transposed", "a square weight that is transposed", _square, _weight(torch.t)),
    ModelBug("scale_left_out", "a scale that is left out", _scales, lambda it: it.args[0]),
    ModelBug(
        "scale_squared",
        "a scale that is squared",
        _scales,
        lambda it: it.changed(1, lambda scale: scale * scale),
    ),
    ModelBug(
        "scale_inverted",
        "the reciprocal of a scale",
        _scales,
        lambda it: it.changed(1, lambda scale: 1 / scale),
    ),
    ModelBug("norm_variance", "the unbiased variance", _normed, _unbiased),
    ModelBug("norm_uncentered", "a norm whose mean is not taken off", _normed, _uncentered),
    ModelBug("norm_without_weight", "a norm without its weight", *_left_out(2)),
    ModelBug("norm_without_bias", "a norm without its bias", *_left_out(3)),
    ModelBug("first_left_out", "a sum without its first term", _adds, lambda it: it.args[1] + 0.0),
    ModelBug("second_left_out", "a sum without its second term", _adds, _first),
    ModelBug(
        "constant_left_out",
        "a constant that is not added",
        lambda it: it.name == "add" and isinstance(it.args[1], float) and it.args[1] == 1.0,
        _first,
    ),
    ModelBug(
        "softmax_axis",
        "a softmax over another axis",
        lambda it: it.name == "_softmax" and it.args[0].ndim > 1,
        lambda it: it.changed(1, lambda axis: -2 if axis in (-1, it.args[0].ndim - 1) else -1),
    ),
    ModelBug("heads_interleaved", "heads that are split the other way round", _splits, _interleaved),
    ModelBug("index_shifted", "rows that are looked up one too far", _is("embedding"), _looked_up(1)),
    ModelBug("index_shifted", "rows that are looked up one too early", _is("embedding"), _looked_up(-1)),
    ModelBug("sign", "a sign that is left out", _is("neg"), _first),
    ModelBug(
        "order",
        "parts that are joined in the opposite order",
        _joins,
        lambda it: it.changed(0, lambda parts: parts[::-1]),
    ),
    ModelBug("rotary_interleaved", "a rotation of neighbours instead of halves", _joins, _alternating),
    *(
        ModelBug(
            f"weight_{name}",
            f"a weight in {name}",
            _is(*WEIGHTED),
            _weight(value),
        )
        for name, value in (
            ("bfloat16", partial(_rounded, torch.bfloat16)),
            ("float16", partial(_rounded, torch.float16)),
            ("int8", _quantized),
            ("tf32", _truncated),
        )
    ),
    *(
        ModelBug(f"product_{name}", f"a product of {name} numbers", _is(*PRODUCTS), _factors(value))
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
            lambda it, dtype=dtype: _rounded(  # type: ignore[misc]
                dtype, it.changed(0, partial(_rounded, dtype))
            ),
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
)
