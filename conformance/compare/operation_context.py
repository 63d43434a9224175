"""Application of the catalogue's edits to single ATen operations.

Edits that need a model or batch are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from concord.conformance.bugs.activations import FUNCTIONS, USUAL
from concord.conformance.bugs.catalogue import EXPLANATIONS
from concord.conformance.bugs.context import Array, Context, Edit
from concord.conformance.compare.aten_arithmetic import Computed, value_of
from concord.conformance.compare.aten_operations import Operation, OperationBug, first, is_float
from concord.conformance.mutants.plugins.torch import TorchOperations
from concord.spec.arrays import Ids
from concord.spec.precision import precision

SOFTMAXES = ("_softmax", "_safe_softmax")

# The name of each activation operation in FUNCTIONS.
ACTIVATIONS = {
    "relu": "ReLU",
    "gelu": "erf GELU",
    "silu": "SiLU",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "elu": "ELU",
    "mish": "Mish",
    "softplus": "softplus",
    "hardswish": "hardswish",
    "hardtanh": "ReLU6",
    "hardsigmoid": "hard sigmoid (x / 6 + 0.5)",
    "leaky_relu": "leaky ReLU",
}

# A value below this, added to a score, hides its key.
HIDDEN = -1e3


class OperationContext(TorchOperations, Context):
    """One operation: input, result, and mask or norm parameters."""

    x: Array = None
    unnormalised: Array = None
    visible: Any = None
    ids: Any = None
    mask_constant = 0.0
    owner = "norm"

    def __init__(self, x: Tensor, y: Tensor, **options: Any) -> None:
        self.x, self.unnormalised, self.y = x, x, y
        self.config = SimpleNamespace(**options)  # type: ignore[assignment]  # only the options of this step

    def beside(self, name: str) -> Array:
        """Scores of a mask."""
        return {"scores": self.x}[name]

    def rows_of(self, table: str, ids: Ids) -> Array:  # noqa: ARG002 – there is only one table
        """Look up input rows."""
        return self.x[torch.from_numpy(ids.clip(0, len(self.x) - 1))]

    def rounded(self, x: Array, number_format: str) -> Array:
        """Round to a shorter format."""
        return rounded(x, precision(number_format).round)


def rounded(x: Tensor, rounding: Callable[[Any], Any]) -> Tensor:
    """Round a tensor in any arithmetic."""
    with _disable_current_modes():
        value = torch.from_numpy(np.asarray(rounding(value_of(x).numpy())))
        return Computed(value.double(), x.dtype) if isinstance(x, Computed) else value.to(x.dtype)


@dataclass(frozen=True)
class Mask:
    """The mask of an operation: ``constant`` replaces scores or is added to them."""

    operation: Operation
    operand: str
    scores: Tensor
    hidden: Tensor
    constant: float

    @property
    def fill(self) -> str:
        """The family's ``mask_fill`` option."""
        return "replace" if self.operand == "mask" else "add"

    def hide(self, hidden: Tensor, constant: float | None = None) -> Any:
        """Compute with a different mask or constant."""
        constant = self.constant if constant is None else constant
        if self.operand == "mask":
            return self.operation.having(mask=hidden, value=constant)
        zeros = torch.zeros(hidden.shape, dtype=self.scores.dtype)
        return self.operation.having(**{self.operand: zeros.masked_fill(hidden, constant)})


def mask_of(it: Operation) -> Mask | None:
    """An operation's mask, if any."""
    operands = it.operands
    with _disable_current_modes():
        if (
            it.name == "masked_fill"
            and not isinstance(operands["value"], Tensor)
            and operands["value"] < HIDDEN
        ):
            return Mask(it, "mask", operands["self"], operands["mask"].bool(), operands["value"])
        for mask, scores in (("other", "self"), ("self", "other")) if it.name == "add" else ():
            if is_float(operands[mask]) and is_float(operands[scores]):
                added = value_of(operands[mask])
                hidden = (added < HIDDEN) | ~torch.isfinite(added)
                if bool(hidden.any()) and bool((hidden | (added == 0)).all()):
                    return Mask(it, mask, operands[scores], hidden, float(added.min()))
    return None


# Contexts of operations.


def _as_weights(it: Operation) -> OperationContext:
    x, axis = it.operands["self"], it.operands["dim"]
    if axis % x.ndim != x.ndim - 1:
        raise ValueError("the family's softmax is taken along the last axis")
    return OperationContext(x, it.result)


