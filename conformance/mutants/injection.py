"""How the taps of a backend's model are edited for the duration of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backends.interface import Request, Unsupported
from conformance.faults.context import Context, Edit
from conformance.faults.fault import Change
from conformance.faults.operations import Array, FrameworkOperations
from spec.parameters import parameters
from spec.tensors import taps

Tap = Callable[[str, Array], Array]


@contextmanager
def injected(operations: FrameworkOperations, change: Change, request: Request, memory: dict[str, Any]) -> Iterator[None]:
    """Have taps edited while the block runs.

    A backend evaluates its model and its loss with one function, ``evaluate(model, loss, inputs, …)``, in eager and compiled
    execution alike; both take the tap that records. Edits stand between them and that tap, so that the model goes on with
    what an edit returns, and that is what is recorded.

    Raises:
        Unsupported: where an edit is of a tap that the model does not compute, or needs one.
    """
    if not change.edits:
        yield
        return
    edits = {name: edit for name in taps(request.config, request.part) if (edit := change.edit(name))}
    kinds = {name: parameter.kind for name, parameter in parameters(request.config, request.part).items()}
    original = operations.modules[0].evaluate
    seen: set[str] = set()

    def evaluate(model: Any, loss_function: Any, inputs: Mapping[str, Array], *more: Any) -> Any:
        def parameter(name: str) -> Array:
            return operations.parameter(model, name, kinds[name])

        now = {f"inputs.{name}": tensor for name, tensor in inputs.items()}
        context = Context(operations, request.config, request.batch, request.part, request.dtype, parameter, now, memory)
        edited = _Edited(model, context, edits, seen)
        return original(edited, edited.around(loss_function), inputs, *more)

    for module in operations.modules:
        module.evaluate = evaluate  # type: ignore[attr-defined]
    try:
        yield
    except KeyError as error:
        raise Unsupported(f"{request.implementation!r} does not compute {error}, which the fault needs") from error
    finally:
        for module in operations.modules:
            module.evaluate = original  # type: ignore[attr-defined]
    if not seen:
        raise Unsupported(f"{request.implementation!r} computes none of {', '.join(edits)}")


class _Edited:
    """A model whose taps are edited."""

    def __init__(self, model: Any, context: Context, edits: Mapping[str, Edit], seen: set[str]) -> None:
        self.model, self.context, self.edits, self.seen = model, context, edits, seen

    def __call__(self, inputs: Mapping[str, Array], tap: Tap) -> Array:
        return self.model(inputs, tap=self.edited(tap))

    def around(self, loss_function: Any) -> Any:
        """Return a loss that takes the model itself."""
        return lambda model, output, inputs, tap: loss_function(self.model, output, inputs, self.edited(tap))

    def edited(self, tap: Tap) -> Tap:
        """Return a tap that edits what it is given before it is recorded."""

        def change(name: str, tensor: Array) -> Array:
            if name in self.edits:
                self.context.tap = name
                self.seen.add(name)
                tensor = self.context.o.instead(self.edits[name](self.context, tensor), tensor)
            tensor = tap(name, tensor)
            self.context.now[name] = tensor  # type: ignore[index]
            return tensor

        return change
