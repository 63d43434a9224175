"""A model with a bug, on the NumPy tape."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.context import SIGNIFICANT_BITS, Context, Edit, Flags
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Ids, Shape
from concord.spec.encoder import Model
from concord.spec.precision import round_to_bits
from concord.spec.tape import Node


class Value:
    """A tensor on the tape with the operators of frameworks' tensors."""

    __slots__ = ("a", "tensor")
    __array_ufunc__ = None  # so that NumPy leaves operators to this class

    def __init__(self, arithmetic: Arithmetic, tensor: Node) -> None:
        self.a, self.tensor = arithmetic, tensor

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    def of(self, tensor: Node) -> Value:
        return Value(self.a, tensor)

    def like(self, other: Any) -> Node:
        return (
            other.tensor
            if isinstance(other, Value)
            else self.a.leaf(np.asarray(other, self.tensor.value.dtype))
        )

    def aligned(self, other: Value) -> tuple[Node, Node]:
        """Give both tensors the same number of axes, so that samples broadcast correctly."""
        rank = max(len(self.shape), len(other.shape))
        first, second = (
            value.a.reshape(value.tensor, (*[1] * (rank - len(value.shape)), *value.shape))
            if 0 < len(value.shape) < rank
            else value.tensor
            for value in (self, other)
        )
        return first, second

    def with_other(self, other: Any, of_tensors: str, of_number: str, sign: float = 1) -> Value:
        if isinstance(other, Value):
            return self.of(getattr(self.a, of_tensors)(*self.aligned(other)))
        return self.of(getattr(self.a, of_number)(self.tensor, sign * other))

    def __add__(self, other: Any) -> Value:
        return self.with_other(other, "add", "shift")

    def __sub__(self, other: Any) -> Value:
        return self.with_other(other, "subtract", "shift", -1)

    def __mul__(self, other: Any) -> Value:
        return self.with_other(other, "multiply", "scale")

    def __truediv__(self, other: Any) -> Value:
        return self.with_other(other, "divide", "divide_by")

    def __matmul__(self, other: Value) -> Value:
        rows = self.a.reshape(self.tensor, (int(np.prod(self.shape[:-1])), self.shape[-1]))
        return self.of(
            self.a.reshape(
                self.a.einsum("ni,io->no", rows, other.tensor), (*self.shape[:-1], other.shape[-1])
            )
        )

    def __neg__(self) -> Value:
        return self * -1.0

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: float) -> Value:
        return -self + other

    def __rtruediv__(self, other: float) -> Value:
        return self.of(self.a.divide(self.like(np.full(self.shape, other)), self.tensor))

    def __getitem__(self, where: Any) -> Value:
        """Select with slices, integers, ``None`` and ``...``, each element at most once."""
        parts = where if isinstance(where, tuple) else (where,)
        selection = self.of(self.a.index(self.tensor, tuple(part for part in parts if part is not None)))
        if None not in parts:
            return selection
        shape = np.empty(self.shape, bool)[where].shape
        return self.of(self.a.reshape(selection.tensor, shape))

    # Comparisons use each sample's own values.

    def __gt__(self, other: Any) -> Flags:
        return np.asarray(self.tensor.value > (other.tensor.value if isinstance(other, Value) else other))

    def __lt__(self, other: Any) -> Flags:
        return np.asarray(self.tensor.value < (other.tensor.value if isinstance(other, Value) else other))


