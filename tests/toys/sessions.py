"""The built-in backends as sessions that are loaded, fed and stepped before they are read: ``tests.toys.sessions:NAME``."""

import dataclasses
import importlib
from typing import Any

import numpy as np

from concord.backends import BUILT_IN
from concord.backends.interface import Request, Run
from concord.spec.parameters import trainable


def __getattr__(name: str) -> type:
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter: Any = importlib.import_module(f"concord.backends.{name}.adapter").Adapter

    class Stepped(adapter):  # type: ignore[misc]
        """Runs in a session that had other weights and inputs, and was stepped with both."""

        def run(self, request: Request) -> Run:
            others = {name: array * np.asarray(1.5, array.dtype) for name, array in request.weights.items()}
            batch = dataclasses.replace(request.batch, labels=request.batch.required("labels")[::-1].copy())
            session = super().session(dataclasses.replace(request, weights=others, batch=batch))
            session.compile()
            session.step()
            session.load(request.weights)
            session.feed(request.batch)
            session.forward()
            logits = session.results()["logits"]
            if request.gradients:
                session.train_step()
                loss, updated = session.results()["loss"], session.parameters()
                session.load(request.weights)
            session.synchronize()
            run: Run = session.read()
            run.output = run.taps["logits"] = logits
            if request.gradients:
                run.loss = run.taps["loss"] = loss
                run.info["moved"] = {name: float(abs(updated[name] - request.weights[name]).max()) for name in trainable(request.config)}
                run.info["unmoved"] = [name for name, array in session.parameters().items() if (array != request.weights[name]).any()]
            return run

    return Stepped

