"""Backends that say nonsense: of themselves, when they fail, and when they die."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from typing import Any, ClassVar

import numpy as np

from concord.backends.interface import Request, Run
from tests.toys.numpy_backend import NumpyBackend


class DescribesNothing(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        return None  # type: ignore[return-value]


class DescribesAList(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        return [1, 2]  # type: ignore[return-value]


class DescribesWithoutEnd(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(100_000):
            found = {"within": found}
        return found


class DeclaresText(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "deviations": "some"}


class DeclaresNoNumber(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "deviations": [{"name": "softmax_floor", "value": "low", "reason": "none"}],
        }


class SaysWhatCannotBeShown(NumpyBackend):
    def run(self, request: Request) -> Run:
        raise ArithmeticError("lone \ud800 surrogate, [/red] markup, \x1b[31m colour")


class WritesMuchAndRaises(NumpyBackend):
    """Writes more than a parent should hold, and has its last words at the end."""

    def run(self, request: Request) -> Run:
        sys.stderr.write("noise " * (1 << 22))
        raise ArithmeticError("after much noise")


class DiesOfANamelessSignal(NumpyBackend):
    def run(self, request: Request) -> Run:
        os.kill(os.getpid(), signal.SIGRTMIN + 3)
        raise AssertionError("a signal for use in real time ends a process")


class DescribesInDepth(NumpyBackend):
    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = super().describe()
        for _ in range(400):  # as deep as JSON can be written, and too deep for whatever reads it after that
            found = {"within": found}
        return found


class ReturnsATuple(NumpyBackend):
    def run(self, request: Request) -> Run:
        run = super().run(request)
        return run.output, run.loss  # type: ignore[return-value]


class CannotSayWhatIsWrong(NumpyBackend):
    def run(self, request: Request) -> Run:
        class Unspeakable(Exception):
            def __str__(self) -> str:
                raise ValueError("it cannot be said")

        raise Unspeakable


class SaysTheOrder(NumpyBackend):
    """Says in which order its weights came."""

    def run(self, request: Request) -> Run:
        return dataclasses.replace(super().run(request), info={"order": list(request.weights)})


class Grows(NumpyBackend):
    """Keeps more with every run."""

    held: ClassVar[list[Any]] = []

    def run(self, request: Request) -> Run:
        self.held.append(np.ones(1 << 22))  # 32 MiB, touched
        return super().run(request)


class ReturnsNoneByName(NumpyBackend):
    """Right in its output, and None in place of everything that is by name."""

    def run(self, request: Request) -> Run:
        run = super().run(request)
        return dataclasses.replace(
            run, loss=None, taps=None, gradients=None, tap_gradients=None, steps=None, info=None
        )


class ReturnsNoOutput(NumpyBackend):
    def run(self, request: Request) -> Run:
        return dataclasses.replace(super().run(request), output=None)
