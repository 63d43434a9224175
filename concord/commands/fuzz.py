"""``concord fuzz``: random cases on every backend."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from concord import backends, options, spec
from concord.ending import halting
from concord.options import Written
from concord.progress import bars
from concord.spec.errors import SpecError, collect, optional, refuse, unknowns
from concord.terminal import Terminal
from concord.writing import check_folder

CASES = 100
"""Cases of a hunt unless a number or a time is given."""

ADDRESS = re.compile(r"(\w+://)?(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}")

MOST_SHAPES = 10_000
"""Tuples of sizes that cases may share: they are all drawn before the first case."""


@dataclass(frozen=True)
class Fuzzed(options.Runs):
    """Backends of one thread each: cases are small.

    Attributes:
        threads: Threads of each worker.
    """

    threads: int | None = 1


@dataclass(frozen=True)
class Drawn(options.OptionGroup):
    """Which cases are drawn.

    Attributes:
        cases: How many. Default: {CASES}; with --time: no limit.
        seconds (SECONDS, --time): Stop after this time.
        part (P): A part of the model; may be repeated. Default: all, mostly model.
        dtype (D): {values}; may be repeated.
        shapes: How many tuples of sizes the cases share.
    """

    panel = "Cases"

    cases: int | None = None
    seed: int = 0
    seconds: float | None = None
    dtype: list[str] | None = None
    part: list[str] | None = None
    shapes: int = 12
    forward_only: bool = False

    def plan(self, names: Sequence[str]) -> Any:
        """Return the plan that the options describe.

        Raises:
            SpecError: listing every option that cannot be understood.
        """
        from concord.conformance.fuzz.plan import Plan

        dtypes, parts, seconds = options.once(self.dtype), options.once(self.part), self.seconds
        problems = unknowns("dtype", dtypes or (), spec.PRECISIONS)
        problems += unknowns("part", parts or (), spec.PARTS)
        problems += options.outside(
            ("seed", self.seed, 0, math.inf),
            ("cases", self.cases, 1, math.inf),
            ("shapes", self.shapes, 1, MOST_SHAPES),
            ("time", seconds, 0, options.MOST_SECONDS),
        )
        refuse(problems)
        return Plan(
            names=tuple(names),
            seed=self.seed,
            cases=CASES if self.cases is None and seconds is None else self.cases,
            dtypes=tuple(dtypes or ("float32",)),
            parts=tuple(parts or spec.PARTS),
            shapes=self.shapes,
            gradients=not self.forward_only,
            until=None if seconds is None else time.time() + seconds,
        )


def fuzz(
    *,
    workers: Fuzzed,
    drawn: Drawn,
    outputs: options.Outputs,
    scheduler: str | None = None,
    out: Written = Path("concord-fuzz"),
) -> None:
    """Run random cases on every backend.

    Args:
        scheduler (ADDRESS): Run on a Dask cluster instead, for example tcp://host:8786.
        out (DIR): The folder of the failures.
    """
    with optional("concord fuzz", "fuzz"):
        from concord.conformance.fuzz import summary
        from concord.conformance.fuzz.hunting import hunt

    outputs.check()
    settings, _, plan, _, _ = collect(
        workers.settings,
        workers.names,
        lambda: drawn.plan(options.once(workers.backend) or backends.names()),
        lambda: _check_address(scheduler),
        lambda: check_folder(out, empty=False),
    )
    # A signal ends the hunt, and the command once what was found is shown and written.
    with halting() as stopped:
        with bars(["cases"], plan.cases, "cases") as advance:
            findings = hunt(plan, settings, scheduler, lambda done: advance("cases", done, ""), stopped)
        problems = summary.write_failures(out, findings, settings)
        code = outputs.finish(
            findings,
            "fuzz",
            f"Random cases, seed {plan.seed}, {', '.join(plan.dtypes)}",
            lambda: summary.show(findings, Terminal(), settings),
            problems=problems,
        )
    raise typer.Exit(code)


def _check_address(scheduler: str | None) -> None:
    """Refuse what is no address of a scheduler."""
    if scheduler is not None and not ADDRESS.fullmatch(scheduler):
        raise SpecError(
            f"--scheduler is {scheduler!r} but must be HOST:PORT or PROTOCOL://HOST:PORT, "
            "for example tcp://host:8786"
        )
