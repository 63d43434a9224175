"""Backends that have a precision besides what is asked for, or results that change from run to run."""

import importlib
from dataclasses import replace

import numpy as np

from concord.backends.interface import Run
from concord.spec.reference import reference
from tests.toys.numpy_backend import NumpyBackend, WrongScores, _reference_module

ARITHMETIC = {"strict": "float32", "tf32": "tf32", "default": "tf32"}


class MultipliesInTf32(NumpyBackend):
    """Right in every precision.

    Unless told otherwise it rounds the factors of float32 products, as frameworks do on a GPU.
    """

    def describe(self):
        return {**super().describe(), "precision_defaults": {"products": {"cpu": "tf32", "cuda": "tf32"}}}

    def run(self, request):
        arithmetic = ARITHMETIC[request.precision] if request.dtype == "float32" else request.dtype
        truth = reference(
            request.config,
            request.weights,
            request.batch,
            request.gradients,
            request.part,
            request.dtype,
            arithmetic,
        )
        info = {
            "precision": request.precision,
            "deterministic": request.deterministic,
            "precision_switches": {"factors": arithmetic, "reductions": "full"},
        }
        return Run(truth.output, truth.loss, truth.taps, truth.gradients, self.name, request.dtype, info)


Plain = NumpyBackend


class WrongInEveryPrecision(MultipliesInTf32):
    """Rounds factors too, and is wrong without."""

    def __init__(self):
        super().__init__()
        _reference_module.Model = WrongScores


class SaysAnotherPrecision(NumpyBackend):
    """Ran in another precision than it was asked for, and does not hide it."""

    def run(self, request):
        return replace(super().run(request), info={"precision": "default"})


class AddsNoise(NumpyBackend):
    """From the second run on a gradient, and for texts of several samples a tap, differ in the last bit."""

    runs = 0

    def run(self, request):
        run = super().run(request)
        AddsNoise.runs += 1
        if AddsNoise.runs > 1:
            several = [run.taps["layers.0.attention.query"]] if len(run.output) > 1 else []
            for array in (run.gradients["classifier.bias"], *several):
                array[...] = np.nextafter(
                    array, np.float32(np.inf) if AddsNoise.runs % 2 else -np.float32(np.inf)
                )
        return run


def __getattr__(name):
    """Return a built-in backend whose switches something sets anew while it builds attention alone.

    A library, say.
    """
    if name not in ("torch", "tf", "paddle", "jax"):
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.backends.{name}.backend")

    class Reset(adapter.Adapter):
        def build(self, request, *given):
            built = super().build(request, *given)
            if request.part == "attention":
                self.set_precision("tf32")
            return built

    return Reset
