"""What is right: what it is called with, and what it computes in any arithmetic."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from concord.conformance.compare.activations import OUTPUT, Activations, numbers, observe
from concord.conformance.compare.arithmetic import (
    ROUNDOFF,
    Computed,
    ExactMode,
    Perturbed,
    Rounded,
    computed,
    plainly,
)
from concord.conformance.estimate import Observer
from concord.conformance.expectation import is_gradient
from concord.spec.arrays import Array
from concord.spec.deviations import BLIND_ROWS_ZERO
from concord.spec.errors import SpecError
from concord.spec.text import first_line

Pins = Callable[[str], "Array | None"]
"""Returns what is used in place of a tensor, by name, if anything is."""

SEED = 0xC0
"""Of cotangents."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What is right: what it is called with, and what it is asked for.

    Attributes:
        args, kwargs: its inputs, as tensors.
        gradients: whether gradients are wanted.
        declared: what candidates need not compute: :data:`concord.conformance.compare.DECLARATIONS`.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = False
    declared: Collection[str] = ()

    @functools.cached_property
    def plain(self) -> Activations:
        """What one correct run computes, in the dtypes that a candidate has."""
        raise NotImplementedError

    @property
    def blind_rows_zero(self) -> bool:
        """Whether a row of a softmax that sees no key is zero."""
        return BLIND_ROWS_ZERO in self.declared

    def exact(self) -> Any:
        """Return the arithmetic of the truth."""
        raise NotImplementedError

    def runs(self, seeds: range) -> list[Any]:
        """Return arithmetics that make sigma: samples by their seeds, and low-precision runs."""
        raise NotImplementedError

    def compute(self, arithmetic: Any, observer: Observer, pin: Pins) -> Collection[str]:
        """Compute every tensor in an arithmetic; return the operations without a rule that were met.

        Args:
            pin: returns what is used in place of a tensor, by name, if anything is.
        """
        raise NotImplementedError

    def cast(self, dtype: torch.dtype) -> Any:
        """Return the same in the dtype of a candidate."""
        raise NotImplementedError

    def given(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what a function makes of each input, those by place and those by name."""
        args, kwargs = tree_map(function, (self.args, dict(self.kwargs)))
        return args, kwargs

    def given_in(self, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs, floating-point numbers in a dtype."""
        return self.given(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The inputs as arrays, positional ones by number."""
        given = {**{str(place): entry for place, entry in enumerate(self.args)}, **self.kwargs}
        return {name: numbers(entry) for name, entry in given.items() if isinstance(entry, Tensor)}

    @functools.cached_property
    def cotangents(self) -> dict[str, Tensor] | None:
        """What outputs are multiplied with in the scalar that is differentiated; None: none is."""
        if not self.gradients:
            return None
        outputs = replace(self, gradients=False).plain.values
        generator = torch.Generator().manual_seed(SEED)
        return {
            name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
            for name, tensor in outputs.items()
            if name.startswith(OUTPUT)
        }

    @property
    def real(self) -> Tensor:
        """Which tokens are no padding, (B, T).

        Raises:
            SpecError: if no input says so.
        """
        mask = self.kwargs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise SpecError(
                "an input 'attention_mask' (B, T) is missing but required: it says where padding is"
            )
        return mask != 0


@dataclass(frozen=True)
class ModuleReference(Reference):
    """A PyTorch module.

    Attributes:
        model: in evaluation mode.
    """

    model: nn.Module

    def __post_init__(self) -> None:
        active = [
            name or "the module"
            for name, module in self.model.named_modules()
            if module.training and (not name or getattr(module, "p", 0) or getattr(module, "dropout", 0))
        ]
        if active:
            raise SpecError(
                f"{active[0]} is in training mode but must be in evaluation mode: call eval() first"
            )
        if dtype_of(self.model) == torch.float64:
            raise SpecError(
                "the reference is in float64 but must be in float32 or a half precision, as candidates are"
            )

    def cast(self, dtype: torch.dtype) -> ModuleReference:
        """Return the same in another dtype; float64 is none that a reference has."""
        if dtype in (dtype_of(self.model), torch.float64):
            return self
        args, kwargs = self.given_in(dtype)
        return replace(self, model=copy.deepcopy(self.model).to(dtype), args=args, kwargs=kwargs)

    @functools.cached_property
    def plain(self) -> Activations:
        """What the module computes as it is."""
        with running("the reference"):
            return observe(self.model, self.args, self.kwargs, cotangents=self.cotangents)

    @functools.cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters and buffers with float64 values, those that are shared once."""
        seen: dict[int, Tensor] = {}
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        found = {}
        for name, tensor in named:
            if id(tensor) not in seen:
                made = computed(tensor)
                wanted = self.gradients and tensor.requires_grad
                seen[id(tensor)] = made.requires_grad_(True) if wanted else made
            found[name] = seen[id(tensor)]
        return found

    def exact(self) -> ExactMode:
        """Return the arithmetic of the truth."""
        return ExactMode(self.blind_rows_zero)

    def runs(self, seeds: range) -> list[ExactMode]:
        """Return samples; with the first, a low-precision run."""
        samples = [Perturbed(seed, self.blind_rows_zero) for seed in seeds]
        return [*samples, *([] if seeds.start else [Rounded(self.blind_rows_zero)])]

    def compute(self, arithmetic: ExactMode, observer: Observer, pin: Pins) -> Collection[str]:
        """Compute every activation, and gradients if they are wanted."""
        # Made here: what is made within an arithmetic is computed in it.
        (args, kwargs), parameters, plain = self.given(computed), self.parameters, self.plain.tensors

        def take(name: str, tensor: Tensor) -> None:
            if name in plain:
                array = numbers(tensor)
                observer(name, array[None] if arithmetic.samples else array.copy())

        def pinned(name: str) -> Tensor | None:
            array = pin(name)
            if array is None:
                return None
            made = with_value(array, plain[name].dtype)
            if made.dtype in (torch.bfloat16, torch.float16) and not is_gradient(name):
                # It may have been used before it was rounded.
                with _disable_current_modes():
                    made.value = arithmetic.varied(
                        made.value, lambda value: ROUNDOFF[made.dtype] * value.abs()
                    )
            return made

        with plainly(), arithmetic:
            observe(self.model, args, kwargs, parameters, self.cotangents, take, pinned)
        return arithmetic.foreign


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Refuse in one line what cannot be run.

    Raises:
        SpecError: for whatever a model raises.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise SpecError(f"{what} cannot be run with these inputs: {said}") from error


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype that a module computes in: that of its first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def with_value(array: Array, dtype: torch.dtype) -> Computed:
    """Return a tensor of a dtype that has the numbers of an array."""
    with _disable_current_modes():
        return Computed(torch.from_numpy(array.astype(np.float64)), dtype)
