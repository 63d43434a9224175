"""``concord fuzz``: random cases on every backend."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from concord import options, spec
from concord.exit_codes import halting
from concord.options import Written
from concord.output_files import check_folder
from concord.spec.errors import collect, optional, refuse, unknowns
from concord.terminal import Terminal, bars

CASES = 100  # by default

# Maximum number of size tuples, which are all generated before the first case.
MOST_SHAPES = 10_000


@dataclass(frozen=True)
class Fuzzed(options.Runs):
    """Backends with one thread each, since cases are small.

    Attributes:
        threads: Threads of each worker.
    """

    threads: int | None = 1


@dataclass(frozen=True)
class Drawn(options.OptionGroup):
    """Options for drawing random cases.

    Attributes:
        cases: Number of cases to run. Default: {CASES}; with --time: no limit.
        seconds (SECONDS, --time): Stop after this many seconds.
        part (P): A part of the model; may be repeated. Default: all parts; about half of the
            cases run model.
        dtype (D): {values}; may be repeated.
        shapes: Number of size tuples that the cases share.
    """

    panel = "Cases"

    cases: int | None = None
    seed: int = 0
    seconds: float | None = None
    dtype: list[str] | None = None
    part: list[str] | None = None
    shapes: int = 12

    def plan(self) -> Any:
        """The plan that the options describe, without backends."""
        from concord.conformance.fuzz.plan import Plan

        dtypes, parts, seconds = self.dtype or ["float32"], self.part or spec.PARTS, self.seconds
        problems = unknowns("dtype", dtypes, spec.PRECISIONS) + unknowns("part", parts, spec.PARTS)
        problems += options.outside(
            ("seed", self.seed, 0, math.inf),
            ("cases", self.cases, 1, math.inf),
            ("shapes", self.shapes, 1, MOST_SHAPES),
            ("time", seconds, 0, options.MOST_SECONDS),
        )
        refuse(problems)
        return Plan(
            names=(),
            seed=self.seed,
            cases=CASES if self.cases is None and seconds is None else self.cases,
            dtypes=tuple(dtypes),
            parts=tuple(parts),
            shapes=self.shapes,
            until=None if seconds is None else time.time() + seconds,
        )


def fuzz(
    *,
    scheduler: str | None = None,
    out: Written = Path("concord-fuzz"),
    drawn: Drawn,
    workers: Fuzzed,
    outputs: options.Outputs,
) -> None:
    """Run random cases on every backend.

    Args:
        scheduler (ADDRESS): Run on a Dask cluster; for example tcp://host:8786.
        out (DIR): The folder for cases that fail.

    Examples: concord fuzz --cases 50 --backend torch --dtype float64
    """
    with optional("concord fuzz", "fuzz"):
        from concord.conformance.fuzz import summary
        from concord.conformance.fuzz.hunt import hunt

    outputs.check()
    settings, names, plan, _ = collect(
        workers.settings, workers.names, drawn.plan, lambda: check_folder(out, empty=False)
    )
    plan = replace(plan, names=tuple(names))
    # The first signal ends the hunt; the command then shows and writes its findings.
    with halting() as stopped:
        with bars(["cases"], plan.cases) as advance:
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
