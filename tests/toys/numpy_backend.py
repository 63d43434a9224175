"""A backend that computes through the reference, and others that go wrong where it is known where.

Nothing here is imported by a test: a test names a class as ``tests.toys.numpy_backend:NAME``, and a worker
process imports it. A class that counts or waits says so in files of the folder that ``TOY_NOTES`` names.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request, Run, Unsupported
from concord.spec.parameters import Weights
from concord.spec.precision import PRECISIONS
from concord.spec.reference import reference
from concord.spec.tape import Node
from concord.spec.tensors import output_name

# The package's attribute of that name is the function.
_reference_module = importlib.import_module("concord.spec.reference")

FRAMEWORKS = ("torch", "tensorflow", "paddle", "jax")


def note(name: str) -> None:
    """Add a line to a file that the test reads."""
    folder = os.environ.get("TOY_NOTES")
    if folder:
        with (Path(folder) / name).open("a") as file:
            file.write(f"{os.getpid()}\n")


class NumpyBackend:
    """Right in every precision."""

    name = "numpy"

    def __init__(self) -> None:
        note("started")

    def describe(self) -> dict[str, Any]:
        return {
            "version": np.__version__,
            "devices": ["cpu"],
            "dtypes": {"cpu": list(PRECISIONS)},
            "threads": int(os.environ.get("OMP_NUM_THREADS", "3")),
        }

    def run(self, request: Request) -> Run:
        if request.device != "cpu":
            raise Unsupported(f"numpy computes on the cpu; {request.device!r} is none")
        note("ran")
        return self.compute(request, request.dtype)

    def compute(self, request: Request, dtype: str) -> Run:
        """Compute a request in a precision, which may not be the one that was asked for."""
        truth = reference(
            request.config, request.weights, request.batch, request.gradients, request.part, dtype, dtype
        )
        taps = truth.taps if request.taps else {}
        return Run(
            truth.output, truth.loss, taps, truth.gradients, self.name, request.dtype, {"device": "cpu"}
        )

    def round_trip(self, request: Request) -> Weights:
        return request.weights


class Revealing(NumpyBackend):
    """Says what it finds in its process."""

    def describe(self) -> dict[str, Any]:
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


# Wrong numbers.


class _WrongScores(_reference_module.Model):  # type: ignore[name-defined, misc]
    """Scales the scores of every layer but the first by one part in a thousand too much."""

    def dot_product(self, name: str, q: Node, k: Node, v: Node, key_mask: Any, query_mask: Any) -> Node:
        wrong = q if name.startswith("layers.0.") else self.a.scale(q, 1.001)
        return super().dot_product(name, wrong, k, v, key_mask, query_mask)


class WrongAfterTheFirstLayer(NumpyBackend):
    """First diverges at ``layers.1.attention.scores``, and agrees where there is only one layer."""

    def __init__(self) -> None:
        super().__init__()
        _reference_module.Model = _WrongScores


class WrongSecondHead(NumpyBackend):
    """One head of the second layer gives each query the weights of the one before, and nothing follows
    from it.
    """

    def run(self, request: Request) -> Run:
        run = super().run(request)
        weights = run.taps["layers.1.attention.weights"].copy()
        weights[:, 1] = np.roll(weights[:, 1], 1, axis=-2)
        return replace(run, taps={**run.taps, "layers.1.attention.weights": weights})


class ChangesItsOutput(NumpyBackend):
    """Computes well and spoils the result; the base of some that do."""

    def change(self, output: NDArray[Any]) -> NDArray[Any]:
        return output

    def run(self, request: Request) -> Run:
        run = super().run(request)
        run.taps[output_name(request.config, request.part)] = run.output = self.change(run.output)
        return run


class ReturnsNaN(ChangesItsOutput):
    def change(self, output: NDArray[Any]) -> NDArray[Any]:
        return np.full_like(output, np.nan)


class ReturnsAWrongShape(ChangesItsOutput):
    def change(self, output: NDArray[Any]) -> NDArray[Any]:
        return output.T


class ReturnsIntegers(ChangesItsOutput):
    def change(self, output: NDArray[Any]) -> NDArray[Any]:
        return output.astype(np.int64)


class ReturnsBfloat16(ChangesItsOutput):
    """Returns numbers of a type that safetensors has and NumPy has not."""

    def change(self, output: NDArray[Any]) -> NDArray[Any]:
        import ml_dtypes

        return output.astype(ml_dtypes.bfloat16)


class ComputesInFloat32(NumpyBackend):
    """Computes in float32 whatever it is asked for, and hides it as well as a cast can."""

    def run(self, request: Request) -> Run:
        run = self.compute(request, "float32")
        storage = PRECISIONS[request.dtype].storage

        def cast(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: array.astype(storage) for name, array in arrays.items()}

        return replace(
            run,
            output=run.output.astype(storage),
            loss=run.loss.astype(storage),
            taps=cast(run.taps),
            gradients=cast(run.gradients),
        )


class ReturnsFloat32(NumpyBackend):
    """Computes in float32 and does not even cast."""

    def run(self, request: Request) -> Run:
        return self.compute(request, "float32")


# Not all of it.


class LeavesOutATap(NumpyBackend):
    def run(self, request: Request) -> Run:
        run = super().run(request)
        del run.taps[next(name for name in run.taps if name.endswith("attention.weights"))]
        return run


class LeavesOutGradients(NumpyBackend):
    def run(self, request: Request) -> Run:
        return replace(super().run(request), gradients={})


class DeclaresNotExposed(NumpyBackend):
    """Says that its attention is fused: scores and weights never exist."""

    def run(self, request: Request) -> Run:
        run = super().run(request)
        hidden = [name for name in run.taps if name.endswith((".scores", ".masked_scores", ".weights"))]
        taps = {name: array for name, array in run.taps.items() if name not in hidden}
        return replace(run, taps=taps, info={"not_exposed": ["*.attention.*scores", "*.attention.weights"]})


class SaysUnsupported(NumpyBackend):
    def run(self, request: Request) -> Run:
        raise Unsupported(f"this toy has no {request.dtype} kernels")


class DeclaresInItsRun(NumpyBackend):
    """Declares with its run, and not before, in what it deviates, as optimizers do."""

    def run(self, request: Request) -> Run:
        return replace(
            super().run(request),
            info={"deviations": [{"name": "softmax_floor", "value": -1e6, "reason": "the toy's own"}]},
        )


class DeclaresNonsense(NumpyBackend):
    """Declares what it has not in a form that none can read."""

    def run(self, request: Request) -> Run:
        return replace(super().run(request), info={"not_exposed": "layers.*"})


# No result at all.


class Raises(NumpyBackend):
    def run(self, request: Request) -> Run:
        raise ArithmeticError("the toy broke\nand has more to say")


class RaisesOnOneSample(NumpyBackend):
    """Raises for a batch of one; every other case is right."""

    def run(self, request: Request) -> Run:
        if len(request.batch.required("labels")) == 1:
            raise ArithmeticError("one sample is too few")
        return super().run(request)


class RaisesWhenDescribed(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        raise OSError("no device answers")


class ReturnsNothing(NumpyBackend):
    def run(self, request: Request) -> Run:
        return None  # type: ignore[return-value]


class Exits(NumpyBackend):
    def run(self, request: Request) -> Run:
        sys.exit("the toy leaves")


class ExitsAtOnce(NumpyBackend):
    def run(self, request: Request) -> Run:
        os._exit(7)


class KillsItself(NumpyBackend):
    def run(self, request: Request) -> Run:
        note("ran")
        print("first words\nlast words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class KillsItselfOnOneSample(KillsItself):
    """Dies of a batch of one; every other case is right."""

    def run(self, request: Request) -> Run:
        if len(request.batch.required("labels")) == 1:
            return super().run(request)
        return NumpyBackend.run(self, request)


class Hangs(NumpyBackend):
    def run(self, request: Request) -> Run:
        print("waiting for a lock", file=sys.stderr, flush=True)
        note("hanging")
        time.sleep(600)
        raise AssertionError


class HangsWhenDescribed(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        note("hanging")
        time.sleep(600)
        raise AssertionError


class FillsMemory(NumpyBackend):
    """Takes memory step by step, at most 4 GiB of it."""

    def run(self, request: Request) -> Run:
        print("allocating", file=sys.stderr, flush=True)
        held = []
        for _ in range(128):
            held.append(np.ones(2**22))  # 32 MiB, touched
            time.sleep(0.01)
        raise AssertionError("nothing stopped it")


class RunsOutOfMemory(NumpyBackend):
    """Asks for more than there is, and gets an exception instead of memory."""

    def run(self, request: Request) -> Run:
        np.ones((2**50,))
        raise AssertionError


class ComputesWithoutEnd(NumpyBackend):
    """Computes in one call of C code, which lets no other thread of its process run."""

    def run(self, request: Request) -> Run:
        note("hanging")
        sum(range(10**15))
        raise AssertionError


class _Forks(NumpyBackend):
    """Starts a process that holds everything its parent has; the base of some that do."""

    def fork(self, daemon: bool = False) -> None:
        ready, told = os.pipe()
        if os.fork() == 0:
            if daemon:
                os.setsid()
            note("hanging")
            os.write(told, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)


class ForksAndHangs(_Forks):
    def run(self, request: Request) -> Run:
        self.fork()
        note("hanging")
        time.sleep(60)
        raise AssertionError


class ForksAndDies(_Forks):
    def run(self, request: Request) -> Run:
        self.fork()
        os._exit(9)


class LeavesADaemonAndDies(_Forks):
    def run(self, request: Request) -> Run:
        self.fork(daemon=True)
        os._exit(9)


class SaysWhatItIsAsked(NumpyBackend):
    """Computes nothing, and says whether gradients by taps are wanted."""

    def run(self, request: Request) -> Run:
        raise Unsupported(f"tap_gradients={request.tap_gradients}")
