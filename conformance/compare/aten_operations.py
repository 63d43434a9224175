"""Operations of ATen as a module calls them, and bugs that some of them have in a run."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def is_float(x: Any) -> TypeGuard[Tensor]:
    """Return whether something is a tensor of floating-point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point()


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

    @functools.cached_property
    def given(self) -> dict[str, Any]:
        """Its operands by name, those by default too."""
        arguments = self.func._schema.arguments  # noqa: SLF001 – nothing else names them
        defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
        positional = zip((one.name for one in arguments), self.args, strict=False)
        return {**defaults, **dict(positional), **self.kwargs}

    def having(self, /, **others: Any) -> Any:
        """Compute it with other operands, given by name."""
        arguments, given = self.func._schema.arguments, {**self.given, **others}  # noqa: SLF001
        keywords = {one.name: given[one.name] for one in arguments if one.kwarg_only}
        return self.func(*(given[one.name] for one in arguments if not one.kwarg_only), **keywords)

    def changed(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Compute it with what a function makes of an operand."""
        return self.having(**{name: function(self.given[name])})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its operands that are tensors, or lists of one, by name."""
        alone = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in self.given.items()}
        return {name: x for name, x in alone.items() if isinstance(x, Tensor)}

    @property
    def floats(self) -> dict[str, Tensor]:
        """Its operands that are tensors of floating-point numbers, by name."""
        return {name: x for name, x in self.given.items() if is_float(x)}

    @property
    def optional(self) -> list[str]:
        """The tensors among its operands that it may lack."""
        arguments = self.func._schema.arguments  # noqa: SLF001
        return [
            one.name
            for one in arguments
            if str(one.type) == "Optional[Tensor]" and is_float(self.given[one.name])
        ]

    @functools.cached_property
    def result(self) -> Any:
        """What it gives; its operands stay as they are, even if it works in place."""
        if not self.func._schema.is_mutable:  # noqa: SLF001
            return self()
        name = self.func._schema.arguments[0].name  # noqa: SLF001
        return self.changed(name, torch.clone)

    def giving(self, value: Tensor) -> Any:
        """Return its results with another first one."""
        return (value, *self.result[1:]) if isinstance(self.result, tuple) else value


def first(results: Any) -> Any:
    """Return the first of several results, or the only one."""
    return results[0] if isinstance(results, tuple) else results


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
        clause: of SPEC.md that it breaks in the family.
    """

    name: str
    text: str
    make: Callable[[], Any] = field(compare=False)
    clause: str = ""


Kinds = Callable[[Operation], Iterator[OperationBug]]
"""Yields the bugs that an operation may have."""


def injected(bug: OperationBug, chosen: Collection[int], kinds: Kinds) -> Make:
    """Return what makes what operations give, with a bug in those with these numbers that can have it."""

    def make(operation: Operation) -> Any:
        own = kinds(operation) if operation.number in chosen else ()
        return next((one.make for one in own if one == bug), operation)()

    return make


def sites(run: Callable[[Make], Any], kinds: Kinds) -> Mapping[OperationBug, list[int]]:
    """Return the numbers of the operations of a run that may have each bug.

    Args:
        run: takes what makes what each operation gives.
    """
    found = defaultdict[OperationBug, list[int]](list)

    def note(operation: Operation) -> Any:
        for bug in kinds(operation):
            found[bug].append(operation.number)
        return operation()

    run(note)
    return found
