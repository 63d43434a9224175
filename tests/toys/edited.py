"""The built-in backends with one tap changed: ``tests.toys.edited:NAME``, a class for each of them."""

import dataclasses
import importlib
from typing import Any

from concord.backends import BUILT_IN
from concord.backends.interface import Request, Run


def changed(name: str, tensor: Any) -> Any:
    """Return another tensor, in whichever framework: no norm and no softmax gives the same for both."""
    return (
        tensor * 1.25 if name.endswith("scores") else tensor * tensor + tensor
    )  # masked scores have no square


def __getattr__(name: str) -> type:
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter: Any = importlib.import_module(f"concord.backends.{name}.backend").Adapter

    class Edited(adapter):  # type: ignore[misc]
        """Runs ``edit:TAP:IMPLEMENTATION`` by that implementation, with the tap :func:`changed`."""

        def run(self, request: Request) -> Run:
            _, self.edited, implementation = request.implementation.split(":", 2)
            run: Run = super().run(dataclasses.replace(request, implementation=implementation))
            return run

        def trace(self, request: Request) -> Any:
            def edited(name: str, tensor: Any) -> Any:
                return changed(name, tensor) if name == self.edited else tensor

            return lambda model, inputs, record: lambda name, tensor: record(name, edited(name, tensor))

    return Edited
