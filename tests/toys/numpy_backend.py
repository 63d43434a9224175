"""A backend that computes through the reference, and others that go wrong where it is known where.

Nothing here is imported by a test: a test names a class as ``tests.toys.numpy_backend:NAME``, and a worker
process imports it. A class that counts or waits says so in files of the folder that ``TOY_NOTES`` names.
"""

import importlib
import importlib.util
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from concord.backends.interface import Run, Unsupported
from concord.spec.precision import PRECISIONS
from concord.spec.reference import reference
from concord.spec.tensors import output_name

# The package's attribute of that name is the function.
_reference_module = importlib.import_module("concord.spec.reference")

FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax")


def note(name):
    """Add a line to a file that the test reads."""
    folder = os.environ.get("TOY_NOTES")
    if folder:
        with (Path(folder) / name).open("a") as file:
            file.write(f"{os.getpid()}\n")


class NumpyBackend:
    """Right in every precision."""

    name = "numpy"

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

    def compute(self, request, dtype):
        """Compute a request in a precision, which may not be the one that was asked for."""
        truth = reference(
            request.config, request.weights, request.batch, request.gradients, request.part, dtype, dtype
        )
        taps = truth.taps if request.taps else {}
        return Run(
            truth.output, truth.loss, taps, truth.gradients, self.name, request.dtype, {"device": "cpu"}
        )

    def round_trip(self, request):
        return request.weights


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


class WrongScores(_reference_module.Model):
    """Scales the scores of every layer but the first by one part in a thousand too much."""

    def dot_product(self, name, q, *given):
        wrong = q if name.startswith("layers.0.") else self.a.scale(q, 1.001)
        return super().dot_product(name, wrong, *given)


class WrongAfterTheFirstLayer(NumpyBackend):
    """First diverges at ``layers.1.attention.scores``, and agrees where there is only one layer."""

    def __init__(self):
        super().__init__()
        _reference_module.Model = WrongScores


def handing(change):
    """Return a backend that computes well, and hands out what a change makes of its run."""
    return type("Handing", (NumpyBackend,), {"run": lambda self, r: change(NumpyBackend.run(self, r), r)})


def doing(act, where=lambda r: True):
    """Return a backend that does something in place of a run, where it is told to."""
    return type(
        "Doing", (NumpyBackend,), {"run": lambda self, r: act(r) if where(r) else NumpyBackend.run(self, r)}
    )


def saying(say):
    """Return a backend that describes itself otherwise."""
    return type("Saying", (NumpyBackend,), {"describe": lambda self: say(NumpyBackend.describe(self))})


def one_sample(request):
    return len(request.batch.required("labels")) == 1


def failing(kind, words):
    def fail(*given):
        raise kind(words)

    return fail


# Wrong numbers.


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


ReturnsNaN = with_output(lambda output: np.full_like(output, np.nan))
ReturnsAWrongShape = with_output(np.transpose)
# Numbers of a type that safetensors has and NumPy has not.
ReturnsBfloat16 = with_output(lambda output: output.astype(importlib.import_module("ml_dtypes").bfloat16))


WrongEverywhere = handing(lambda run, request: every(run, lambda array: array * 1.5 + 1))


def shifted(run, request):
    """Have one head of the second layer give each query the weights of the one before, and no more."""
    name = "layers.1.attention.weights"
    weights = run.taps[name].copy()
    weights[:, 1] = np.roll(weights[:, 1], 1, axis=-2)
    return replace(run, taps={**run.taps, name: weights})


WrongSecondHead = handing(shifted)


class ReturnsFloat32(NumpyBackend):
    """Computes in float32 whatever it is asked for, and does not even cast."""

    def run(self, request):
        return self.compute(request, "float32")


class ComputesInFloat32(ReturnsFloat32):
    """Hides it as well as a cast can."""

    def run(self, request):
        return every(super().run(request), lambda array: array.astype(PRECISIONS[request.dtype].storage))


class _Counts(NumpyBackend):
    """Knows how often it has run."""

    count = 0

    def run(self, request):
        self.count += 1
        return super().run(request)


class WrongNowAndThen(_Counts):
    """Errs every other time, whatever it is asked."""

    def run(self, request):
        run = super().run(request)
        return every(run, lambda array: array + 1) if self.count % 2 else run


class WrongInOtherWays(_Counts):
    """Errs in another tensor each time."""

    def run(self, request):
        run = super().run(request)
        name = list(run.taps)[self.count % len(run.taps)]
        return replace(run, taps={**run.taps, name: run.taps[name] + 1})


