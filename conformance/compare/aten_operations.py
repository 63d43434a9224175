"""ATen operations of a run, and their bugs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

# Tensors by name.
Tensors = dict[str, Tensor]

# A function of a tensor.
Unary = Callable[[Tensor], Tensor]


def is_float(x: Any) -> TypeGuard[Tensor]:
    """Whether ``x`` is a real floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def is_continuous(x: Any) -> TypeGuard[Tensor]:
    """Whether ``x`` is a real or complex tensor."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def snapshot(x: Any) -> Any:
    """A copy of a tensor, which later operations may change in place; any other object itself."""
    return x.detach().clone() if isinstance(x, Tensor) else x


def bare_name(func: Any) -> str:
    """An operation's name without overload and trailing underscore."""
    return str(func.overloadpacket.__name__).rstrip("_")


def is_mutable(func: Any) -> bool:
    """Whether an operation changes an operand in place."""
    return func._schema.is_mutable  # noqa: SLF001 – no public API has it


@dataclass(frozen=True)
class Operation:
    """An ATen operation with its operands and number."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    number: int

    def __call__(self) -> Any:
        """Compute the result."""
        return self.func(*self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """Its bare name."""
        return bare_name(self.func)

    @cached_property
    def operands(self) -> dict[str, Any]:
        """Operands by name, defaults included."""
        arguments = self.func._schema.arguments  # noqa: SLF001 – no public API names them
        defaults = {
            argument.name: argument.default_value for argument in arguments if argument.has_default_value()
        }
        positional = zip((argument.name for argument in arguments), self.args, strict=False)
        return {**defaults, **dict(positional), **self.kwargs}

    def having(self, /, **others: Any) -> Any:
        """Compute the result with some operands replaced; an in-place operation changes a copy of its own."""
        arguments, operands = self.func._schema.arguments, {**self.operands, **others}  # noqa: SLF001
        written = arguments[0].name
        if is_mutable(self.func) and written in others:
            operands[written] = snapshot(operands[written])
        keywords = {argument.name: operands[argument.name] for argument in arguments if argument.kwarg_only}
        return self.func(
            *(operands[argument.name] for argument in arguments if not argument.kwarg_only), **keywords
        )

    def changed(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Compute the result with a function applied to one operand."""
        return self.having(**{name: function(self.operands[name])})

    @property
    def tensors(self) -> Tensors:
        """Operands that are tensors, or lists of one tensor."""
        alone = {
            name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in self.operands.items()
        }
        return {name: x for name, x in alone.items() if isinstance(x, Tensor)}

    @property
    def floats(self) -> Tensors:
        """Floating-point operands."""
        return {name: x for name, x in self.operands.items() if is_float(x)}

    @property
    def optional(self) -> list[str]:
        """Names of the optional floating-point operands that are present."""
        arguments = self.func._schema.arguments  # noqa: SLF001
        return [
            argument.name
            for argument in arguments
            if str(argument.type) == "Optional[Tensor]" and is_float(self.operands[argument.name])
        ]

    @cached_property
    def result(self) -> Any:
        """The result, without in-place changes."""
        if not is_mutable(self.func):
            return self()
        name = self.func._schema.arguments[0].name  # noqa: SLF001
        return self.having(**{name: self.operands[name]})

    def giving(self, value: Tensor) -> Any:
        """Results with the first replaced."""
        return (value, *self.result[1:]) if isinstance(self.result, (tuple, list)) else value


def first(results: Any) -> Any:
    """The first result, or the only one."""
    return results[0] if isinstance(results, (tuple, list)) else results


# A function that computes an operation's result, possibly a wrong one.
Make = Callable[[Operation], Any]


def within(
    mode: TorchDispatchMode, func: HigherOrderOperator, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Any:
    """Run the steps of a higher-order operation, such as flex_attention, within a mode."""
    with mode:
        return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs or {})


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Run ``torch.cond`` as the branch that is taken: its own kernels refuse modes, and eager gradients."""
    kind: Any = type(torch.ops.higher_order.cond)
    original = kind.__call__
    kind.__call__ = lambda _, condition, *branches: branches[not condition](*branches[2])
    try:
        yield
    finally:
        kind.__call__ = original


class Watched(TorchDispatchMode):
    """A mode in which a function computes each operation."""

    supports_higher_order_operators = True

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.numbers = make, count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return within(self, func, args, kwargs)
        return self.make(Operation(func, args, kwargs or {}, next(self.numbers)))


@dataclass(frozen=True)
class OperationBug:
    """A bug in one operation; ``text`` follows "is explained by"."""

    name: str
    text: str
    make: Callable[[], Any] = field(compare=False)
    clause: str = ""


# A function that yields the possible bugs of an operation.
Kinds = Callable[[Operation], Iterator[OperationBug]]


def injected(bug: OperationBug, chosen: Collection[int], kinds: Kinds) -> Make:
    """A function that injects a bug into chosen operations."""

    def make(operation: Operation) -> Any:
        candidates = kinds(operation) if operation.number in chosen else ()
        return next((candidate.make for candidate in candidates if candidate == bug), operation)()

    return make


def sites(run: Callable[[Make], Any], kinds: Kinds) -> Mapping[OperationBug, list[int]]:
    """Each bug's possible operations, by number."""
    numbers_by_bug = defaultdict[OperationBug, list[int]](list)

    def note(operation: Operation) -> Any:
        for bug in kinds(operation):
            numbers_by_bug[bug].append(operation.number)
        return operation()

    run(note)
    return numbers_by_bug
