"""PyTorch models in exact or Monte Carlo arithmetic, or rounded after each operation.

A dispatch mode intercepts every ATen operation. Errors depend on operation (SPEC ALG-1 to ALG-5) and dtype.
"""

from __future__ import annotations

import contextlib
import math
import tomllib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, decomposition_table, get_decompositions
from torch._ops import HigherOrderOperator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    return_and_correct_aliasing,
)

from concord.conformance.compare.aten_operations import Unary, is_mutable, within
from concord.conformance.compare.decisions import Branch, Decisions, Followed, Operands, leaves, mapped
from concord.conformance.compare.kernels import (
    CUDNN_RECURRENT,
    CUDNN_WINOGRAD_9X9,
    FACTORS,
    FAST_CONVOLUTION,
    KERNELS,
    TF32,
)
from concord.conformance.compare.solutions import REFLECTING, SOLVING, size_of
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import first_line

aten = torch.ops.aten

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)

# Unit roundoff of each dtype.
ROUNDOFF = {dtype: torch.finfo(dtype).eps / 2 for dtype in FLOATS}

# Half precisions accumulate in float32, except in kernels that add in place.
SUMMED = 2.0**-24

# Sums that round each addition to their own dtype. Gradients of embeddings and of indexed tables accumulate
# this way: without this rule T5 and BEiT were flagged (decision 32).
IN_PLACE = ("embedding_dense_backward", "index_put", "_unsafe_index_put")

# Values below the smallest normal one may be flushed to zero, as in XLA.
LEAST = {dtype: torch.finfo(dtype).smallest_normal for dtype in ROUNDOFF}

# A term that rounding absorbs into one of at least this size is lost, like a score added to a mask constant.
# Such a sum is rounded instead of perturbed: otherwise a fully masked row's sigma is a million times too
# large.
ABSORBS = 1e3

RULES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("operations.toml").read_text())

# Random draws return the model's own values in every arithmetic.
DRAWN = frozenset(RULES["drawn"])

# Operations that only select, move or compare, and therefore never round.
EXACT = frozenset(RULES["exact"])

# Error of elementwise operations in unit roundoffs.
UNITS: dict[str, float] = RULES["units"]

# Functions with an absolute error of 4 unit roundoffs. In a tail, 1 + erf(x) consists only of that error;
# without this rule, correct runs were flagged.
SATURATING = ("erf", "tanh", "sin", "cos")

# Functions with roots, near which the terms of every algorithm cancel: errors relative to 1, too.
ROOTED = ("lgamma", "digamma")

# One more unit roundoff if the other operand is a Python number that the dtype cannot represent.
CONSTANT = ("mul", "div")

# Relative rounding error of the factors of products in TF32.
SHORTENED = precision("tf32").factors

# Conversions round only to a narrower dtype.
CONVERTING = ("_to_copy", "copy")

# Sums that are exact for whole numbers, such as masks, since counts may become indices.
COUNTING = ("sum", "cumsum")

# Mask constants are below this value. A row sees no key if even its largest score is below it.
BLIND = -5e3

# Error of a fused kernel's backward pass in unit roundoffs of a score, because it recomputes scores.
RECOMPUTED = 2

# Terms of a sum with a smaller relative difference are rounded alike.
EQUAL = 1e-5

# A sum of at least LONG terms may be accumulated in order, which is tracked in BLOCKS blocks.
LONG, BLOCKS = 128, 16

# An operation with at most this error is exact if the dtype can represent its result.
ROUNDED_ONCE = 1

# Operations that round a Python number to their dtype, like comparisons and selections.
FILLING = ("full", "full_like", "new_full", "scalar_tensor", "fill", "masked_fill")

# Error in unit roundoffs of operations without a rule, which are never silently exact, and which the report
# names.
FOREIGN = 8


# An object that computes operations, and records or replays their decisions.
Runner = Decisions | Followed | Branch


class Uncomputable(SpecError, RuntimeError):
    """An operation that cannot be computed; a module's own code may catch this like PyTorch's errors."""


UNFOLLOWED = "where its arithmetic cannot be followed: use PyTorch, or pass the result as an input"


class Computed(Tensor):
    """A tensor of any dtype with a float64 value."""

    value: Tensor
    __slots__ = ["value"]

    @staticmethod
    def __new__(cls, value: Tensor, dtype: torch.dtype) -> Computed:
        """Wrap a float64 value."""
        tensor: Computed = cls.shaped(value, dtype)
        tensor.value = value
        return tensor

    @classmethod
    def shaped(cls, other: Tensor, dtype: torch.dtype) -> Any:
        """Return an instance without data."""
        return Tensor._make_wrapper_subclass(
            cls,
            other.size(),
            strides=other.stride(),
            storage_offset=other.storage_offset(),
            dtype=dtype,
            device=other.device,
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return ExactMode().__torch_dispatch__(func, types, args, kwargs)

    # Uses of tensors in a forward pass other than operations.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with _disable_current_modes():
            return f"{self.value!r}"

    def __format__(self, form: str) -> str:
        with _disable_current_modes():
            return format(self.value, form)

    def __deepcopy__(self, memo: Any) -> Tensor:
        # PyTorch copies no subclass without data, and a model may copy its cache.
        memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    def tolist(self) -> Any:
        """Float64 values."""
        with _disable_current_modes():
            return self.value.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse conversion: no arithmetic can follow NumPy."""
        raise TypeError(f"a tensor is passed to NumPy, {UNFOLLOWED}")

    def apply_(self, *_: Any) -> Any:
        """Refuse Python functions of elements: PyTorch would crash, since a wrapper has no data."""
        raise TypeError(f"elements of a tensor are passed to Python, {UNFOLLOWED}")

    map_: Any = apply_

    @property
    def data(self) -> Tensor:
        """The same values, detached."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        attribute: Any = Tensor.data
        attribute.__set__(self, other)
        self.value = value_of(other)


class Weight(Computed):
    """A parameter whose float64 value is computed at each use."""

    numbers: Tensor
    changed: Tensor | None

    @staticmethod
    def __new__(cls, parameter: Tensor) -> Weight:
        """Wrap a parameter."""
        tensor: Weight = cls.shaped(parameter, parameter.dtype)
        tensor.changed, tensor.numbers = None, parameter.detach()
        return tensor

    @property
    def value(self) -> Tensor:
        """The float64 value."""
        return value_of(self.numbers) if self.changed is None else self.changed

    @value.setter
    def value(self, value: Tensor) -> None:
        self.changed = value

    def restore(self, written: bool) -> None:
        """Reset the value; ``written`` parameters get a copy that views share."""
        self.changed = self.numbers.to(value_of(self.numbers).dtype, copy=True) if written else None


def computed(entry: Any) -> Any:
    if not _rounded(entry) or isinstance(entry, Computed):
        return entry
    return Computed(value_of(entry), entry.dtype)


def value_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Computed):
        return tensor.value
    if tensor.dtype not in ROUNDOFF:
        return tensor  # not a copy: an in-place operation may change its shape
    with _disable_current_modes():  # otherwise an arithmetic would intercept this
        return _wide(tensor.detach())


