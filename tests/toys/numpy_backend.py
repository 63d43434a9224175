"""A right backend on the reference, and others with a known bug.

Tests name a class as ``tests.toys.numpy_backend:NAME``, which a worker imports. Classes that count or wait
write notes into the folder that ``TOY_NOTES`` names.
"""

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
    folder = os.environ.get("TOY_NOTES")
    if folder:
        with (Path(folder) / name).open("a") as file:
            file.write(f"{os.getpid()}\n")


class NumpyBackend:
    """Right in every precision; a `model` replaces that of the specification."""

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
        """Compute in this precision, whatever the request says."""
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
    def describe(self):
        specs = {name: importlib.util.find_spec(name) for name in FRAMEWORKS}
        return {
            **super().describe(),
            "pid": os.getpid(),
            "environment": dict(os.environ),
            "path": sys.path,
            "folder": os.getcwd(),
            "modules": sorted(sys.modules),
            "origins": {name: spec.origin if spec else None for name, spec in specs.items()},
        }


def handing(change):
    """A right backend that returns `change(run, request)`."""
    return type("Handing", (NumpyBackend,), {"run": lambda self, r: change(NumpyBackend.run(self, r), r)})


# Wrong numbers.


class WrongScores(Model):
    """Scales scores by 1.001 in every layer but the first."""

    def dot_product(self, name, q, *arguments):
        wrong = q if name.startswith("layers.0.") else self.a.scale(q, 1.001)
        return super().dot_product(name, wrong, *arguments)


class WrongAfterTheFirstLayer(NumpyBackend):
    """First diverges at ``layers.1.attention.scores``, if there are two layers."""

    model = WrongScores


def with_output(change):
    def changed(run, request):
        output = change(run.output)
        return replace(
            run, output=output, taps={**run.taps, output_name(request.config, request.part): output}
        )

    return handing(changed)


def every(run, change):
    taps, gradients = (
        {name: change(array) for name, array in of.items()} for of in (run.taps, run.gradients)
    )
    return replace(run, output=change(run.output), loss=change(run.loss), taps=taps, gradients=gradients)


def shifted(run, request):
    # In one head of the second layer, each query gets the weights of the query before it.
    name = "layers.1.attention.weights"
    weights = run.taps[name].copy()
    weights[:, 1] = np.roll(weights[:, 1], 1, axis=-2)
    return replace(run, taps={**run.taps, name: weights})


ReturnsNaN = with_output(lambda output: np.full_like(output, np.nan))
ReturnsAWrongShape = with_output(np.transpose)
WrongSecondHead = handing(shifted)


class ComputesInFloat32(NumpyBackend):
    """Computes in float32 whatever is requested, and hides it by a cast."""

    def run(self, request):
        run = self.compute(request, "float32")
        return every(run, lambda array: array.astype(PRECISIONS[request.dtype].storage))


# Other precisions than requested.

ARITHMETIC = {"strict": "float32", "tf32": "tf32", "default": "tf32"}


class MultipliesInTf32(NumpyBackend):
    """Right, but by default float32 products round their factors, as on a GPU."""

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
    """Rounds its factors too, and is wrong even without that."""

    model = WrongScores


# It ran in another precision than requested, and says so.
SaysAnotherPrecision = handing(lambda run, request: replace(run, info={"precision": "default"}))


# Results that vary from run to run, because something was kept from an earlier one.


def tokens_of(request):
    return request.batch.required("input_ids").shape[1]


def model_of(request):
    # Weights tell models apart too.
    return (request.config, request.dtype, *(array.tobytes() for array in request.weights.values()))


class Counting(NumpyBackend):
    count = 0

    def run(self, request):
        self.count += 1
        return self.changed(super().run(request))


class HangsAtTheThird(Counting):
    def changed(self, run):
        if self.count == 3:
            note("hanging")
            time.sleep(100)
        return run


class AddsNoise(Counting):
    """From the second run on, a gradient and, in batches of several samples, a tap differ in the last bit."""

    def changed(self, run):
        several = [run.taps["layers.0.attention.query"]] if len(run.output) > 1 else []
        for array in (run.gradients["classifier.bias"], *several) if self.count > 1 else ():
            array[...] = np.nextafter(array, np.float32(np.inf if self.count % 2 else -np.inf))
        return run


class LosesGradients(Counting):
    def changed(self, run):
        return run if self.count == 1 else replace(run, gradients={})


class AddsGradients(NumpyBackend):
    """Keeps the model of the last run with its gradients, and adds those of the next run to them."""

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
    """Its buffer of positions grows with the longest text, and is read from its end."""

    longest = {}

    def run(self, request):
        key, name = (request.config, request.dtype), "embeddings.position.weight"
        self.longest[key] = max(self.longest.get(key, 0), tokens_of(request))
        table = np.roll(request.weights[name], tokens_of(request) - self.longest[key], axis=0)
        return super().run(replace(request, weights={**request.weights, name: table}))


# Missing results.


def without(run, *ends, count=None):
    # All taps but those, or the first `count` of those, with such an end.
    hidden = [name for name in run.taps if name.endswith(ends)][:count]
    return {name: array for name, array in run.taps.items() if name not in hidden}


def unsupported(words):
    # `words` may quote the request.
    def refuse(run, request):
        raise Unsupported(words.format(request))

    return handing(refuse)


LeavesOutATap = handing(lambda run, request: replace(run, taps=without(run, "attention.weights", count=1)))
LeavesOutGradients = handing(lambda run, request: replace(run, gradients={}))
# Attention is fused, so scores and weights do not exist.
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


class Grows(NumpyBackend):
    """Uses more memory in each run."""

    held = []

    def run(self, request):
        self.held.append(np.ones(1 << 22))  # 32 MiB, touched
        return super().run(request)
