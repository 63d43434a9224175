"""How the taps of a backend's model are edited for the duration of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backends.interface import Request, Unsupported
from conformance.faults.context import Context
from conformance.faults.fault import Change
from conformance.faults.operations import Array, FrameworkOperations
from spec.parameters import parameters
from spec.tensors import taps

Tap = Callable[[str, Array], Array]


class Injection:
    """The edits of a change, in one run.

    Args:
        operations: of the framework.
        change: what is edited.
        request: what is run.
        memory: what edits of earlier runs left for later ones.
    """

    def __init__(self, operations: FrameworkOperations, change: Change, request: Request, memory: dict[str, Any]) -> None:
        self.operations, self.request, self.memory = operations, request, memory
        self.edits = {name: edit for name in taps(request.config, request.part) if (edit := change.edit(name))}
        self.kinds = {name: parameter.kind for name, parameter in parameters(request.config, request.part).items()}
        self.seen: set[str] = set()

    def trace(self, model: Any, inputs: Mapping[str, Array], record: Tap) -> Tap:
        """Return the tap that edits what it is given before it is recorded (:data:`backends.interface.Trace`)."""

        def parameter(name: str) -> Array:
            return self.operations.parameter(model, name, self.kinds[name])

        request, now = self.request, {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        context = Context(self.operations, request.config, request.batch, request.part, request.dtype, parameter, now, self.memory)

        def tap(name: str, tensor: Array) -> Array:
            if name in self.edits:
                context.tap = name
                self.seen.add(name)
                tensor = self.edits[name](context, tensor)
            now[name] = record(name, tensor)
            return now[name]

        return tap

    @contextmanager
    def confirmed(self) -> Iterator[None]:
        """Make sure that a run which is made meanwhile was edited.

        Raises:
            Unsupported: where an edit is of a tap that the model does not compute, or needs one.
        """
        try:
            yield
        except KeyError as error:
            raise Unsupported(f"{self.request.implementation!r} does not compute {error}, which the fault needs") from error
        if self.edits and not self.seen:
            raise Unsupported(f"{self.request.implementation!r} computes none of {', '.join(self.edits)}")
