"""A backend that has a bug on request: what the plugins of the four frameworks share."""

from __future__ import annotations

import dataclasses
from typing import Any

from backends.interface import IMPLEMENTATIONS, Request, Run, Trace, Unsupported
from conformance.faults.catalogue import FAULTS
from conformance.faults.fault import Change, steps
from conformance.faults.operations import FrameworkOperations
from conformance.mutants.injection import Injection
from conformance.mutants.products import EMULATIONS
from conformance.mutants.rewrites import FAMILIES
from conformance.mutants.surgery import operated
from conformance.variations.edits import EDITS
from spec.errors import unknown

KINDS: dict[str, dict[str, Change]] = {
    "mutant": {name: mutant.change for name, mutant in FAULTS.items()},
    "variation": EDITS,
    "emulate": EMULATIONS,
    "null": {name: steps(family) for name, family in FAMILIES.items()} | {"everything": steps(*FAMILIES.values())},
}
"""What may stand before and after the colon of an implementation's name."""


class Mutating:
    """Stands before a backend's adapter among the bases of a class, and changes what it runs.

    ``mutant:NAME`` has that bug in the explicit implementation, ``mutant:NAME@library`` in another; ``emulate:tf32`` and ``emulate:tf32_cut_off`` compute their products as tensor cores do,
    ``variation:NAME`` computes a step in another way that is right, ``null:FAMILY`` replaces a method by its rewriting with nothing
    changed; any other implementation runs untouched.
    """

    operations: FrameworkOperations
    injection: Injection | None = None
    running: str = ""
    memory: dict[str, Any]

    def run(self, request: Request) -> Run:
        """Compute what is asked, with the change that the implementation names.

        Raises:
            UnknownNameError: for a change that does not exist.
            Unsupported: for compiled execution of a fault that replaces a method: compilers keep what they compiled; and where the
                implementation does not compute a tap that the fault edits.
        """
        kind, colon, name = request.implementation.partition(":")
        name, _, implementation = name.partition("@")
        if kind not in KINDS and kind in IMPLEMENTATIONS:
            return self._untouched(request)
        if not colon:
            return self._untouched(request)
        if kind not in KINDS:
            raise unknown("kind of implementation", kind, list(KINDS))
        if name not in KINDS[kind]:
            raise unknown(kind, name, list(KINDS[kind]))
        change = KINDS[kind][name]
        if request.execution != "eager" and change.patches:
            raise Unsupported(f"{request.implementation!r} runs eagerly only")
        changed = dataclasses.replace(change.request(request), implementation=implementation or "explicit")
        if request.implementation != self.running:
            self.running, self.memory = request.implementation, {}
        self.injection = Injection(self.operations, change, changed, self.memory)
        try:
            with operated(self.operations, change.patches), self.injection.confirmed():
                return self._untouched(changed)
        finally:
            self.injection = None

    def trace(self, request: Request) -> Trace:
        """Return what edits taps (:meth:`backends.adapter.FrameworkAdapter.trace`)."""
        traced: Trace = super().trace(request)  # type: ignore[misc]  # of the adapter, the next base
        return self.injection.trace if self.injection else traced

    def _untouched(self, request: Request) -> Run:
        run: Run = super().run(request)  # type: ignore[misc]  # of the adapter, the next base
        return run
