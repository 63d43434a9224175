"""Backends that say nonsense: of themselves, when they fail, and when they die."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

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
        return {**super().describe(), "deviations": [{"name": "softmax_floor", "value": "low", "reason": "none"}]}


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
