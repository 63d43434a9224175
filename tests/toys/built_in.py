"""The built-in backends with changes on request: ``tests.toys.built_in:NAME``.

They have the mutants' plug-ins and, as ``alternative:NAME``, the allowed alternatives. A prefix of the
implementation names another disturbance:
- ``edit TAP::``: the tap is :func:`changed`.
- ``aside::``: the delivered attention weights are not those used, as with a fused kernel that keeps its own.
- ``reset::``: something, such as a library, resets switches while the model is built.
- ``stepped::``: the session had other weights and inputs before, and took a step with both.
"""

import importlib
from dataclasses import replace

import numpy as np

from concord.backends import BUILT_IN
from concord.conformance.mutants.mutant_backend import CHANGES
from tests.toys.alternatives import ALTERNATIVES

CHANGES["alternative"] = {name: entry.change for name, entry in ALTERNATIVES.items() if entry.change.edit}


def changed(name, tensor):
    """A tensor that no softmax or norm maps to the same result."""
    return (
        tensor * 1.25 if name.endswith("scores") else tensor * tensor + tensor
    )  # masked scores may overflow if squared


def __getattr__(name):
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.conformance.mutants.plugins.{name}").Mutated

    class BuiltIn(adapter):
        disturbance = ""

        def run(self, request):
            self.disturbance, _, implementation = request.implementation.rpartition("::")
            request = replace(request, implementation=implementation)
            try:
                return self.run_stepped(request) if self.disturbance == "stepped" else super().run(request)
            finally:
                self.disturbance = ""

        def build(self, request, *arguments):
            built = super().build(request, *arguments)
            if self.disturbance == "reset":
                self.set_precision("tf32")
            return built

        def trace(self, request):
            disturbance, usual = self.disturbance, super().trace(request)

            def recording(model, inputs, record):
                def recorded(tap, tensor):
                    goes_on = record(tap, changed(tap, tensor) if disturbance == f"edit {tap}" else tensor)
                    return tensor if disturbance == "aside" and tap.endswith("attention.weights") else goes_on

                return recorded

            return recording if disturbance else usual

        def run_stepped(self, request):
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            session = self.session(replace(request, weights=others, batch=batch))
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
