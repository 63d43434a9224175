"""How the taps of a backend's model are edited for the duration of one run."""

from __future__ import annotations

import functools
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
    edited = _Edited(operations, request, edits, memory)
    original = operations.modules[0].evaluate

    @functools.wraps(original)  # with the marks that compilers read
    def evaluate(model: Any, loss_function: Any, inputs: Mapping[str, Array], edit: Tap, zeros: Mapping[str, Array]) -> Any:
        def given() -> dict[str, Array]:
            return {f"inputs.{name}": tensor for name, tensor in inputs.items()} | operations.parameters(model, kinds)

        def edited_model(inputs: Mapping[str, Array], tap: Tap) -> Array:
            return model(inputs, tap=edited.around(tap, given))

        def loss(_: Any, output: Array, inputs: Mapping[str, Array], tap: Tap) -> Array:
            result: Array = loss_function(model, output, inputs, edited.around(tap, given))
            return result

        return original(edited_model, loss, inputs, edit, zeros)

    for module in operations.modules:
        module.evaluate = evaluate  # type: ignore[attr-defined]
    try:
        yield
    except KeyError as error:
        raise Unsupported(f"{request.implementation!r} does not compute {error}, which the fault needs") from error
    finally:
        for module in operations.modules:
            module.evaluate = original  # type: ignore[attr-defined]
    if not edited.seen:
        raise Unsupported(f"{request.implementation!r} computes none of {', '.join(edits)}")


class _Edited:
    """The taps of a run, edited.

    Compilers that read Python's code would read NumPy's in an edit for their own, and lose what it keeps. So they are shown
    :meth:`step` and :meth:`keep` alone (:meth:`FrameworkOperations.opaque`), which are given all tensors that they need.

    Attributes:
        seen: the taps that were edited.
    """

    def __init__(self, operations: FrameworkOperations, request: Request, edits: Mapping[str, Edit], memory: dict[str, Any]) -> None:
        self.edits, self.seen, self.now = edits, set[str](), dict[str, Array]()
        self.context = Context(operations, request.config, request.batch, request.part, request.dtype, dict[str, Array]().__getitem__, self.now, memory)
        self.step, self.keep = operations.opaque(self._step), operations.opaque(self._keep)

    def around(self, tap: Tap, given: Callable[[], dict[str, Array]]) -> Tap:
        """Return a tap that edits what it is given before it is recorded.

        Args:
            given: returns parameters by name, and inputs.
        """
        return lambda name, tensor: self.keep(name, tap(name, self.step(name, tensor, given() if name in self.edits else {})))

    def _step(self, name: str, tensor: Array, given: dict[str, Array]) -> Array:
        if name in self.now:  # another evaluation begins
            self.now.clear()
        if name not in self.edits:
            return tensor
        self.now.update({known: value for known, value in given.items() if known.startswith("inputs.")})
        self.context.tap, self.context.parameters = name, given.__getitem__
        self.seen.add(name)
        return self.context.o.instead(self.edits[name](self.context, tensor), tensor)

    def _keep(self, name: str, tensor: Array) -> Array:
        self.now[name] = tensor
        return tensor
