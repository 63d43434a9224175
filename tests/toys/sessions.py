"""The built-in backends as sessions that are loaded, fed and stepped before they are read.

``tests.toys.sessions:NAME_Stepped``, ``NAME_Trained``.
"""

import dataclasses
import importlib

import numpy as np

from concord.backends import BUILT_IN
from concord.spec.parameters import trainable
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training


def __getattr__(name):
    name, _, kind = name.partition("_")
    if name not in BUILT_IN or kind not in ("Stepped", "Trained"):
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.backends.{name}.backend").Adapter

    class Stepped(adapter):
        """Runs in a session that had other weights and inputs, and was stepped with both."""

        def run(self, request):
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = dataclasses.replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            session = super().session(dataclasses.replace(request, weights=others, batch=batch))
            session.compile()
            session.step()
            session.load(request.weights)
            session.feed(request.batch)
            session.forward()
            logits = session.results()["logits"]
            session.synchronize()
            run = session.read()
            run.output = run.taps["logits"] = logits
            return run

    class Trained(adapter):
        """Says what training from the same weights, in a session that was trained before, comes to, twice."""

        def run(self, request):
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = dataclasses.replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            training = Training(Recipe(algorithm="adam", learning_rate=0.01), [])
            session = super().session(
                dataclasses.replace(request, weights=others, batch=batch, training=training)
            )
            session.compile()
            session.step()
            first, second = (states(session, request, batch) for _ in range(2))
            run = super().run(request)
            run.info["unmoved"] = [
                name
                for name in trainable(request.config)
                if (first[f"parameters.{name}"] == request.weights[name]).all()
            ]
            run.info["moments"] = sorted(
                name.partition(".")[0] for name in first if name.endswith("classifier.bias")
            )
            run.info["unlike"] = [name for name, array in first.items() if (array != second[name]).any()]
            return run

    return {"Stepped": Stepped, "Trained": Trained}[kind]


def states(session, request, batch):
    """Return what two steps from the weights of a request, on its batch and another, come to."""
    session.load(request.weights)
    session.feed(request.batch)
    session.step()
    found = {"loss.0": session.results()["loss"]}
    session.feed(batch)
    session.train_step()
    session.synchronize()
    return {
        **found,
        "loss.1": session.results()["loss"],
        **{f"parameters.{name}": array for name, array in session.parameters().items()},
        **session.optimizer_state(),
    }
