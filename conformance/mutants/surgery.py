"""How a backend's layers are changed for the duration of one run, and put back exactly as they were.

A family of steps rewrites one method or function of the backends once, in terms that all four share; a mutant replaces
single steps of it. The code of the backends is not touched: the attribute that holds the method holds another one while
the run lasts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from conformance.faults.operations import Array, FrameworkOperations

CALL = "call"
"""Stands for the method by which a layer is called: ``forward``, ``call`` or ``__call__``."""


@dataclass(frozen=True)
class Target:
    """What a family of steps replaces.

    Attributes:
        module: of the backend: ``"layers"``, ``"model"``, ``"training"`` or ``"adapter"``.
        owner: the class or the dictionary that holds it; the module itself if empty.
        name: the method, function or key.
    """

    module: str
    owner: str
    name: str


class Steps:
    """A method of a backend as steps that can be replaced; the base of the families.

    Attributes:
        target: what :meth:`run` stands in for.
        o: the operations of the framework.
        original: what stood there.
    """

    target: ClassVar[Target]

    def __init__(self, operations: FrameworkOperations, original: Callable[..., Any]) -> None:
        self.o, self.original = operations, original

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Do what the original does; its arguments are those of the original."""
        return self.original(*arguments, **named)

    def product(self, subscripts: str, a: Array, b: Array) -> Array:
        """Contract two tensors."""
        return self.o.einsum(subscripts, a, b)

    def linear(self, layer: Any, x: Array) -> Array:
        """Apply a linear layer."""
        return layer(x)


@dataclass(frozen=True)
class Patch:
    """A family with some of its steps replaced.

    Attributes:
        changed: steps by name: functions that take the family, then what the step takes.
    """

    family: type[Steps]
    changed: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@contextmanager
def operated(operations: FrameworkOperations, patches: Sequence[Patch]) -> Iterator[None]:
    """Have a backend's layers changed while the block runs; afterwards they are as before, whatever happens in it."""
    with ExitStack() as undo:
        for patch in (*patches, *(operations.companions if patches else ())):
            undo.callback(_install(operations, patch))
        yield


def _install(operations: FrameworkOperations, patch: Patch) -> Callable[[], None]:
    """Put a patch in place, and return what takes it out again."""
    target = patch.family.target
    owner = operations.modules[target.module]
    if target.owner:
        owner = getattr(owner, target.owner)
    name = operations.call if target.name == CALL else target.name
    original = owner[name] if isinstance(owner, dict) else getattr(owner, name)
    family = type(patch.family.__name__, (patch.family,), dict(patch.changed))(operations, original)

    # A function, for a class binds it to the layer; and with the signature of the original, which Keras reads.
    @functools.wraps(original)
    def replacement(*arguments: Any, **named: Any) -> Any:
        return family.run(*arguments, **named)

    if isinstance(owner, dict):
        owner[name] = replacement
        return lambda: owner.update({name: original})
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]
    setattr(owner, name, replacement)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, before)
