"""Bugs of any model, each an edit of an operation.

Put into a copy of the reference, an edit is a mutant that a comparison has to find; put into the reference's
own arithmetic, it is an explanation of what a candidate computed.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from concord.conformance.compare.arithmetic import Computed, Operation, affine

aten = torch.ops.aten

WEIGHTED = ("mm", "addmm")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": lambda x: x * torch.sigmoid(x),
    "tanh": torch.tanh,
    "gelu": aten.gelu,
    "gelu_tanh": lambda x: aten.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(x * 1.702),
}
NORMS = {"native_layer_norm": 4, "_fused_rms_norm": 3, "native_group_norm": 7}
"""Norms, and which operand of each is epsilon."""

HIDDEN = -1e3
"""What is added to a score to hide its key is below this."""

UNFIT = (RuntimeError, ValueError, IndexError, TypeError)
"""What an operation raises that a bug does not fit."""


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
    applies: Callable[[Operation], bool]
    change: Callable[[Operation], Any]


class Edit:
    """What is done to operations of a model; what it asks for itself is none of the model's.

    Attributes:
        busy: whether operations are left alone.
    """

    busy = False

    def change(self, operation: Operation) -> Any:
        """Return what an operation gives with this edit; NotImplemented where it has none."""
        return NotImplemented

    def made(self, operation: Operation) -> Any:
        """Return what an operation of the model gives; NotImplemented where it is left alone."""
        if self.busy:
            return NotImplemented
        self.busy = True
        try:
            return self.change(operation)
        finally:
            self.busy = False


class Injected(Edit):
    """A bug in one of the operations that can have it, or in all.

    Args:
        site: the number of the operation; None: all of them.
    """

    def __init__(self, bug: ModelBug, site: int | None = None) -> None:
        self.bug, self.site, self.count = bug, site, 0

    def change(self, operation: Operation) -> Any:
        """Return what the operation gives with the bug, and count those that can have it."""
        if not self.bug.applies(operation):
            return NotImplemented
        self.count += 1
        return self.bug.change(operation) if self.site in (None, self.count - 1) else NotImplemented


class Sites(Edit):
    """Counts, for each bug, the operations that can have it, and changes none."""

    def __init__(self) -> None:
        self.found: Counter[ModelBug] = Counter()

    def change(self, operation: Operation) -> Any:
        """Count."""
        self.found.update(bug for bug in BUGS if bug.applies(operation))
        return NotImplemented


class Mutant(TorchDispatchMode):
    """Runs whatever is in its block with a bug."""

    def __init__(self, edited: Edit) -> None:
        super().__init__()
        self.edited = edited

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation = Operation(func, args, kwargs or {})
        made = self.edited.made(operation)
        return operation.of(*args) if made is NotImplemented else made


# Which operations can have a bug, by the names in ``bugs.toml``.


def named(names: Sequence[str], it: Operation) -> bool:
    return it.name in names


def square(it: Operation) -> bool:
    return it.name in WEIGHTED and (shape := it.args[weight_place(it)].shape)[0] == shape[1] > 1


def _epsilon_place(it: Operation) -> int | None:
    if it.name in NORMS:
        return NORMS[it.name]
    small = it.name == "add" and isinstance(it.args[1], float) and 0 < it.args[1] <= 1e-2
    return 1 if small else None


def another_epsilon(epsilon: float, it: Operation) -> bool:
    place = _epsilon_place(it)
    return place is not None and it.args[place] not in (None, epsilon)


def normed(it: Operation) -> bool:
    return it.name == "native_layer_norm" and math.prod(it.args[1]) > 1


def norm_has(place: int, it: Operation) -> bool:
    return normed(it) and it.args[place] is not None


def scales(it: Operation) -> bool:
    scaled = it.name in ("mul", "div") and it.floats(1) and isinstance(it.args[1], float)
    return scaled and it.args[1] not in (0.0, 1.0)


def _mask_place(it: Operation) -> int | None:
    """Return which operand of an addition is a mask: it hides, and is 0 elsewhere."""
    for place in (1, 0) if it.name == "add" and it.floats(2) else ():
        hidden = (it.args[place] < HIDDEN) | ~torch.isfinite(it.args[place])
        if bool(hidden.any()) and bool((hidden | (it.args[place] == 0)).all()):
            return place
    return None


def masks(it: Operation) -> bool:
    filled = it.name in ("masked_fill", "masked_fill_") and not isinstance(it.args[2], Tensor)
    return _mask_place(it) is not None or (filled and it.args[2] < HIDDEN)


def adds(it: Operation) -> bool:
    same = it.name in ("add", "add_") and it.floats(2) and it.args[0].shape == it.args[1].shape
    return same and it.args[0].ndim > 1 and _mask_place(it) is None


def adds_row(it: Operation) -> bool:
    return it.name == "addmm" or (
        it.name == "add" and it.floats(2) and it.args[1].ndim == 1 < it.args[0].ndim
    )


def adds_one(it: Operation) -> bool:
    return it.name == "add" and isinstance(it.args[1], float) and it.args[1] == 1.0


def splits(it: Operation) -> bool:
    """Return whether an operation takes features apart into heads."""
    if it.name not in ("view", "_unsafe_view", "reshape") or not it.floats(1) or it.args[0].ndim < 2:
        return False
    shape = list(it.args[1])
    apart = len(shape) == it.args[0].ndim + 1 and shape[-1] != 1 and shape[-2] != 1
    return apart and -1 not in shape[-2:] and shape[-1] * shape[-2] == it.args[0].shape[-1]


def joins(it: Operation) -> bool:
    return it.name == "cat" and len(it.args[0]) == 2 and all(x.is_floating_point() for x in it.args[0])


def activates(kind: str, it: Operation) -> bool:
    form = it.kwargs.get("approximate", "none")
    own = f"gelu_{form}" if form != "none" else it.name.rstrip("_")
    return own in ACTIVATIONS and own != kind and it.floats(1)


def normalizes_rows(it: Operation) -> bool:
    return it.name == "_softmax" and it.args[0].ndim > 1


# What becomes of them.


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


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": partial(_rounded, torch.bfloat16),
    "float16": partial(_rounded, torch.float16),
    "int8": _quantized,
    "tf32": _truncated,
}


def first(it: Operation) -> Any:
    return it.args[0] + 0.0


def second(it: Operation) -> Any:
    return it.args[1] + 0.0


def activation(kind: str, it: Operation) -> Any:
    return ACTIVATIONS[kind](it.args[0])


def weight_place(it: Operation) -> int:
    return 2 if it.name in ("addmm", "baddbmm") else 1


def weight_in(form: str, it: Operation) -> Any:
    return it.changed(weight_place(it), FORMATS[form])


def weight_transposed(it: Operation) -> Any:
    return it.changed(weight_place(it), torch.t)


def factors_in(form: str, it: Operation) -> Any:
    right = weight_place(it)
    factors = map(FORMATS[form], it.args[right - 1 : right + 1])
    return it.of(*it.args[: right - 1], *factors, *it.args[right + 1 :])


def softmax_in(form: str, it: Operation) -> Any:
    return FORMATS[form](it.changed(0, FORMATS[form]))


def softmax_over_other_axis(it: Operation) -> Any:
    return it.changed(1, lambda axis: -2 if axis in (-1, it.args[0].ndim - 1) else -1)


def with_epsilon(epsilon: float, it: Operation) -> Any:
    return it.changed(_epsilon_place(it) or 0, lambda _: epsilon)


def unbiased(it: Operation) -> Any:
    x, shape, weight, bias, epsilon = it.args
    count = math.prod(shape)
    # (v n / (n - 1) + e) is the same but for a factor of the whole: v + e (n - 1) / n.
    y, mean, reciprocal = it.of(x, shape, None, None, epsilon * (count - 1) / count)
    return affine(y * math.sqrt((count - 1) / count), weight, bias), mean, reciprocal


def uncentered(it: Operation) -> Any:
    x, shape, weight, bias, epsilon = it.args
    dims = tuple(range(-len(shape), 0))
    y = x * torch.rsqrt(torch.mean(x * x, dims, keepdim=True) + epsilon)
    return affine(y, weight, bias), *it.of(*it.args)[1:]


def without(place: int, it: Operation) -> Any:
    return it.changed(place, lambda _: None)


def scale_to_the(power: int, it: Operation) -> Any:
    return it.changed(1, lambda scale: scale**power)


def unmasked(it: Operation) -> Any:
    place = _mask_place(it)
    return it.args[0] if place is None else it.args[1 - place]


def _masked(it: Operation, value: Callable[[Tensor], Tensor]) -> Any:
    return it.changed(1 if (place := _mask_place(it)) is None else place, value)


def mask_shifted(by: int, it: Operation) -> Any:
    return _masked(it, lambda mask: torch.roll(mask, by, -1))


def mask_transposed(it: Operation) -> Any:
    return _masked(it, lambda mask: mask.mT)


def without_row(it: Operation) -> Any:
    return it.args[0] if it.name == "add" else torch.mm(it.args[1], it.args[2])


def interleaved(it: Operation) -> Any:
    *lead, heads, width = it.args[1]
    return torch.transpose(torch.reshape(it.args[0], (*lead, width, heads)), -1, -2).contiguous()


def looked_up(by: int, it: Operation) -> Any:
    return it.changed(1, lambda ids: torch.clamp(ids + by, 0, it.args[0].shape[0] - 1))


def joined_reversed(it: Operation) -> Any:
    return it.changed(0, lambda parts: parts[::-1])


def alternating(it: Operation) -> Any:
    """Return what a rotation of halves, (-b, a) of (a, b), gives of numbers that stand next to each other."""
    x = torch.cat([it.args[0][1], -it.args[0][0]], -1)
    pairs = torch.reshape(x, (*x.shape[:-1], -1, 2))
    return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).reshape(x.shape)


def _read(
    name: str, text: str, where: str, change: str, of: Sequence[Any] = (), to: Sequence[Any] = ()
) -> ModelBug:
    """Return a bug of ``bugs.toml``: its functions by their names, each with what it takes besides."""
    return ModelBug(name, text, partial(globals()[where], *of), partial(globals()[change], *to))


BUGS = tuple(_read(**bug) for bug in tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())["bug"])
