"""A backend that has a bug on request: what the plugins of the four frameworks share."""

from __future__ import annotations

import dataclasses

from backends.interface import Request, Run, Unsupported
from conformance.mutants.catalogue import MUTANTS
from conformance.mutants.mutant import Change, steps
from conformance.mutants.operations import Operations
from conformance.mutants.products import EMULATIONS
from conformance.mutants.rewrites import FAMILIES
from conformance.mutants.surgery import operated
from spec.errors import unknown

KINDS: dict[str, dict[str, Change]] = {
    "mutant": {name: mutant.change for name, mutant in MUTANTS.items()},
    "emulate": EMULATIONS,
    "null": {name: steps(family) for name, family in FAMILIES.items()} | {"everything": steps(*FAMILIES.values())},
}
"""What may stand before and after the colon of an implementation's name."""


class Mutating:
    """Stands before a backend's adapter among the bases of a class, and changes what it runs.

    ``mutant:NAME`` has that bug, ``emulate:tf32`` and ``emulate:tf32_cut_off`` compute their products as tensor cores do,
    ``null:FAMILY`` replaces a method by its rewriting with nothing changed; any other implementation runs untouched.
    """

    operations: Operations

    def run(self, request: Request) -> Run:
        """Compute what is asked, with the change that the implementation names.

        Raises:
            UnknownNameError: for a change that does not exist.
            Unsupported: for compiled execution: compilers may do their own rounding, and keep what they compiled.
        """
        kind, colon, name = request.implementation.partition(":")
        if not colon:
            return self._untouched(request)
        if kind not in KINDS:
            raise unknown("kind of implementation", kind, list(KINDS))
        if name not in KINDS[kind]:
            raise unknown(kind, name, list(KINDS[kind]))
        if request.execution != "eager":
            raise Unsupported(f"{request.implementation!r} runs eagerly only")
        change = KINDS[kind][name]
        changed = dataclasses.replace(change.request(request), implementation="explicit")
        with operated(self.operations, change.patches):
            return self._untouched(changed)

    def _untouched(self, request: Request) -> Run:
        run: Run = super().run(request)  # type: ignore[misc]  # of the adapter, the next base
        return run
