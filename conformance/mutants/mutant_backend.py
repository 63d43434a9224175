"""The base class of the plugins: a backend with a bug on request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from concord.backends.interface import IMPLEMENTATIONS, Request, Run, Trace, TrainingSession
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.catalogue import BUGS, TRAINING
from concord.conformance.bugs.rounding import EMULATIONS
from concord.conformance.mutants.injection import Injection
from concord.conformance.mutants.mutant_trainer import MutatedTrainer
from concord.spec.errors import unknown

# Changes by the parts of an implementation's name before and after the colon.
CHANGES: dict[str, dict[str, Change]] = {
    "mutant": {name: mutant.change for name, mutant in BUGS.items()},
    "emulate": EMULATIONS,
}


class Mutating:
    """A mixin that precedes a backend's adapter and changes its runs.

    ``mutant:NAME`` injects a bug into the explicit implementation, ``mutant:NAME@library`` into another.
    ``emulate:tf32`` and ``emulate:tf32_cut_off`` compute products like tensor cores.
    """

    context: type[Injection]
    injection: Injection | None = None
    running: str = ""
    memory: dict[str, Any]

    def run(self, request: Request) -> Run:
        """Run a request with the change named by its implementation.

        Raises:
            Unsupported: if the model lacks a tap that the change needs.
        """
        kind, colon, name = request.implementation.partition(":")
        name, _, implementation = name.partition("@")
        if not colon or kind in IMPLEMENTATIONS:
            return self._untouched(request)
        if kind not in CHANGES:
            raise unknown("kind of implementation", kind, list(CHANGES))
        if name not in CHANGES[kind]:
            raise unknown(kind, name, list(CHANGES[kind]))
        change = CHANGES[kind][name]
        mutated = replace(request, implementation=implementation or "explicit")
        if request.implementation != self.running:
            self.running, self.memory = request.implementation, {}
        self.injection = self.context(change, mutated, self.memory)
        try:
            with self.injection.confirmed():
                return self._untouched(mutated)
        finally:
            self.injection = None

    def train(self, request: Request) -> TrainingSession:
        """Open a training session, possibly with a bug."""
        _, colon, name = request.implementation.partition(":")
        if colon and name not in TRAINING:
            raise unknown("bug of training", name, list(TRAINING))
        if colon:
            change = TRAINING[name].change
            request = replace(request, implementation="explicit")
            self.trainer = partial(MutatedTrainer, change=change, rounding=self.context(change, request, {}))
        try:
            # Defined by the adapter, the next base class.
            session: TrainingSession = super().train(request)  # type: ignore[misc]
        finally:
            self.__dict__.pop("trainer", None)
        return session

    def trace(self, request: Request) -> Trace:
        """The injection's trace, if any."""
        traced: Trace = super().trace(request)  # type: ignore[misc]  # defined by the adapter
        return self.injection.trace if self.injection else traced

    def _untouched(self, request: Request) -> Run:
        run: Run = super().run(request)  # type: ignore[misc]  # defined by the adapter
        return run