def _as_norm(it: Operation) -> OperationContext:
    operands, x = it.operands, it.operands["input"]
    if it.name == "native_group_norm":
        rows, repeats = x.reshape(x.shape[0], operands["group"], -1), operands["HxW"]
        shape = rows.shape[1:]
    else:
        rows, repeats = x.flatten(x.ndim - len(operands["normalized_shape"])), 1
        shape = rows.shape[-1:]
    context = OperationContext(
        rows,
        it.result[0].reshape(rows.shape),
        d_model=rows.shape[-1],
        norm_epsilon=operands["eps"],
        norm_epsilon_placement="inside",
        norm_variance="biased",
    )
    context.now = {
        f"norm.{name}": fill(shape)
        if (parameter := operands[name]) is None
        else parameter.reshape(-1, 1).expand(-1, repeats).reshape(shape)
        for name, fill in (("weight", rows.new_ones), ("bias", rows.new_zeros))
    }
    return context


def _as_lookup(it: Operation) -> OperationContext:
    table = it.operands["weight"]
    context = OperationContext(table, it.result, vocab_size=len(table))
    context.ids = it.operands["indices"].numpy()
    return context


def _as_function(it: Operation) -> OperationContext:
    return OperationContext(it.operands["self"], it.result)


def _as_mask(it: Operation) -> OperationContext:
    mask = mask_of(it)
    assert mask is not None
    context = OperationContext(mask.scores, it.result, mask_fill=mask.fill)
    context.visible, context.mask_constant = (~mask.hidden).numpy(), mask.constant
    return context


Show = Callable[[Operation], OperationContext]


def shown(it: Operation) -> tuple[str, Show] | None:
    """An operation's tap in the family, and its context."""
    if it.name in SOFTMAXES:
        return "layers.0.attention.weights", _as_weights
    if it.name in ("native_layer_norm", "native_group_norm"):
        return "embeddings.norm", _as_norm
    if it.name in ACTIVATIONS:
        return "layers.0.feed_forward.activation", _as_function
    if it.name == "embedding":
        return "embeddings.token", _as_lookup
    if it.name == "bmm":
        return "layers.0.attention.scores", _as_function
    return ("layers.0.attention.masked_scores", _as_mask) if mask_of(it) else None


def edited(it: Operation, show: Show, edit: Edit) -> Any:
    """Compute an operation with an edit."""
    return it.giving(edit(show(it)).reshape(first(it.result).shape))


def _unbiased(m: Context) -> Array:
    width = tuple(m.x.shape)[-1]
    return m.norm(m.x, variance=lambda variance: variance * (width / (width - 1)))


# Alternatives to a norm: options of the family, and other axes.
OF_NORMS: tuple[tuple[str, str, Edit], ...] = (
    ("norm_variance", "the unbiased variance", _unbiased),
    (
        "norm_epsilon_placement",
        "an epsilon added outside the square root",
        lambda m: m.norm(m.x, deviation=lambda v: m.sqrt(v) + m.config.norm_epsilon),
    ),
    ("norm_axis", "a norm over tokens", lambda m: m.norm(m.x, axes=(-2,))),
    (
        "norm_axis",
        "a norm over tokens and features",
        lambda m: m.norm(m.x, axes=(*range(m.x.ndim > 2, m.x.ndim),)),
    ),
)


def of_catalogue(it: Operation) -> Iterator[OperationBug]:
    """Yield the catalogue's bugs, and other activations."""
    if (place := shown(it)) is None:
        return
    tap, show = place
    for bug in EXPLANATIONS:
        if not bug.of_gradients and (edit := bug.change.at(tap)):
            yield OperationBug(bug.name, bug.explanation, partial(edited, it, show, edit), bug.clause)
    if tap == "embeddings.norm":
        for name, text, edit in OF_NORMS:
            yield OperationBug(name, text, partial(edited, it, show, edit))
    own = ACTIVATIONS.get(it.name, "")
    if it.operands.get("approximate") == "tanh":
        own = "tanh GELU"
    elif it.name == "hardtanh" and it.args[1:] != (0, 6):
        own = it.name
    functions = [*FUNCTIONS] if own else ["sigmoid"] if it.name in SOFTMAXES else []
    for name in functions:
        if name != own:
            text = f"{'no activation' if name == 'none' else name} instead of {own or 'softmax'}"
            computation = partial(edited, it, show, partial(_applied, FUNCTIONS[name]))
            yield OperationBug("activation" if name in USUAL else "other_function", text, computation)


def _applied(function: Any, m: Context) -> Any:
    return function(m, m.x)
