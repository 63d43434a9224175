"""The built-in backends with something done to them: ``tests.toys.built_in:NAME``, a class for each of them.

What, stands before the implementation: ``edit:TAP:…`` (a tap is :func:`changed`), ``aside::…`` (weights are
delivered with which the model does not go on, as beside a fused kernel that keeps its own), ``reset::…``
(something, a library say, sets switches anew while a model is built), ``stepped::…`` and ``trained::…`` (a
session had other weights and inputs, and was stepped with both).
"""

import dataclasses
import importlib

import numpy as np

from concord.backends import BUILT_IN
from concord.spec.parameters import trainable
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training


def changed(name, tensor):
    """Return another tensor, in whichever framework: no norm and no softmax gives the same for both."""
    return (
        tensor * 1.25 if name.endswith("scores") else tensor * tensor + tensor
    )  # masked scores have no square


def states(session, request, batch):
    """Return what two steps from the weights of a request, on its batch and another, come to."""
    session.trainer.load({f"parameters.{name}": array for name, array in request.weights.items()}, 0)
    session.feed(request.batch)
    session.step()
    found = {"loss.0": session.results()["loss"]}
    session.feed(batch)
    session.step()
    session.synchronize()
    return {
        **found,
        "loss.1": session.results()["loss"],
        **session.state(),
    }


def __getattr__(name):
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.backends.{name}.backend").Adapter

    class BuiltIn(adapter):
        kind = ""

        def run(self, request):
            self.kind, self.edited, implementation = request.implementation.split(":", 2)
            request = dataclasses.replace(request, implementation=implementation)
            how = {"stepped": self.run_stepped, "trained": self.run_trained}
            return how.get(self.kind, super().run)(request)

        def build(self, request, *given):
            built = super().build(request, *given)
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

        def used_session(self, request, **fields):
            """Return a session that had other weights and inputs, and was stepped, and the other inputs."""
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = dataclasses.replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            session = self.session(dataclasses.replace(request, weights=others, batch=batch, **fields))
            session.compile()
            session.step()
            return session, batch

        def run_stepped(self, request):
            session, _ = self.used_session(request)
            session.fill(request.weights)
            session.feed(request.batch)
            session.step()
            logits = session.results()["logits"]
            session.synchronize()
            run = session.read()
            run.output = run.taps["logits"] = logits
            return run

        def run_trained(self, request):
            """Say what training from the same weights comes to, twice."""
            training = Training(Recipe(algorithm="adam", learning_rate=0.01), [])
            session, batch = self.used_session(request, training=training)
            first, second = (states(session, request, batch) for _ in range(2))
            # How else it would run is not asked.
            run = super().run(dataclasses.replace(request, execution="eager"))
            run.info["execution"] = request.execution
            moments = {name.partition(".")[0] for name in first if name.endswith("classifier.bias")}
            unmoved = [
                name
                for name in trainable(request.config)
                if (first[f"parameters.{name}"] == request.weights[name]).all()
            ]
            unlike = [name for name, array in first.items() if (array != second[name]).any()]
            run.info |= {"unmoved": unmoved, "moments": sorted(moments), "unlike": unlike}
            return run

    return BuiltIn
