"""A backend that computes through the reference, and others that go wrong where it is known where.

Nothing here is imported by a test: a test names a class as ``tests.toys.numpy_backend:NAME``, and a worker
process imports it. A class that counts or waits says so in files of the folder that ``TOY_NOTES`` names.
"""

import importlib
import importlib.util
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from concord.backends.interface import Run, Unsupported
from concord.spec.arithmetic import Arithmetic
from concord.spec.encoder import Model
from concord.spec.precision import PRECISIONS
from concord.spec.reference import compute
from concord.spec.tensors import output_name

FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax")


def note(name):
    """Add a line to a file that the test reads."""
    folder = os.environ.get("TOY_NOTES")
    if folder:
        with (Path(folder) / name).open("a") as file:
            file.write(f"{os.getpid()}\n")


class NumpyBackend:
    """Right in every precision.

    Attributes:
        model: stands in for that of the specification.
    """

    name, model = "numpy", None

    def __init__(self):
        note("started")

    def describe(self):
        return {
            "version": np.__version__,
            "devices": ["cpu"],
            "dtypes": {"cpu": list(PRECISIONS)},
            "threads": int(os.environ.get("OMP_NUM_THREADS", "3")),
        }

    def run(self, request):
        if request.device != "cpu":
            raise Unsupported(f"numpy computes on the cpu; {request.device!r} is none")
        note("ran")
        return self.compute(request, request.dtype)

    def compute(self, request, dtype, arithmetic=None):
        """Compute a request in a precision and an arithmetic, which need not be what was asked for."""
        truth = compute(
            request.config,
            request.weights,
            request.batch,
            Arithmetic(arithmetic or dtype),
            request.gradients,
            request.part,
            dtype,
            model=self.model,
        )
        taps = truth.taps if request.taps else {}
        return Run(
            truth.output, truth.loss, taps, truth.gradients, self.name, request.dtype, {"device": "cpu"}
        )


class Revealing(NumpyBackend):
    """Says what it finds in its process."""

    def describe(self):
        found = {name: importlib.util.find_spec(name) for name in FRAMEWORKS}
        return {
            **super().describe(),
            "pid": os.getpid(),
            "environment": dict(os.environ),
            "path": sys.path,
            "folder": os.getcwd(),
            "modules": sorted(sys.modules),
            "origins": {name: spec.origin if spec else None for name, spec in found.items()},
        }


def handing(change):
    """Return a backend that computes well, and hands out what a change makes of its run."""
    return type("Handing", (NumpyBackend,), {"run": lambda self, r: change(NumpyBackend.run(self, r), r)})


# Wrong numbers.


class WrongScores(Model):
    """Scales the scores of every layer but the first by one part in a thousand too much."""

    def dot_product(self, name, q, *given):
        wrong = q if name.startswith("layers.0.") else self.a.scale(q, 1.001)
        return super().dot_product(name, wrong, *given)


class WrongAfterTheFirstLayer(NumpyBackend):
    """First diverges at ``layers.1.attention.scores``, and agrees where there is only one layer."""

    model = WrongScores


def with_output(change):
    def changed(run, request):
        output = change(run.output)
        return replace(
            run, output=output, taps={**run.taps, output_name(request.config, request.part): output}
        )

    return handing(changed)


def every(run, change):
    """Return a run with every tensor changed."""
    taps, gradients = (
        {name: change(array) for name, array in of.items()} for of in (run.taps, run.gradients)
    )
    return replace(run, output=change(run.output), loss=change(run.loss), taps=taps, gradients=gradients)


def shifted(run, request):
    """Have one head of the second layer give each query the weights of the one before, and no more."""
    name = "layers.1.attention.weights"
    weights = run.taps[name].copy()
    weights[:, 1] = np.roll(weights[:, 1], 1, axis=-2)
    return replace(run, taps={**run.taps, name: weights})


ReturnsNaN = with_output(lambda output: np.full_like(output, np.nan))
ReturnsAWrongShape = with_output(np.transpose)
# Numbers of a type that safetensors has and NumPy has not.
ReturnsBfloat16 = with_output(lambda output: output.astype(importlib.import_module("ml_dtypes").bfloat16))
WrongSecondHead = handing(shifted)


class ComputesInFloat32(NumpyBackend):
    """Computes in float32 whatever it is asked for, and hides it as well as a cast can."""

    def run(self, request):
        run = self.compute(request, "float32")
        return every(run, lambda array: array.astype(PRECISIONS[request.dtype].storage))


# Other precisions than what is asked for.

ARITHMETIC = {"strict": "float32", "tf32": "tf32", "default": "tf32"}


