"""Softmax and its logarithm as people write them by hand in PyTorch and JAX.

``tests.toys.by_hand:torch`` and ``:jax``, backends that take them by name.
"""

import dataclasses
import importlib
from typing import Any


def each_largest(x):
    """Return the largest entry, whose gradient goes to every one of equal ones as a whole, as that of
    ``paddle.max`` does.
    """
    found = x.detach().amax(-1, keepdim=True)
    return found + ((x - x.detach()) * (x.detach() == found)).sum(-1, keepdim=True)


def torch_maxima():
    return {
        "amax": lambda x: x.amax(-1, keepdim=True),
        "max": lambda x: x.max(-1, keepdim=True).values,
        "each": each_largest,
    }


def jax_maxima():
    return {"max": lambda x: x.max(-1, keepdims=True)}


MAXIMA = {"torch": torch_maxima, "jax": jax_maxima}
"""How each framework is asked for the largest entry of a row, which nobody stops the gradient of."""


def exponential(framework, name, x):
    """Return an elementary function of a tensor."""
    return getattr(importlib.import_module({"torch": "torch", "jax": "jax.numpy"}[framework]), name)(x)


def __getattr__(framework):
    if framework not in MAXIMA:
        raise AttributeError(framework)
    adapter = importlib.import_module(f"concord.backends.{framework}.backend").Adapter

    class ByHand(adapter):
        """Runs the explicit implementation, with softmax and its logarithm written out by the maximum that
        ``by_hand:NAME`` says.
        """

        def run(self, request):
            self.largest = MAXIMA[framework]()[request.implementation.removeprefix("by_hand:")]
            run = super().run(dataclasses.replace(request, implementation="explicit"))
            return run

        def softmax(self, x):
            powers = exponential(framework, "exp", x - self.largest(x))
            return powers / powers.sum(-1)[..., None]

        def log_softmax(self, x):
            shifted = x - self.largest(x)
            return shifted - exponential(
                framework, "log", exponential(framework, "exp", shifted).sum(-1)[..., None]
            )

        def trace(self, request):
            return lambda model, inputs, record: Written(self, record)

    return ByHand


class Written:
    """A tap that puts what was written by hand in place of what the framework computed."""

    def __init__(self, forms, record):
        self.forms, self.record, self.now = forms, record, dict[str, Any]()

    def __call__(self, name, tensor):
        scope, _, step = name.rpartition(".")
        if step == "weights":
            tensor = self.forms.softmax(self.now.get(f"{scope}.masked_scores"))
        if name == "log_probabilities":
            tensor = self.forms.log_softmax(self.now["logits"])
        self.now[name] = self.record(name, tensor)
        return self.now[name]
