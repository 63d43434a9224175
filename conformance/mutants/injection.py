"""Injection of a bug by editing the taps of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from concord.backends.interface import Request, Unsupported
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array
from concord.spec.parameters import parameters
from concord.spec.tensors import taps

Tap = Callable[[str, Array], Array]


class Injection(Context):
    """A run of a model with edits.

    Attributes:
        libraries: namespaces of the framework, searched in order.
    """

    libraries: tuple[Any, ...] = ()
    now: dict[str, Array]

    def __init__(self, change: Change, request: Request, memory: dict[str, Any]) -> None:
        super().__init__(request.config, request.batch, request.part, request.dtype, {}, memory)
        self.request, self.seen = request, set[str]()
        self.edits = {name: edit for name in taps(request.config, request.part) if (edit := change.at(name))}
        # A compiler that traces Python would absorb an edit's NumPy code, and lose the edit's state. It
        # therefore sees only these two calls, with all their tensors.
        self.step, self.keep = self.opaque(self._step), self.opaque(self._keep)

    def __getattr__(self, name: str) -> Any:
        for library in self.libraries:
            if hasattr(library, name):
                return getattr(library, name)
        raise AttributeError(name)

    def opaque(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Hide a function's code from compilers."""
        return function

    @abstractmethod
    def held(self, layer: Any, kind: str) -> Array:
        """A layer's parameter in canonical layout, if any."""

    def submodule(self, owner: Any, name: str) -> Any:
        """Return a submodule by part of its canonical name."""
        return getattr(owner, name)

    def given(self, model: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Available inputs and parameters by canonical name."""
        tensors = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        for name, parameter in parameters(self.config, self.part).items():
            owner = model
            try:
                for word in name.split(".")[:-1]:
                    owner = owner[int(word)] if word.isdigit() else self.submodule(owner, word)
                tensors[name] = self.held(owner, parameter.kind)
            except AttributeError:
                continue
        return tensors

    def trace(self, model: Any, inputs: Mapping[str, Array], record: Tap) -> Tap:
        """A tap that edits before recording."""
        return lambda name, tensor: self.keep(
            name,
            record(name, self.step(name, tensor, self.given(model, inputs) if name in self.edits else {})),
        )

    def _step(self, name: str, tensor: Array, tensors: dict[str, Array]) -> Array:
        if name in self.now:  # a new evaluation begins
            self.now.clear()
        if name not in self.edits:
            return tensor
        self.now.update(tensors)
        self.tap, self.y = name, tensor
        self.seen.add(name)
        return self.with_zero_gradient_to(self.edits[name](self), tensor)

    def _keep(self, name: str, tensor: Array) -> Array:
        self.now[name] = tensor
        return tensor

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Check that the block's run was edited.

        Raises:
            Unsupported: if the model lacks a tap that the edit changes or needs.
        """
        try:
            yield
        except KeyError as error:
            raise Unsupported(
                f"{self.request.implementation!r} does not compute {error}, which the bug needs"
            ) from error
        if self.edits and not self.seen:
            raise Unsupported(f"{self.request.implementation!r} computes none of {', '.join(self.edits)}")