class TapeContext(Context):
    """The context of a run on a tape; ``run`` contains the arguments of :class:`Context`."""

    def __init__(self, arithmetic: Arithmetic, *run: Any) -> None:
        super().__init__(*run)
        self.a = arithmetic

    def value(self, tensor: Node) -> Value:
        return Value(self.a, tensor)

    def recorded(self, value: Any, *operands: tuple[Node, Callable[[Any], Any]]) -> Value:
        """Record a new value, with gradient functions per operand."""
        return self.value(self.a._record(value, *operands))

    def __getattr__(self, name: str) -> Callable[..., Value]:
        operation = getattr(self.a, name)
        return lambda *operands: self.value(
            operation(*(operand.tensor if isinstance(operand, Value) else operand for operand in operands))
        )

    def sum(self, x: Value, axis: int | None = None) -> Value:
        return self.value(self.a.sum(x.tensor, None if axis is None else self.behind(x, axis)))

    def max(self, x: Value, axis: int) -> Value:
        """The maximum; tied entries share the gradient, as in every framework."""
        place = self.behind(x, axis)
        largest = x.tensor.value.max(place, keepdims=True)
        ties = x.tensor.value == largest
        shares = ties / ties.sum(place, keepdims=True)
        return self.recorded(largest, (x.tensor, lambda g: self.a.settle(g * shares.astype(g.dtype))))

    def exp(self, x: Value) -> Value:
        value = self.a._function(np.exp(x.tensor.value), False)
        return self.recorded(value, (x.tensor, lambda g: self.a.settle(g * value)))

    def log(self, x: Value) -> Value:
        value = self.a._function(np.log(x.tensor.value), True)
        return self.recorded(value, (x.tensor, lambda g: self.a.settle(g / x.tensor.value)))

    def tanh(self, x: Value) -> Value:
        return self.value(self.a.tanh(x.tensor, absolute=True))

    def sigmoid(self, x: Value) -> Value:
        return (self.tanh(x * 0.5) + 1.0) * 0.5

    def softmax(self, x: Value, axis: int) -> Value:
        return self.last(x, axis, self.a.softmax)

    def log_softmax(self, x: Value, axis: int) -> Value:
        return self.last(x, axis, self.a.log_softmax)

    def last(self, x: Value, axis: int, function: Callable[[Node], Node]) -> Value:
        """Apply a function of the last axis along any axis."""
        order = list(range(len(x.shape)))
        order[axis], order[-1] = order[-1], order[axis]
        return self.transpose(self.value(function(self.transpose(x, order).tensor)), order)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self.value(self.a.reshape(x.tensor, tuple(shape)))

    def rearranged(self, x: Value, order: Callable[[Ids], Ids]) -> Value:
        """Permute elements as ``order`` permutes their indices."""
        size = int(np.prod(x.shape))
        numbers = order(np.arange(size).reshape(x.shape))
        flat = self.a.reshape(x.tensor, (size,))
        return self.value(self.a.reshape(self.a.index(flat, numbers.reshape(-1)), numbers.shape))

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        return self.rearranged(x, lambda numbers: numbers.transpose(axes))

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        place, ends = self.behind(parts[0], axis), np.cumsum([part.shape[axis] for part in parts])[:-1]
        values = [part.tensor.value for part in parts]
        if self.a.lead:
            samples = max(map(len, values))
            values = [np.broadcast_to(value, (samples, *value.shape[1:])) for value in values]

        def pull(number: int) -> Callable[[Any], Any]:
            return lambda g: np.split(g, ends, place)[number]

        operands = ((part.tensor, pull(number)) for number, part in enumerate(parts))
        return self.recorded(np.concatenate(values, place), *operands)

    def add_where(self, visible: Flags, x: Value, constant: float) -> Value:
        return self.value(self.a.add_where(x.tensor, visible, constant, rounded=self.dtype))

    def where(self, condition: Any, a: Value, b: Any) -> Value:
        if not isinstance(b, Value) and np.broadcast_shapes(np.shape(condition), a.shape) == a.shape:
            return self.value(self.a.replace(a.tensor, condition, b))  # softmax needs to know this (MSK-5)
        alternative = a.like(b)
        values = np.where(condition, a.tensor.value, alternative.value)
        back_a, back_b = self.a._unbroadcast(a.tensor), self.a._unbroadcast(alternative)
        ours = (a.tensor, lambda g: back_a(np.where(condition, g, 0)))
        return self.recorded(values, ours, (alternative, lambda g: back_b(np.where(condition, 0, g))))

    def take(self, table: Value, ids: Ids) -> Value:
        return self.value(self.a.take(table.tensor, ids))

    def constant(self, values: NDArray[Any], like: Value | None = None) -> Any:
        return values if like is None else self.value(like.like(values))

    def stop_gradient(self, x: Value) -> Value:
        return self.recorded(x.tensor.value)

    def with_gradient(self, x: Value, function: Callable[[Value], Value]) -> Value:
        def pullback(gradient: Any) -> Any:
            return function(self.value(Node(gradient, gradient.shape[self.a.lead :]))).tensor.value

        return self.recorded(x.tensor.value, (x.tensor, pullback))

    def value_of(self, value: Value, surrogate: Value) -> Value:
        return self.recorded(value.tensor.value, (surrogate.tensor, lambda g: g))

    def rounded(self, x: Value, number_format: str) -> Value:
        value = round_to_bits(x.tensor.value.astype(np.float64), SIGNIFICANT_BITS[number_format]).astype(
            x.tensor.value.dtype
        )
        return self.recorded(value, (x.tensor, lambda g: g))

    def round_to(self, x: Value, number_format: str) -> Value:
        return self.rounded(x, number_format)

    def behind(self, x: Value, axis: int) -> int:
        """Count an axis from the end, because samples precede the axes."""
        return axis if axis < 0 else axis - len(x.shape)


class Seen(Mapping[str, Any]):
    """Tensors visible to an edit: preceding taps, ``inputs.<name>``, and parameters."""

    def __init__(self, model: Edited, value: Callable[[Node], Value]) -> None:
        self.model, self.value = model, value

    def __getitem__(self, name: str) -> Value:
        key, taps = name.removeprefix("inputs."), self.model.now
        if key != name:
            return self.value(self.model.given[key])
        return self.value(taps[name] if name in taps else self.model.weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter([*self.model.now, *(f"inputs.{name}" for name in self.model.given)])

    def __len__(self) -> int:
        return len(self.model.now) + len(self.model.given)


class Edited(Model):
    """The reference with edited taps, as a port with a bug.

    Attributes:
        edits: returns the edit of a tap, if any.
        taps: each tap as computed.
        now: each tap as seen by later steps.
    """

    edits: Callable[[str], Edit | None] = staticmethod(lambda tap: None)
    part = "model"
    memory: dict[str, Any] | None = None

    @functools.cached_property
    def taps(self) -> dict[str, Node]:
        return {}

    @functools.cached_property
    def now(self) -> dict[str, Node]:
        return {}

    @functools.cached_property
    def context(self) -> Context:
        return self.seen_by(self.a, functools.partial(Value, self.a))

    def seen_by(self, arithmetic: Arithmetic, value: Callable[[Node], Value]) -> Context:
        """Context of an edit in ``arithmetic``; ``value`` converts nodes."""
        tensors = Seen(self, value)
        return TapeContext(arithmetic, self.config, self.batch, self.part, self.dtype, tensors, self.memory)

    def made(self, edit: Edit, name: str, tensor: Node) -> Node:
        self.context.tap, self.context.y = name, Value(self.a, tensor)
        value: Value = edit(self.context)
        return value.tensor

    def tap(self, name: str, tensor: Node) -> Node:
        edit = self.edits(name)
        if edit:
            tensor = self.made(edit, name, tensor)
        self.taps[name] = tensor
        self.now[name] = super().tap(name, tensor)
        return self.now[name]