def _numbers_of(x: Any) -> Any:
    return x.numbers if isinstance(x, Weight) else x


def _dense(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_nested:
        raise SpecError("Concord has no rule for nested tensors: use a regular tensor, such as a padded one")
    sparse = _rounded(x) and x.layout != torch.strided
    return x.to_dense() if sparse else x


def _wide(x: Tensor) -> Tensor:
    x = _dense(x)
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _squared(x: Tensor) -> Tensor:
    return x.abs().square() if x.is_complex() else x * x


class ExactMode(TorchDispatchMode):
    """Exact arithmetic, which runs operations in float64."""

    # `samples` and `corner` are as in concord.spec.arithmetic.Arithmetic. `backward` is True during the
    # backward pass. `blind_rows` is the result of softmax for a row that sees no key: "zero", "uniform", or
    # empty for the softmax of its scores.
    samples, corner, backward, blind_rows = 0, 0.0, False, ""
    supports_higher_order_operators = True
    kernels: Collection[str] = ()  # names from KERNELS that may have run
    # `within` is the composite function being computed, such as lstm. With `constants`, Python numbers are
    # rounded to the dtype of their operation.
    within, constants = "", False

    def __init__(self, decisions: Runner | None = None) -> None:
        super().__init__()
        self.without_rule: set[str] = set()
        self.decisions = decisions  # None: the run makes its own decisions
        self.occurred: set[str] = set()  # names of operations and functions that ran

    @property
    def recorded(self) -> Decisions:
        """The exact run's decisions."""
        assert isinstance(self.decisions, Decisions)
        return self.decisions

    def varied(self, y: Tensor, size: Unary) -> Tensor:
        """Add an error of ``size``."""
        return y

    def erred(
        self, y: Tensor, dtype: torch.dtype, units: float, absolute: float = 0.0, once: Tensor | bool = True
    ) -> Tensor:
        """Add an error in unit roundoffs, except where a result rounded ``once`` is exact."""
        return y

    def summed(self, y: Tensor, dtype: torch.dtype, place: int, deviation: Callable[[], Tensor]) -> Tensor:
        """Add the rounding error of a sum that is result number ``place`` of its operation."""
        return self.erred(y, dtype, 1)

    def shortened(self, x: Tensor) -> Tensor:
        """Round a factor to TF32."""
        return x

    def solved(self, func: Any, name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """Run a linear-algebra operation; subclasses model its rounding error."""
        return func(*args, **kwargs)

    def remember(self, weights: Tensor, scores: Tensor) -> None:
        """Store scores for the backward pass."""

    def finish(self) -> None:
        """Drop what the backward pass needed."""

    def cancelled(self, product: Tensor) -> Tensor:
        """Sums of a product's absolute terms, if known."""
        return product.abs()

    def operand(self, x: Any) -> Any:
        """The float64 value."""
        return value_of(x) if isinstance(x, Tensor) else x

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return within(self, func, args, kwargs)
        kwargs, about = dict(kwargs or {}), traits(func)
        # Composite operations run again within the mode, which intercepts their steps.
        if about.steps is not None:
            with self:
                return about.steps(*args, **kwargs)
        if about.bare in DRAWN:
            return self._drawn(func, args, kwargs)
        changing, bare = about.changing, about.bare
        if changing and not (args and isinstance(args[0], Tensor) and _written(func) == ["self"]):
            with self:
                return _into(func, args, kwargs)
        entries = leaves((args, kwargs))
        floats = [x for x in entries if _rounded(x)]
        dtype = _resulting(args[0].dtype if changing else kwargs.get("dtype"), floats)
        if kwargs.get("dtype") in ROUNDOFF:
            kwargs["dtype"] = torch.complex128 if kwargs["dtype"].is_complex else torch.float64
        if changing and isinstance(args[0], Computed):
            args[0].value = args[0].value  # keep values written to a weight until the pass ends
        (operands, named), rounded_operands = self._operands(bare, dtype, (tuple(args), kwargs), entries)
        run = partial(self.solved, func, bare, dtype) if bare in SOLVING else func
        y = self._result(func, floats, (operands, named), rounded_operands, run)
        if any(map(_rounded, y if isinstance(y, tuple) else (y,))):
            erred = self._by_kernels(bare, self._rule(bare, y, dtype, operands, named, floats), operands)
            if about.views_in_place:  # such as transpose_, which reshapes its operand
                return return_and_correct_aliasing(func, tuple(args), kwargs, args[0])
            if changing:
                (args[0].value if isinstance(args[0], Computed) else args[0]).copy_(erred)
                return args[0]
            y = erred
        elif changing and isinstance(y, Tensor) and y is not args[0]:  # cast in place
            return args[0].copy_(y)
        result = mapped(lambda x: _wrapped(x, dtype), y)
        is_view = about.views and isinstance(args[0], Computed)
        return return_and_correct_aliasing(func, tuple(args), kwargs, result) if is_view else result

    def _operands(
        self, bare: str, dtype: torch.dtype, arguments: Operands, entries: Sequence[Any]
    ) -> tuple[Operands, Operands]:
        # Operations that only select or move elements of weights run before these are widened to float64.
        narrow = bare in EXACT and all(
            isinstance(x, Weight) and x.changed is None for x in entries if _rounded(x)
        )
        operands: Operands = mapped(_numbers_of if narrow else self.operand, arguments)
        if TF32 in self.kernels and dtype == torch.float32:
            factors, (positional, named) = FACTORS.get(bare, range(0)), operands
            shortened = [self.shortened(x) if place in factors else x for place, x in enumerate(positional)]
            operands = shortened, named
        rounded_operands = operands
        if any(isinstance(x, float) for x in entries):
            rounded_operands = mapped(partial(_held, dtype), operands)
        # These round a Python number to their dtype; others may use it unrounded.
        return (
            rounded_operands if bare in EXACT or bare in FILLING or self.constants else operands
        ), rounded_operands

    def _result(
        self, func: Any, floats: Sequence[Tensor], operands: Any, rounded_operands: Any, run: Any
    ) -> Any:
        args, kwargs = operands
        try:
            if self.decisions:
                y = self.decisions.compute(func, floats, operands, rounded_operands, run)
            else:
                y = run(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:  # a custom operator may refuse these operands
            raise Uncomputable(f"{func} cannot be computed in float64: {first_line(error)}") from error
        return mapped(_dense, y)

    def _drawn(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # In the model's own dtype: float64 would draw different values from the same generator.
        positional, named = mapped(
            lambda x: x.value.to(x.dtype) if isinstance(x, Computed) else x, (tuple(args), kwargs)
        )
        result = func(*positional, **named)
        if not is_mutable(func):
            return mapped(computed, result)
        if isinstance(args[0], Computed):
            args[0].value.copy_(result)
        return args[0]

    def _by_kernels(self, name: str, y: Any, args: Sequence[Any]) -> Any:
        self.occurred.add(name)
        rules = [KERNEL_RULES[kernel] for kernel in self.kernels if kernel in KERNEL_RULES]
        return reduce(lambda y, rule: rule(self, name, y, args), rules, y)

    def _rule(
        self,
        name: str,
        y: Any,
        dtype: torch.dtype,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        floats: Sequence[Tensor],
    ) -> Any:
        dtype = _like(y, dtype)
        if name in CONVERTING:  # only a narrower dtype rounds
            representable = floats and all(ROUNDOFF[x.dtype] >= ROUNDOFF[dtype] for x in floats)
            return y if representable else self.erred(y, dtype, 1)
        if name in EXACT or not floats:
            return y
        if name in COUNTING:
            # Only while the dtype can count exactly: up to 2^24 in float32.
            is_whole, representable = args[0] == args[0].abs().floor(), y.abs() * ROUNDOFF[dtype] <= 1
            if bool(is_whole.all() & representable.all()):
                return y
        if name in RESAMPLING:
            unit = min(ROUNDOFF[dtype], SUMMED)
            y = self.varied(y, lambda y: unit * RESAMPLING[name](y, *args))
        if name in SUMS:
            return self._summed(name, y, dtype, args, kwargs)
        if isinstance(y, tuple):
            return tuple(self._elementwise(name, x, _like(x, dtype), None) if _rounded(x) else x for x in y)
        if name in ("add", "sub", "rsub") and len(args) > 1:
            return self._added(y, dtype, args)
        if name in REFLECTING:
            return self.varied(y, lambda y: _unit(y.new_empty(0, dtype=dtype)) * size_of(y))
        if name in ("fmod", "remainder"):
            y = self._taken_off(y, dtype, *args)
        return self._elementwise(name, y, dtype, args[1] if len(args) > 1 else None)

    def _summed(
        self, name: str, y: Any, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        accumulation = ROUNDOFF[dtype] if name in IN_PLACE else min(ROUNDOFF[dtype], SUMMED)
        counted: Any = cache(lambda: SUMS[name](y, *args, **kwargs))
        if isinstance(y, Tensor):
            return self.summed(y, dtype, 0, lambda: _deviation(y, dtype, counted(), accumulation))

        def deviation(place: int) -> Tensor:
            count, total = (part[place] for part in counted()[:2])
            return _deviation(y[place], dtype, (count, total, 0.0), accumulation)

        return tuple(
            tensor if tensor is None else self.summed(tensor, dtype, place, partial(deviation, place))
            for place, tensor in enumerate(y)
        )

    def _elementwise(self, name: str, y: Tensor, dtype: torch.dtype, other: Any) -> Tensor:
        units = UNITS.get(name, 1 if name in SOLVING else FOREIGN)
        if name not in UNITS and name not in SATURATING and name not in SOLVING:
            self.without_rule.add(name)
        if name in CONSTANT and isinstance(other, float):
            units += _held(dtype, other) != other
        if name == "pow" and not isinstance(other, Tensor) and other == 2:
            units = 1
        if name in ROOTED:
            y = self.varied(y, lambda y: torch.full_like(y, units * ROUNDOFF[dtype]))
        once: Tensor | bool = True
        if name == "div" and not torch.as_tensor(other).is_complex():
            once = _power_of_two(other)  # a kernel may multiply by the reciprocal instead
        return self.erred(y, dtype, units, 4 if name in SATURATING else 0, once)

    def _taken_off(self, y: Tensor, dtype: torch.dtype, x: Any, other: Any) -> Tensor:
        # Other algorithms may round the subtracted multiple, or the other operand.
        multiple = x - y
        lost = (_wide(multiple.to(dtype)) != multiple) | (torch.as_tensor(_held(dtype, other)) != other)
        return self.varied(y, lambda _: 2 * ROUNDOFF[dtype] * multiple.abs() * lost)

    def _added(self, y: Tensor, dtype: torch.dtype, args: Sequence[Any]) -> Tensor:
        perturbed = self.erred(y, dtype, 1)
        a, b = (_wide(torch.as_tensor(x)).abs() for x in args[:2])  # one may be a Boolean mask
        if not y.numel() or bool(torch.maximum(a.amax(), b.amax()) < ABSORBS):
            return perturbed
        large = torch.maximum(a, b)
        # A term that is absorbed here is absorbed in every correct run.
        lost = (large >= ABSORBS) & (torch.minimum(a, b) <= 4 * ROUNDOFF[dtype] * large)
        return torch.where(lost, _wide(y.to(dtype)), perturbed)


class Perturbed(ExactMode):
    """Monte Carlo arithmetic: random errors the size of rounding."""

    samples = 1

    def __init__(self, seed: int, decisions: Runner | None = None) -> None:
        super().__init__(decisions)
        # Tensor cores may truncate factors, with up to twice the error of rounding (decision 13).
        self.cut = seed % 2
        self.weights: dict[int, tuple[Tensor, Tensor]] = {}  # weights and scores by storage
        # The last two matrix products with their factors; two, because a product has two gradients.
        self.products: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=2)
        self.generator = np.random.Generator(np.random.SFC64(seed))  # nine times as fast as PyTorch's
        self.seed, self.generators = seed, dict[torch.device, torch.Generator]()  # by device

    def noise(self, y: Tensor) -> Tensor:
        """Uniform noise in [-1, 1]."""
        if y.is_complex():
            return torch.complex(self.noise(y.real), self.noise(y.imag))
        if y.device.type == "cpu":
            return torch.from_numpy(self.generator.random(y.numel())).view(y.shape).mul_(2).sub_(1)
        if y.device not in self.generators:
            self.generators[y.device] = torch.Generator(y.device).manual_seed(self.seed)
        generator = self.generators[y.device]
        return torch.rand(y.shape, generator=generator, device=y.device, dtype=y.dtype).mul_(2).sub_(1)

    def varied(self, y: Tensor, size: Unary) -> Tensor:
        """Perturb by the given size, except infinities."""
        # Otherwise a sum with a mask of -inf, or the logarithm of zero, would be NaN in samples, and a whole
        # row of attention weights would not be judged.
        noisy = torch.addcmul(y, size(y), self.noise(y))
        all_finite = y.device.type == "cpu" and bool(y.sum().isfinite())  # a GPU would have to wait for it
        return noisy if all_finite else torch.where(y.isinf(), y, noisy)

    def erred(
        self, y: Tensor, dtype: torch.dtype, units: float, absolute: float = 0.0, once: Tensor | bool = True
    ) -> Tensor:
        """Perturb by unit roundoffs of the result, or of 1 if absolute."""
        size = y.abs().mul_(0 if absolute else units * ROUNDOFF[dtype])
        size += LEAST[dtype] + absolute * ROUNDOFF[dtype]
        # A representable result needs no rounding: a mask of zeros and ones stays such a mask. Otherwise `1 -
        # mask` times the smallest float32 is noise of 1e31, and any attention weights agree (decision 32).
        exact = _wide(y.to(dtype)) == y if units <= ROUNDED_ONCE and not absolute else y == 0
        if once is not True:
            exact = exact & once | (y == 0)
        return self.varied(y, lambda _: size.masked_fill_(exact, 0))

    def summed(self, y: Tensor, dtype: torch.dtype, place: int, deviation: Callable[[], Tensor]) -> Tensor:
        """Perturb by the standard deviation."""
        # The deviation costs as much as the sum and hardly differs between samples, so they share it.
        beside = self.decisions
        size = beside.share(place, y.shape, deviation) if isinstance(beside, Followed) else deviation()
        y = self.varied(y, lambda _: size)
        return self.erred(y, dtype, 1) if ROUNDOFF[dtype] > SUMMED else y

    def shortened(self, x: Tensor) -> Tensor:
        """Round or truncate a factor."""
        return self.varied(x * (1 - self.cut * SHORTENED), lambda x: SHORTENED * x)

    def solved(self, func: Any, name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """Perturb the matrices, and solve."""
        unit = min(ROUNDOFF[dtype], SUMMED)
        # LAPACK is backward stable: its results are exact for a matrix that differs by one unit roundoff of
        # its norm.
        erring = [
            self.varied(x, lambda x: unit * size_of(x)) if place in SOLVING[name] else x
            for place, x in enumerate(args)
        ]
        return func(*erring, **kwargs)

    def remember(self, weights: Tensor, scores: Tensor) -> None:
        """Note the scores."""
        if torch.is_grad_enabled():
            self.weights[weights.untyped_storage().data_ptr()] = weights, scores

    def finish(self) -> None:
        """Drop the scores and products."""
        self.weights.clear()
        self.products.clear()

    def cancelled(self, product: Tensor) -> Tensor:
        """Compute the sums from the factors if the product is one of the last two."""
        for y, a, b in self.products:
            same = y.untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
            if same and product.is_contiguous() and y.shape[-2:] == product.shape[-2:]:
                return (a.abs() @ b.abs()).reshape(product.shape)
        return super().cancelled(product)

    def _rule(self, name: str, y: Any, *rest: Any) -> Any:
        y = super()._rule(name, y, *rest)
        if self.backward and name in ("mm", "bmm"):
            self.products.append((y, *rest[1]))
        return y

    def operand(self, x: Any) -> Any:
        """Recompute softmax weights in the backward pass (SPEC ALG-2)."""
        x = super().operand(x)
        if not self.backward or not isinstance(x, Tensor):
            return x
        place = x.untyped_storage().data_ptr()
        if place not in self.weights:
            return x
        # A fused kernel's backward pass recomputes the weights without normalizing.
        y, scores = self.weights[place]
        perturbed = self.varied(y, lambda y: RECOMPUTED * SUMMED * scores.abs().nan_to_num(posinf=0.0) * y)
        return perturbed.as_strided(x.size(), x.stride(), x.storage_offset())


class Rounded(ExactMode):
    """A correct low-precision run, rounded after each operation."""

    def __init__(self, decisions: Runner | None = None, constants: bool = False) -> None:
        super().__init__(decisions)
        self.constants = constants

    def erred(self, y: Tensor, dtype: torch.dtype, *_: Any) -> Tensor:
        """Round to the dtype."""
        return _wide(y.to(dtype))

    def solved(self, func: Any, name: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """Run linear algebra in its own precision."""
        low = dtype if ROUNDOFF[dtype] <= SUMMED else torch.float32  # LAPACK has no half precision
        args, kwargs = mapped(lambda x: x.to(_like(x, low)) if _rounded(x) else x, (args, kwargs))
        return mapped(lambda x: _wide(x) if _rounded(x) else x, func(*args, **kwargs))


class Traits(NamedTuple):
    """Properties of an operation, whatever its operands."""

    bare: str  # name without the underscore of an in-place operation
    changing: bool
    views: bool  # whether its result may share memory with an operand
    views_in_place: bool
    steps: Callable[..., Any] | None  # its decomposition, if it is composite


@cache
def traits(func: Any) -> Traits:
    name, changing = func.overloadpacket.__name__, is_mutable(func)
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return Traits(
        name.rstrip("_") if changing or name.rstrip("_") in DRAWN else name,
        changing,
        any(returned.alias_info for returned in func._schema.returns),
        torch.Tag.inplace_view in func.tags,
        WRITTEN_OUT.get(func, func.decompose if composite else None),
    )


@cache
def _written(func: Any) -> list[str]:
    return [
        operand.name
        for operand in func._schema.arguments
        if operand.alias_info and operand.alias_info.is_write
    ]


def _into(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    remaining, names = dict(kwargs), _written(func)
    targets = [remaining.pop(name, None) for name in names]
    if not all(isinstance(target, Tensor) for target in targets):
        raise SpecError(f"Concord has no rule for {func}, which changes {', '.join(names)} in place")
    results = func.overloadpacket(*args, **remaining)
    for target, result in zip(targets, results if isinstance(results, tuple) else [results], strict=True):
        target.copy_(result)
    return tuple(targets) if isinstance(results, tuple) else targets[0]


@contextlib.contextmanager
def without_fast_paths() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Disable fused kernels: math attention, no oneDNN, no NNPACK, no cuDNN."""
    with sdpa_kernel(SDPBackend.MATH), contextlib.ExitStack() as stack:
        with warnings.catch_warnings(action="ignore"):  # it warns about GPUs that nobody requested
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(without_fast_paths())
        stack.enter_context(unfused())
        yield


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Run TorchScript without fusion."""
    # Its fused GPU kernels read a tensor's memory, which a Computed tensor lacks.
    compiled: Any = torch.jit._state._python_cu
    for function in compiled.get_functions() if torch.cuda.is_initialized() else ():
        function._debug_flush_compilation_cache()
    unoptimized: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]
    with unoptimized(False):
        yield


def _resulting(stated: Any, floats: Sequence[Tensor]) -> torch.dtype:
    if stated in ROUNDOFF:
        return stated
    # PyTorch promotes the dtypes of tensors that have axes; scalars count only if all are scalars.
    ranked = [x.dtype for x in floats if x.ndim] or [x.dtype for x in floats] or [torch.get_default_dtype()]
    return reduce(torch.promote_types, ranked)


def _held(dtype: torch.dtype, x: Any) -> Any:
    if not isinstance(x, float):
        return x
    # A value out of range stays unchanged: infinity would turn masks into NaN.
    number = float(torch.tensor(x, dtype=dtype))
    return number if math.isfinite(number) else x


def _power_of_two(x: Any) -> Tensor:
    mantissa, _ = torch.frexp(torch.as_tensor(x).double())
    return mantissa.abs() == 0.5


def _rounded(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in ROUNDOFF


def _wrapped(x: Any, dtype: torch.dtype) -> Any:
    return Computed(_wide(x), _like(x, dtype)) if _rounded(x) else x


def _like(x: Any, dtype: torch.dtype) -> torch.dtype:
    if isinstance(x, Tensor) and x.is_complex():
        return dtype.to_complex()
    return dtype.to_real() if dtype.is_complex else dtype


def _deviation(y: Tensor, dtype: torch.dtype, counted: Counted, accumulation: float) -> Tensor:
    # Rounded in an unknown order; `accumulation` is the unit roundoff of each addition.
    (count, total, walked), square = counted, _squared(y)
    terms = torch.clamp(torch.as_tensor(count), min=1)
    several = (terms > 1) * 1.0  # a single term is not rounded
    variance = several * terms / 3 * square
    variance += several * (terms + 1) / 6 * torch.clamp(total - square / terms, min=0)
    # Equal terms are rounded alike: n of them err by up to n/2 of their sum. If all nonzero terms are equal,
    # the squared sum over the sum of squares is a whole number.
    equal = square / torch.where(total > 0, total, math.inf)
    alike = several * ((equal - equal.round()).abs() <= EQUAL * equal)
    variance = torch.maximum(variance, alike * (equal / 2) ** 2 * square)
    if isinstance(walked, Tensor):
        variance = torch.maximum(variance, walked)
    least = several * terms * max(LEAST[dtype], LEAST[torch.float32])
    lost = torch.where((total > 0) | (y != 0), least, 0.0)
    return accumulation * torch.sqrt(variance) + lost


# For each element: the number of terms, the sum of their squares, and the sum of squared partial sums in the
# given order; 0 where the order does not matter.
Counted = tuple[float | Tensor, Tensor, float | Tensor]


def _product(y: Tensor, *operands: Tensor, beta: float = 1, alpha: float = 1) -> Counted:
    *added, a, b = operands
    squares = alpha**2 * torch.matmul(_squared(a), _squared(b))
    count = a.shape[-1]
    terms: Any = max(count + len(added), 2)  # even a single product is rounded
    if b.ndim > 1:
        terms = terms * _alike(a.mT, b)
    walked = _walked(
        torch.matmul(a[..., at], b[..., at, :] if b.ndim > 1 else b[at]) for at in _blocks(count)
    )
    return terms, reduce(torch.add, ((beta * c) ** 2 for c in added), squares), alpha**2 * count * walked


def _blocks(count: int) -> list[slice]:
    ends = [count * block // BLOCKS for block in range(BLOCKS + 1)] if count >= LONG else []
    return [slice(*between) for between in pairwise(ends)]


def _walked(parts: Iterable[Tensor]) -> Any:
    # Neighbouring terms may share a sign, as gradients of a text's tokens do. Partial sums are then far
    # larger than in a random order: without this, MiniLM's gradients were flagged.
    total: Any = 0.0
    squares: Any = 0.0
    for part in parts:
        total = total + part
        squares = squares + _squared(total) / BLOCKS
    return squares


def _alike(*factors: Tensor) -> Tensor:
    # The number of terms rounded alike, averaged over the terms of a sum along the second-to-last axis. Equal
    # terms, such as rows of padding, err in one direction in a kernel that adds term by term. With 50 of 148
    # rows equal, an H200's product erred by 31 unit roundoffs of all terms' sizes (decision 37).
    *batch, count, _ = factors[0].shape
    if not count:  # such as an expert without tokens
        return factors[0].new_ones(*batch, 1, 1, dtype=torch.float64)
    generator, zero = torch.Generator().manual_seed(0), factors[0].new_zeros(*batch, count, dtype=torch.bool)
    places = factors[0].new_zeros(2, *batch, count, dtype=torch.float64)
    for x in factors:  # equal rows project to the same point on two random lines, so no pairs are compared
        lines = torch.randn(2, x.shape[-1], dtype=torch.float64, generator=generator, device="cpu").to(
            x.device
        )
        along = torch.stack([x.real @ line for line in lines])
        places += along / along.abs().amax(-1, keepdim=True).clamp(min=LEAST[torch.float64])
        zero |= (x == 0).all(-1)
    first, order = torch.where(zero, torch.arange(10.0, 10.0 + count, device=zero.device), places[0]).sort(-1)
    apart = (first.diff() > EQUAL) | (places[1].gather(-1, order).diff().abs() > EQUAL)
    runs = torch.nn.functional.pad(apart.cumsum(-1), (1, 0))
    sizes = torch.zeros_like(places[0])
    sizes.scatter_add_(-1, runs, torch.ones_like(sizes))
    return (sizes.square().sum(-1) / max(count, 1))[..., None, None]


def _sum(y: Tensor, x: Tensor, dim: Any = None, *rest: Any, **named: Any) -> Counted:
    count, total, walked = _linear(aten.sum)(y, x, dim, *rest, **named)
    rows = len(dim or ())
    if 0 < rows < x.ndim and sorted(dim) == [*range(rows)]:  # such as the gradient of a bias
        terms = x.reshape(-1, math.prod(x.shape[rows:]))
        count = count * _alike(terms).squeeze()
        parts = (terms[at].sum(0).view(y.shape) for at in _blocks(len(terms)))
        walked = len(terms) * _walked(parts)
    return count, total, walked


def _mean(y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Counted:
    return SUMS["sum"](y, x * (y.numel() / max(x.numel(), 1)), *rest, **named)


def _transformed(y: Tensor, x: Tensor, dim: Sequence[int], normalization: int, *_: Any) -> Counted:
    given_terms = math.prod(x.shape[d] for d in dim)
    terms = max(given_terms, math.prod(y.shape[d] for d in dim))  # a real transform uses half of its terms
    share = terms / given_terms * float(terms) ** -normalization
    return terms, share * _squared(x).sum(tuple(dim), keepdim=True), 0.0


def _reduced(
    y: Tensor, x: Tensor, dim: int, index: Tensor, source: Tensor, kind: str, include_self: bool = True
) -> Counted:
    def summed(function: Unary) -> Tensor:
        return function(x).scatter_reduce(dim, index, function(source), "sum", include_self=include_self)

    if kind in ("amax", "amin"):
        return 1.0, torch.zeros_like(y), 0.0
    count = summed(torch.ones_like)
    squares = _squared(y) if kind == "prod" else summed(_squared)
    return count, squares / count**2 if kind == "mean" else squares, 0.0


def _averaged(operation: Callable[..., Tensor]) -> Callable[..., Counted]:
    # For coefficients that sum to 1.

    def rule(y: Tensor, x: Tensor, *rest: Any, **named: Any) -> Counted:
        return max(x.numel() / max(y.numel(), 1), 4.0), operation(x * x, *rest, **named), 0.0

    return rule


def _linear(operation: Callable[..., Tensor], *places: int) -> Callable[..., Counted]:
    # Applied to ones, a linear operation counts terms; applied to squares, it sums them. `places` are the
    # operands in which the operation is linear, by default all.

    def rule(y: Any, *args: Any, **named: Any) -> Counted:
        def of(function: Unary) -> Any:
            mapped = [
                function(x) if _rounded(x) and place in (places or (place,)) else x
                for place, x in enumerate(args)
            ]
            return operation(*mapped, **named)

        return of(lambda x: torch.ones(x.shape, dtype=torch.float64, device=x.device)), of(_squared), 0.0

    return rule


SUMS: dict[str, Callable[..., Counted]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv"), _product),
    "mean": _mean,
    "scatter_reduce": _reduced,
    **dict.fromkeys(("_fft_r2c", "_fft_c2c", "_fft_c2r"), _transformed),
    **{name: _linear(getattr(aten, name)) for name in RULES["linear"]},
    **{name: _linear(getattr(aten, name), 0) for name in RULES["linear_in_first"]},
    **{name: _averaged(getattr(aten, name)) for name in RULES["averaged"]},
    "sum": _sum,
}


# Kernels with larger errors, as changes of an operation's result.

# Error of a fast convolution in unit roundoffs of a tile's size: 16 times the error of the smallest tiles.
# Tiles of 4 x 4 and 6 x 6 outputs err by 120 to 240 times that error, TF32 by 800 to 4000 times.
FAST = 28.0

# The same error for gradients of 5 x 5 weights in cuDNN 9.19: 8e-4 of their size, and 4e-3 of the largest.
WINOGRAD_9X9 = 5000.0

# Relative error of tanh and sigmoid in cuDNN's recurrent kernels: 4e-6 to 7e-6 in cuDNN 9.19.
APPROXIMATED = 2.0**-17

# Length of the window along an axis whose values determine the error at its center: tiles have 4 to 8 places,
# or cover the image.
NEIGHBOURS = 15

# Places per tile in a fast gradient of weights.
TILE = 16


def _around(x: Tensor) -> Tensor:
    pool: Any = getattr(torch.nn.functional, f"avg_pool{x.ndim - 2}d")
    squares = _squared(x)
    # Padded first, because 3D pooling refuses an image that is smaller than its window without padding.
    padded = torch.nn.functional.pad(squares, [NEIGHBOURS // 2] * 2 * (x.ndim - 2))
    around: Tensor = pool(padded, NEIGHBOURS, 1)
    # The mean over all places represents an FFT, whose tile is the whole image.
    return around + squares.mean(tuple(range(2, x.ndim)), keepdim=True)


def _spread(squares: Tensor) -> Tensor:
    return squares.mean(tuple(range(2, squares.ndim)), keepdim=True).expand_as(squares)


def _by_tiles(mode: ExactMode, y: Tensor, squares: Tensor, count: float, units: float) -> Tensor:
    def size(_: Tensor) -> Tensor:
        return units * SUMMED * (squares.clamp(min=0) * (1 + count / 6)).sqrt()

    return mode.varied(y, size)


def _convolved_fast(mode: ExactMode, name: str, y: Any, args: Sequence[Any]) -> Any:
    if not mode.samples or name not in ("convolution", "convolution_backward"):
        return y
    weight = args[1 if name == "convolution" else 2]
    if weight[0, 0].numel() == 1 or not 3 <= weight.ndim <= 5:
        return y
    filters = _spread(_squared(weight))
    if name == "convolution":
        squares = aten.convolution(_around(args[0]), filters, None, *args[3:])
        return _by_tiles(mode, y, squares, args[0].shape[1] / args[8], FAST)
    back, x = args[:2]
    mask = [*args[10][:2], False]
    by_input, by_weight, _ = aten.convolution_backward(
        _around(back), _around(x), filters, None, *args[4:10], mask
    )
    by_input_tiles, weights, bias = y
    if mask[0]:
        by_input_tiles = _by_tiles(mode, by_input_tiles, by_input, back.shape[1] / args[9], FAST)
    if mask[1]:
        weights = _by_tiles(mode, weights, _spread(by_weight), _tiles(back), FAST)
    return by_input_tiles, weights, bias


def _tiles(back: Tensor) -> float:
    return back.numel() / back.shape[1] / TILE


def _winograd_9x9(mode: ExactMode, name: str, y: Any, args: Sequence[Any]) -> Any:
    if not mode.samples or name != "convolution_backward" or args[2].shape[2:] != (5, 5) or not args[10][1]:
        return y
    places = [_around(x) for x in args[:2]]
    squares = aten.convolution_backward(*places, args[2], None, *args[4:10], [False, True, False])[1]
    return y[0], _by_tiles(mode, y[1], _spread(squares), _tiles(args[0]), WINOGRAD_9X9), y[2]


def _approximated(mode: ExactMode, name: str, y: Any, args: Sequence[Any]) -> Any:
    if mode.within not in KERNELS[CUDNN_RECURRENT].concerns or name not in ("tanh", "sigmoid"):
        return y
    return mode.varied(y, lambda y: APPROXIMATED * y.abs())


KERNEL_RULES: dict[str, Callable[..., Any]] = {
    FAST_CONVOLUTION: _convolved_fast,
    CUDNN_RECURRENT: _approximated,
    CUDNN_WINOGRAD_9X9: _winograd_9x9,
}


class WholeFunctions(TorchFunctionMode):
    """A mode that tells an arithmetic which composite function is running."""

    def __init__(self, arithmetic: ExactMode) -> None:
        super().__init__()
        self.arithmetic = arithmetic

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # On a GPU, PyTorch would use fused cells, whose operations an arithmetic cannot intercept.
        if name in RECURRENT and args[0].device.type != "cpu":
            func = _recurrent(name, args)
        if name not in KERNELS[CUDNN_RECURRENT].concerns:
            return func(*args, **(kwargs or {}))
        self.arithmetic.occurred.add(name)
        self.arithmetic.within = name
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.arithmetic.within = ""


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


def _recurrent(name: str, args: Sequence[Any]) -> Callable[..., Any]:
    if name.endswith("_cell"):
        return {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell}[name]
    # With packed sequences, the batch sizes precede the state, which is a list of two tensors in an LSTM.
    tensors = sum(isinstance(x, Tensor) for x in args[:3])
    packed = tensors > (1 if name == "lstm" else 2)
    function: Any = getattr(getattr(aten, name), "data" if packed else "input")
    return decomposition_table[function]


def _lstm_cell(x: Tensor, state: Any, by_x: Tensor, by_h: Tensor, *biases: Any) -> Any:
    hidden, cell = state
    bias, bias_h = biases or (None, None)
    gates = torch.nn.functional.linear(x, by_x, bias) + torch.nn.functional.linear(hidden, by_h, bias_h)
    entering, kept, new, leaving = gates.chunk(4, -1)
    cell = kept.sigmoid() * cell + entering.sigmoid() * new.tanh()
    return leaving.sigmoid() * cell.tanh(), cell


def _gru_cell(x: Tensor, hidden: Tensor, by_x: Tensor, by_h: Tensor, *biases: Any) -> Any:
    bias, bias_h = biases or (None, None)
    by_input = torch.nn.functional.linear(x, by_x, bias).chunk(3, -1)
    by_state = torch.nn.functional.linear(hidden, by_h, bias_h).chunk(3, -1)
    reset, kept = ((by_input[gate] + by_state[gate]).sigmoid() for gate in range(2))
    new = (by_input[2] + reset * by_state[2]).tanh()
    return new + kept * (hidden - new)


def _largest(x: Tensor, beyond: float = -math.inf) -> Tensor:
    """Each neighbourhood's maximum, (N, C, *); the value ``beyond`` surrounds the whole."""
    padded = torch.nn.functional.pad(x, [1, 1] * (x.ndim - 2), value=beyond)
    return getattr(torch.nn.functional, f"max_pool{x.ndim - 2}d")(padded, 3, 1)


# Terms of a cubic kernel's coefficient cancel: it errs by several roundings of 1, however small it is.
CUBIC = 8


def _misplaced(x: Tensor, cubic: bool, beyond: float = -math.inf) -> Tensor:
    """Errors of places and of coefficients."""
    by_place = max(x.shape[2:]) * (_largest(x, beyond) + _largest(-x, beyond))
    return by_place + cubic * CUBIC * _largest(_largest(x.abs(), beyond), beyond)


def _resized(y: Tensor, x: Tensor, *_: Any, cubic: bool = False) -> Tensor:
    return torch.nn.functional.interpolate(_misplaced(x, cubic), y.shape[2:])


def _sampled(y: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    # With zero padding, values fall to zero within one place beyond the border.
    by, beyond = (("border", 0.0), ("border", -math.inf), ("reflection", -math.inf))[padding]
    errors = _misplaced(x, mode == 2, beyond)  # 2: bicubic
    return torch.nn.functional.grid_sample(errors, grid, "nearest", by, aligned)


def _resized_back(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda y, gradient, *rest: max(y.shape[2:]) * _largest(operation(gradient.abs(), *rest)).abs()


# Operations that compute coordinates, which err by a rounding of the whole side length and thus change the
# selected values.
RESAMPLING: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys([name for name in RULES["averaged"] if "upsample" in name], _resized),
    "upsample_bicubic2d": partial(_resized, cubic=True),
    **dict.fromkeys([name for name in RULES["averaged"] if "grid" in name], _sampled),
    **{
        name: _resized_back(getattr(aten, name))
        for name in RULES["linear_in_first"]
        if "upsample" in name and "nearest" not in name
    },
}


# Decompositions of composite operations, called within the arithmetic.


def _erring(x: Tensor, size: Unary) -> Tensor:
    if not isinstance(x, Computed):
        return x
    mode: Any = _get_current_dispatch_mode()
    with _disable_current_modes():
        return Computed(mode.varied(x.value, size), x.dtype)


def _unit(x: Tensor) -> float:
    return min(ROUNDOFF.get(x.dtype, SUMMED), SUMMED)


def _normalized(operation: Any) -> Callable[..., Any]:
    """Allow for norms in expanded form (SPEC ALG-5)."""

    def rule(x: Tensor, *rest: Any) -> Any:
        # PyTorch's CPU kernel computes `x r - m r` and rounds both products.
        return DECOMPOSITIONS[operation](_erring(x, lambda value: 2 * _unit(x) * value.abs()), *rest)

    return rule


def _variance(
    x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Allow for one-pass or blocked algorithms (SPEC ALG-5)."""
    dims = list(dim or range(x.ndim))
    count = math.prod(x.shape[d] for d in dims)
    mean = torch.mean(x, dims, keepdim=True)
    centered = x - mean
    free = count - (1 if correction is None else correction)
    variance = torch.sum(centered * centered, dims, keepdim=True) / max(free, 0)

    def size(value: Tensor) -> Tensor:
        merged, several = (
            2 * value_of(mean).abs() * value.clamp(min=0).sqrt(),
            4 * math.sqrt(count / 3) * value,
        )
        return _unit(x) * (merged + several)

    variance = torch.clamp(_erring(variance, size), min=0)  # a perturbed zero may be negative
    return (variance, mean) if keepdim else (variance.squeeze(dims), mean.squeeze(dims))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Allow for algorithms with logarithms (SPEC ALG-1 to ALG-3)."""
    y = DECOMPOSITIONS[aten._softmax.default](x, dim, half_to_float)
    if not isinstance(y, Computed) or not y.numel():
        return y
    mode: Any = _get_current_dispatch_mode()
    with _disable_current_modes():
        scores = value_of(x)
        # An absolute error of the logarithm is a relative error of its exponential.
        logarithm = torch.logsumexp(scores, dim, keepdim=True).abs()
        share = torch.where(logarithm.isfinite(), logarithm, 0.0) * _unit(x)
        # In a row with a visible key, mask constants are far from the logarithm.
        share = torch.where(share < 0.5, share, 0.0)
        y.value.copy_(mode.varied(y.value, lambda value: share * value))
        if mode.blind_rows:
            weight = 0.0 if mode.blind_rows == "zero" else 1 / scores.shape[dim]
            y.value.masked_fill_(scores.amax(dim, keepdim=True) <= BLIND, weight)
    mode.remember(y.value, scores)
    return y


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    y = _softmax(x, dim, False)
    with _disable_current_modes():
        value_of(y).nan_to_num_(nan=0.0)  # rows that see no key
    return y


def _softmax_backward(gradient: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Allow for row sums of outputs times gradients (SPEC ALG-2)."""
    product, mode = gradient * y, cast(Any, _get_current_dispatch_mode())

    def size(_: Tensor) -> Tensor:
        # If a query sees one key, the gradient of its weight and the row sum have the same value, computed in
        # two ways. Their difference errs by the terms that cancelled in each, even if the value itself is
        # small.
        size, weights = value_of(gradient), value_of(y)
        cancelled = (mode.cancelled(size) * weights).sum(dim, keepdim=True)
        return 4 * _unit(product) * torch.maximum(size.abs().amax(dim, keepdim=True), cancelled)

    total = _erring(torch.sum(product, dim, keepdim=True), size)
    return (product - y * total).to(dtype)


def _dropout(x: Tensor, share: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or not share:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    with _disable_current_modes():  # the model's own random mask
        mask = aten.native_dropout(torch.ones(x.shape, dtype=x.dtype, device=x.device), share, train)[1]
    return x * mask * (1 / (1 - share) if share < 1 else 0.0), mask


def _fake_quantized(x: Tensor, scale: Any, point: Any, *limits: int, axis: int | None = None) -> Any:
    if axis is not None:
        shape = [-1 if place == axis else 1 for place in range(x.ndim)]
        scale, point = scale.view(shape), point.view(shape)
    levels = torch.round(x / scale + point)
    within = (levels >= limits[0]) & (levels <= limits[1])
    return (torch.clamp(levels, *limits) - point) * scale, within


def _grouped_product(a: Tensor, b: Tensor, ends: Any = None, bias: Any = None, dtype: Any = None) -> Any:
    if ends is None or a.ndim != 2 or bias is not None:
        raise SpecError("Concord has a rule for grouped products only if they group rows and have no bias")
    with _disable_current_modes():  # ends may be Computed, if counted with a model's values
        places = [0, *map(int, value_of(ends).tolist())]
    if b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(places)])
    rows = [a[i:j] @ b[k] for k, (i, j) in enumerate(pairwise(places))]
    return torch.cat([*rows, a.new_zeros(len(a) - places[-1], b.shape[-1])])


DECOMPOSITIONS = {
    **core_aten_decompositions(),
    **get_decompositions(
        [
            aten._softmax,
            aten._log_softmax,
            aten.gelu,
            aten.linalg_vector_norm,
            aten.polar,
            aten.native_layer_norm,
            aten.native_group_norm,
            aten.native_batch_norm,
            aten._native_batch_norm_legit_no_training,
            aten.elu,
            aten.leaky_relu,
            aten.grid_sampler_2d,
        ]
    ),
}

WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    **{
        func: steps
        for func, steps in DECOMPOSITIONS.items()
        if func.overloadpacket.__name__ not in {*EXACT, *SUMS, *DRAWN, "linear"}
    },
    aten.native_dropout.default: _dropout,
    **{
        norm: _normalized(norm)
        for norm in (
            aten.native_layer_norm.default,
            aten.native_group_norm.default,
            aten.native_batch_norm.default,
        )
    },
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._safe_softmax.default: _safe_softmax,
    aten.var.correction: lambda *args, **named: _variance(*args, **named)[0],
    aten.var_mean.correction: _variance,
    aten._grouped_mm.default: _grouped_product,
    aten.rrelu_with_noise.default: lambda x, _, low=1 / 8, high=1 / 3, *rest: aten.leaky_relu(
        x, (low + high) / 2
    ),
    aten.fake_quantize_per_tensor_affine_cachemask.default: _fake_quantized,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: (
        lambda x, scale, point, _, *limits: _fake_quantized(x, scale, point, *limits)
    ),
    aten.fake_quantize_per_channel_affine_cachemask.default: (
        lambda x, scale, point, axis, *limits: _fake_quantized(x, scale, point, *limits, axis=axis)
    ),
    aten._sparse_addmm.default: lambda c, a, b, **by: torch.addmm(c, computed(a), computed(b), **by),
    aten._conj.default: lambda x: torch.conj_physical(
        torch.as_tensor(x)
    ),  # autograd also passes plain numbers
    aten._neg_view.default: torch.neg,
    # Forward-mode derivatives of constants: zeros without memory, on which no operation runs here.
    aten._efficientzerotensor.default: torch.zeros,
}