# Not all of it.


def without(run, *ends, count=None):
    """Return the taps of a run but for those, or so many of them, whose names end so."""
    hidden = [name for name in run.taps if name.endswith(ends)][:count]
    return {name: array for name, array in run.taps.items() if name not in hidden}


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
SaysUnsupported = doing(
    lambda request: failing(Unsupported, f"this toy has no {request.dtype} kernels")(request)
)
# It declares with its run, and not before, in what it deviates, as optimizers do.
DeclaresInItsRun = handing(
    lambda run, request: replace(
        run, info={"deviations": [{"name": "softmax_floor", "value": -1e6, "reason": "the toy's own"}]}
    )
)
DeclaresNonsense = handing(lambda run, request: replace(run, info={"not_exposed": "layers.*"}))
SaysWhatItIsAsked = doing(
    lambda request: failing(Unsupported, f"tap_gradients={request.tap_gradients}")(request)
)
SaysTheOrder = handing(lambda run, request: replace(run, info={"order": list(request.weights)}))
ReturnsNoneByName = handing(
    lambda run, request: replace(
        run, **dict.fromkeys(("loss", "taps", "gradients", "tap_gradients", "steps", "info"))
    )
)
ReturnsNoOutput = handing(lambda run, request: replace(run, output=None))


# No result at all.


def kills_itself(request):
    note("ran")
    print("first words\nlast words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(*given):
    print("waiting for a lock", file=sys.stderr, flush=True)
    note("hanging")
    time.sleep(600)


def fills_memory(request):
    """Take memory step by step, at most 4 GiB of it."""
    print("allocating", file=sys.stderr, flush=True)
    held = []
    for _ in range(128):
        held.append(np.ones(2**22))  # 32 MiB, touched
        time.sleep(0.01)


def computes_without_end(request):
    """Compute in one call of C code, which lets no other thread of its process run."""
    note("hanging")
    sum(range(10**15))


def writes_much_and_raises(request):
    """Write more than a parent should hold, and have the last words at the end."""
    sys.stderr.write("noise " * (1 << 22))
    raise ArithmeticError("after much noise")


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("it cannot be said")


def fork(then, daemon=False):
    """Return what starts a process that holds everything its parent has, and then goes on."""

    def forks(request):
        ready, told = os.pipe()
        if os.fork() == 0:
            if daemon:
                os.setsid()
            note("hanging")
            os.write(told, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        then()

    return forks


Raises = doing(failing(ArithmeticError, "the toy broke\nand has more to say"))
RaisesOnOneSample = doing(failing(ArithmeticError, "one sample is too few"), one_sample)
RaisesWhenDescribed = saying(failing(OSError, "no device answers"))
SaysWhatCannotBeShown = doing(
    failing(ArithmeticError, "lone \ud800 surrogate, [/red] markup, \x1b[31m colour")
)
CannotSayWhatIsWrong = doing(failing(Unspeakable, ""))
WritesMuchAndRaises = doing(writes_much_and_raises)
ReturnsNothing = doing(lambda request: None)
Exits = doing(failing(SystemExit, "the toy leaves"))
ExitsAtOnce = doing(lambda request: os._exit(7))
KillsItself = doing(kills_itself)
KillsItselfOnOneSample = doing(kills_itself, one_sample)
DiesOfANamelessSignal = doing(lambda request: os.kill(os.getpid(), signal.SIGRTMIN + 3))
Hangs = doing(hangs)
HangsWhenDescribed = saying(hangs)
FillsMemory = doing(fills_memory)
RunsOutOfMemory = doing(lambda request: np.ones((2**50,)))
ComputesWithoutEnd = doing(computes_without_end)
ForksAndHangs = doing(fork(lambda: (note("hanging"), time.sleep(60))))
ForksAndDies = doing(fork(lambda: os._exit(9)))
LeavesADaemonAndDies = doing(fork(lambda: os._exit(9), daemon=True))


class Grows(NumpyBackend):
    """Keeps more with every run."""

    held = []

    def run(self, request):
        self.held.append(np.ones(1 << 22))  # 32 MiB, touched
        return super().run(request)


# What they say of themselves.


def nested(about, depth):
    for _ in range(depth):
        about = {"within": about}
    return about


DescribesNothing = saying(lambda about: None)
DescribesWithoutEnd = saying(lambda about: nested({}, 100_000))
DeclaresNoNumber = saying(
    lambda about: {**about, "deviations": [{"name": "softmax_floor", "value": "low", "reason": "none"}]}
)
