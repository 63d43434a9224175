"""The built-in backends with a disturbance: ``tests.toys.built_in:NAME``.

A prefix of the implementation names the disturbance:
- ``edit:TAP:``: the tap is :func:`changed`.
- ``aside::``: the delivered attention weights are not those used, as with a fused kernel that keeps its own.
- ``reset::``: something, such as a library, resets switches while the model is built.
- ``stepped::``: the session had other weights and inputs before, and took a step with both.
"""

import dataclasses
import importlib

import numpy as np

from concord.backends import BUILT_IN


def changed(name, tensor):
    """A tensor that no softmax or norm maps to the same result."""
    return (
        tensor * 1.25 if name.endswith("scores") else tensor * tensor + tensor
    )  # masked scores may overflow if squared


def __getattr__(name):
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.backends.{name}.backend").Adapter

    class BuiltIn(adapter):
        kind = ""

        def run(self, request):
            self.kind, self.edited, implementation = request.implementation.split(":", 2)
            request = dataclasses.replace(request, implementation=implementation)
            return self.run_stepped(request) if self.kind == "stepped" else super().run(request)

        def build(self, request, *arguments):
            built = super().build(request, *arguments)
            if self.kind == "reset":
                self.set_precision("tf32")
            return built

        def trace(self, request):
            def edited(tap, tensor):
                return changed(tap, tensor) if (self.kind, self.edited) == ("edit", tap) else tensor

            def recording(model, inputs, record):
                def recorded(tap, tensor):
                    goes_on = record(tap, edited(tap, tensor))
                    return tensor if self.kind == "aside" and tap.endswith("attention.weights") else goes_on

                return recorded

            return recording

        def run_stepped(self, request):
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = dataclasses.replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            session = self.session(dataclasses.replace(request, weights=others, batch=batch))
            session.compile()
            session.step()
            session.fill(request.weights)
            session.feed(request.batch)
            session.step()
            logits = session.results()["logits"]
            session.synchronize()
            run = session.read()
            run.output = run.taps["logits"] = logits
            return run

    return BuiltIn
