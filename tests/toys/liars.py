"""Backends that are wrong always, wrong now and then, or wrong in another way each time.

And one that knows one architecture alone.
"""

from __future__ import annotations

from dataclasses import replace

from concord.backends.interface import Request, Run, Unsupported
from tests.toys.numpy_backend import NumpyBackend


class WrongEverywhere(NumpyBackend):
    """Errs in every tensor of every case."""

    def run(self, request: Request) -> Run:
        run = super().run(request)
        taps = {name: array * 1.5 + 1 for name, array in run.taps.items()}
        gradients = {name: array * 1.5 + 1 for name, array in run.gradients.items()}
        return replace(run, output=run.output * 1.5 + 1, taps=taps, gradients=gradients)


class _Counts(NumpyBackend):
    """Knows how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def run(self, request: Request) -> Run:
        self.count += 1
        return super().run(request)


class WrongNowAndThen(_Counts):
    """Errs every other time, whatever it is asked."""

    def run(self, request: Request) -> Run:
        run = super().run(request)
        return (
            replace(run, output=run.output + 1, taps={name: array + 1 for name, array in run.taps.items()})
            if self.count % 2
            else run
        )


class WrongInOtherWays(_Counts):
    """Errs in another tensor each time."""

    def run(self, request: Request) -> Run:
        run = super().run(request)
        name = list(run.taps)[self.count % len(run.taps)]
        return replace(run, taps={**run.taps, name: run.taps[name] + 1})


class RaisesInOtherWays(_Counts):
    """Raises, and says something else each time."""

    def run(self, request: Request) -> Run:
        super().run(request)
        raise ArithmeticError("the toy broke " + "x" * (self.count % 3))


class KnowsOneArchitecture(NumpyBackend):
    """Computes models of one width alone, as a published model does."""

    def run(self, request: Request) -> Run:
        if request.config.d_model != 769:
            raise Unsupported(f"this toy has d_model 769, not {request.config.d_model}")
        return super().run(request)
