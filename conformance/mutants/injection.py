"""How the taps of a backend's model are edited in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from concord.backends.interface import Request, Unsupported
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array, FrameworkOperations
from concord.spec.parameters import parameters
from concord.spec.tensors import taps

Tap = Callable[[str, Array], Array]


class Injection:
    """The edits of a change, in one run.

    Compilers that read Python's code would read NumPy's in an edit for their own, and lose what it keeps. So
    they are shown :meth:`step` and :meth:`keep` alone (:meth:`FrameworkOperations.opaque`), which are given
    all tensors that they need.

    Args:
        operations: of the framework.
        change: what is edited.
        request: what is run.
        memory: what edits of earlier runs left for later ones.

    Attributes:
        seen: the taps that were edited.
    """

    def __init__(
        self, operations: FrameworkOperations, change: Change, request: Request, memory: dict[str, Any]
    ) -> None:
        self.operations, self.request = operations, request
        self.edits = {name: edit for name in taps(request.config, request.part) if (edit := change.at(name))}
        self.kinds = {
            name: parameter.kind for name, parameter in parameters(request.config, request.part).items()
        }
        self.seen, self.now = set[str](), dict[str, Array]()
        self.context = Context(
            operations,
            request.config,
            request.batch,
            request.part,
            request.dtype,
            dict[str, Array]().__getitem__,
            self.now,
            memory,
        )
        self.step, self.keep = operations.opaque(self._step), operations.opaque(self._keep)

    def trace(self, model: Any, inputs: Mapping[str, Array], record: Tap) -> Tap:
        """Return the tap that edits what it is given before it is recorded.

        (:data:`concord.backends.interface.Trace`).
        """

        def given() -> dict[str, Array]:
            return {f"inputs.{name}": tensor for name, tensor in inputs.items()} | self.operations.parameters(
                model, self.kinds
            )

        return lambda name, tensor: self.keep(
            name, record(name, self.step(name, tensor, given() if name in self.edits else {}))
        )

    def _step(self, name: str, tensor: Array, given: dict[str, Array]) -> Array:
        if name in self.now:  # another evaluation begins
            self.now.clear()
        if name not in self.edits:
            return tensor
        self.now.update({known: value for known, value in given.items() if known.startswith("inputs.")})
        self.context.tap, self.context.parameters = name, given.__getitem__
        self.seen.add(name)
        return self.operations.instead(self.edits[name](self.context, tensor), tensor)

    def _keep(self, name: str, tensor: Array) -> Array:
        self.now[name] = tensor
        return tensor

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Make sure that a run which is made meanwhile was edited.

        Raises:
            Unsupported: where an edit is of a tap that the model does not compute, or needs one.
        """
        try:
            yield
        except KeyError as error:
            raise Unsupported(
                f"{self.request.implementation!r} does not compute {error}, which the bug needs"
            ) from error
        if self.edits and not self.seen:
            raise Unsupported(f"{self.request.implementation!r} computes none of {', '.join(self.edits)}")
