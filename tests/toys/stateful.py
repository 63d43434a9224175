"""Backends that are right in a first run, and carry something wrong into a later one."""

from dataclasses import replace

import numpy as np

from tests.toys.numpy_backend import NumpyBackend, _reference_module

POSITIONS = "embeddings.position.weight"


def tokens_of(request):
    return request.batch.required("input_ids").shape[1]


def model_of(request):
    """Return what tells models apart: weights too."""
    return (request.config, request.dtype, *(array.tobytes() for array in request.weights.values()))


class AddsGradients(NumpyBackend):
    """Keeps the model of the run before, with its gradients: those of the next run are added to them."""

    model = ()

    def run(self, request):
        run = super().run(request)
        if self.model == model_of(request):
            run = replace(
                run, gradients={name: array + self.gradients[name] for name, array in run.gradients.items()}
            )
        self.model, self.gradients = model_of(request), run.gradients
        return run


class KeepsItsMask(NumpyBackend):
    """Makes a mask for each model and shape, once."""

    def run(self, request):
        kept = self.__dict__.setdefault("masks", {}).setdefault((model_of(request), tokens_of(request)), {})

        class Masked(_reference_module.Model):
            def dot_product(self, name, q, k, v, key_mask, query_mask):
                return super().dot_product(name, q, k, v, *kept.setdefault(name, (key_mask, query_mask)))

        right, _reference_module.Model = _reference_module.Model, Masked
        try:
            return super().run(request)
        finally:
            _reference_module.Model = right


class ShiftsAfterALongerText(NumpyBackend):
    """Has a buffer of positions for each configuration that grows with its texts, and reads it from its
    end.
    """

    def run(self, request):
        longest = self.__dict__.setdefault("longest", {})
        key = (request.config, request.dtype)
        longest[key] = max(longest.get(key, 0), tokens_of(request))
        table = np.roll(request.weights[POSITIONS], tokens_of(request) - longest[key], axis=0)
        return super().run(replace(request, weights={**request.weights, POSITIONS: table}))


class FailsAgain(NumpyBackend):
    """Cannot run the same inputs twice."""

    def run(self, request):
        seen = self.__dict__.setdefault("seen", set())
        inputs = (model_of(request), request.batch.required("input_ids").tobytes())
        if inputs in seen:
            raise ArithmeticError("it has been here")
        seen.add(inputs)
        return super().run(request)


class LosesGradients(NumpyBackend):
    """Hands out gradients once."""

    def run(self, request):
        run = super().run(request)
        self.__dict__.setdefault("given", []).append(run)
        return run if len(self.given) == 1 else replace(run, gradients={})