class MultipliesInTf32(NumpyBackend):
    """Right in every precision.

    Unless told otherwise it rounds the factors of float32 products, as frameworks do on a GPU.
    """

    def describe(self):
        return {**super().describe(), "precision_defaults": {"products": {"cpu": "tf32", "cuda": "tf32"}}}

    def run(self, request):
        arithmetic = ARITHMETIC[request.precision] if request.dtype == "float32" else request.dtype
        info = {
            "precision": request.precision,
            "deterministic": request.deterministic,
            "precision_switches": {"factors": arithmetic, "reductions": "full"},
        }
        return replace(self.compute(request, request.dtype, arithmetic), info=info)


class WrongInEveryPrecision(MultipliesInTf32):
    """Rounds factors too, and is wrong without."""

    model = WrongScores


# It ran in another precision than it was asked for, and does not hide it.
SaysAnotherPrecision = handing(lambda run, request: replace(run, info={"precision": "default"}))


# Other results from run to run: what was kept of an earlier one.


def tokens_of(request):
    return request.batch.required("input_ids").shape[1]


def model_of(request):
    """Return what tells models apart: weights too."""
    return (request.config, request.dtype, *(array.tobytes() for array in request.weights.values()))


class Counting(NumpyBackend):
    """Knows how often it has run when it hands out a run."""

    count = 0

    def run(self, request):
        self.count += 1
        return self.changed(super().run(request))


class HangsAtTheThird(Counting):
    """Hands out two runs, and no third one."""

    def changed(self, run):
        if self.count == 3:
            note("hanging")
            time.sleep(100)
        return run


class AddsNoise(Counting):
    """From the second run on a gradient, and for texts of several samples a tap, differ in the last bit."""

    def changed(self, run):
        several = [run.taps["layers.0.attention.query"]] if len(run.output) > 1 else []
        for array in (run.gradients["classifier.bias"], *several) if self.count > 1 else ():
            array[...] = np.nextafter(array, np.float32(np.inf if self.count % 2 else -np.inf))
        return run


class LosesGradients(Counting):
    """Hands out gradients once."""

    def changed(self, run):
        return run if self.count == 1 else replace(run, gradients={})


class AddsGradients(NumpyBackend):
    """Keeps the model of the run before, with its gradients: those of the next run are added to them."""

    kept = ()

    def run(self, request):
        run = super().run(request)
        if self.kept == model_of(request):
            run = replace(
                run, gradients={name: array + self.gradients[name] for name, array in run.gradients.items()}
            )
        self.kept, self.gradients = model_of(request), run.gradients
        return run


class ShiftsAfterALongerText(NumpyBackend):
    """Has a buffer of positions for each configuration that grows with its texts, and reads it from its
    end.
    """

    longest = {}

    def run(self, request):
        key, name = (request.config, request.dtype), "embeddings.position.weight"
        self.longest[key] = max(self.longest.get(key, 0), tokens_of(request))
        table = np.roll(request.weights[name], tokens_of(request) - self.longest[key], axis=0)
        return super().run(replace(request, weights={**request.weights, name: table}))


# Not all of it.


def without(run, *ends, count=None):
    """Return the taps of a run but for those, or so many of them, whose names end so."""
    hidden = [name for name in run.taps if name.endswith(ends)][:count]
    return {name: array for name, array in run.taps.items() if name not in hidden}


def unsupported(words):
    """Return a backend that does not do what it is asked, and says so in words about the request."""

    def refuse(run, request):
        raise Unsupported(words.format(request))

    return handing(refuse)


LeavesOutATap = handing(lambda run, request: replace(run, taps=without(run, "attention.weights", count=1)))
LeavesOutGradients = handing(lambda run, request: replace(run, gradients={}))
# Its attention is fused: scores and weights never exist.
DeclaresNotExposed = handing(
    lambda run, request: replace(
        run,
        taps=without(run, ".scores", ".masked_scores", ".weights"),
        info={"not_exposed": ["*.attention.*scores", "*.attention.weights"]},
    )
)
SaysUnsupported = unsupported("this toy has no {0.dtype} kernels")
SaysWhatItIsAsked = unsupported("tap_gradients={0.tap_gradients}")
SaysTheOrder = handing(lambda run, request: replace(run, info={"order": list(request.weights)}))
ReturnsNoneByName = handing(
    lambda run, request: replace(
        run, **dict.fromkeys(("loss", "taps", "gradients", "tap_gradients", "steps", "info"))
    )
)
ReturnsNoOutput = handing(lambda run, request: replace(run, output=None))
ReturnsNothing = handing(lambda run, request: None)


class Grows(NumpyBackend):
    """Keeps more with every run."""

    held = []

    def run(self, request):
        self.held.append(np.ones(1 << 22))  # 32 MiB, touched
        return super().run(request)
