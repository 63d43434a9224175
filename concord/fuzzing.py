"""What ``concord fuzz`` does with its options."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from concord import backends
from concord.backends.machine import wrong_host
from concord.conformance import campaign, record
from concord.conformance.fuzz import Findings, Plan, hunt, places, read_found, summary, write_failures
from concord.conformance.fuzz.findings import FAILED
from concord.progress import bars
from concord.spec.errors import SpecError, unknown
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import PARTS

CASES = 100
"""Cases of a hunt unless a number or a time is given."""

MOST_SHAPES = 10_000
"""Tuples of sizes that cases may share: they are all drawn before the first case."""


def plan(
    names: Sequence[str],
    seed: int,
    cases: int | None,
    seconds: float | None,
    dtypes: Sequence[str] | None,
    parts: Sequence[str] | None,
    shapes: int,
    end_to_end: bool,
    stop_first: bool,
) -> Plan:
    """Return the plan that the options describe.

    Args:
        cases, seconds: either may be absent, both: :data:`CASES`.

    Raises:
        SpecError: listing every option that cannot be understood.
    """
    problems = [str(unknown("dtype", name, list(PRECISIONS))) for name in dtypes or [] if name not in PRECISIONS]
    problems += [str(unknown("part", name, list(PARTS))) for name in parts or [] if name not in PARTS]
    for option, value, least in (("--seed", seed, 0), ("--cases", cases, 1), ("--shapes", shapes, 0)):
        if value is not None and value < least:
            problems.append(f"{option} is {value} but must be at least {least}")
    if shapes > MOST_SHAPES:
        problems.append(f"--shapes is {shapes} but must be at most {MOST_SHAPES}")
    if seconds is not None and not (seconds > 0 and math.isfinite(seconds)):
        problems.append(f"--time is {seconds:g} but must be finite and above 0")
    if problems:
        raise SpecError(problems)
    return Plan(
        names=tuple(names),
        seed=seed,
        cases=CASES if cases is None and seconds is None else cases,
        dtypes=tuple(dtypes or ("float32",)),
        parts=tuple(parts or PARTS),
        shapes=shapes,
        end_to_end=end_to_end,
        stop_first=stop_first,
        until=None if seconds is None else time.time() + seconds,
    )


def check_places(sets: int | None, hosts: Sequence[str] | None, scheduler: str | None, out: Path) -> None:
    """Refuse places that exclude each other, and a folder that cannot be written.

    Raises:
        SpecError: listing every problem.
    """
    least = 0 if hosts else 1
    problems = [f"--sets is {sets} but must be at least {least}"] if sets is not None and sets < least else []
    problems += [f"--host: {wrong}" for host in hosts or [] if (wrong := wrong_host(host))]
    if scheduler is not None and (sets is not None or hosts):
        problems.append("--scheduler takes the place of --sets and --host; give either")
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    reason = errno.ENOTDIR if not there.is_dir() else errno.EACCES if not os.access(there, os.W_OK) else None
    if reason:
        problems.append(f"--out {out}: cannot be written: {os.strerror(reason)}")
    if problems:
        raise SpecError(problems)


def run(
    chosen: Plan, settings: campaign.Settings, sets: int | None, hosts: Sequence[str] | None, scheduler: str | None, out: Path, json: Path | None
) -> Findings:
    """Hunt, print what was found, and write it.

    Raises:
        SpecError: if a scheduler does not answer, or something cannot be written.
    """
    where = places(settings, chosen.names, 1 if sets is None else sets, hosts or (), scheduler)
    chunks = "cases" if chosen.chunks is None else f"cases, {chosen.chunks} chunk{'' if chosen.chunks == 1 else 's'} of {chosen.chunk}"
    with bars([place.name for place in where], chosen.cases, chunks) as reached:
        findings = hunt(chosen, where, lambda name, done: reached(name, done, ""))
    console = Console()
    folders = write_failures(out, findings, settings)
    summary.show(findings, console, settings, folders)
    if json is not None:
        record.write(json, {**findings.as_dict(), "plan": _described(chosen), "folders": {name: str(path) for name, path in folders.items()}})
        console.print(f"written: {json}", highlight=False)
    return findings


def _described(chosen: Plan) -> dict[str, object]:
    fields = ("names", "seed", "cases", "dtypes", "parts", "shapes", "chunk", "end_to_end", "stop_first")
    return {name: getattr(chosen, name) for name in fields}


class Replay:
    """Failures that were found before.

    Args:
        folder: of one or of many.

    Raises:
        SpecError: if there is none, or a file is corrupt.
    """

    def __init__(self, folder: Path) -> None:
        self.found = read_found(folder)

    @property
    def jobs(self) -> list[campaign.Job]:
        """What is to be run again."""
        return [job for job, _ in self.found]

    @property
    def backends(self) -> list[str]:
        """The backends that failed.

        Raises:
            SpecError: for one that is not known: a file does not say what code is imported.
        """
        found = list(dict.fromkeys(str(about["backend"]) for _, about in self.found))
        strange = [name for name in found if name not in backends.names()]
        if strange:
            raise SpecError([f"found.json names backend {name!r}, which is not known here; to have it imported, say --backend {name}" for name in strange])
        return found

    def tell(self, report: campaign.Report, console: Console) -> None:
        """Say of each failure whether it is still one."""
        for job, about in self.found:
            again = [r for r in report.results if (r.backend, r.case, r.dtype) == (about["backend"], job.case, job.dtype)]
            for result in again:
                still = result.status in FAILED
                same = "still fails" if still else "no longer fails"
                style = "bold red" if still else "green"
                console.print(Text(f"{job.case}: {result.backend} {same}: was {about['status']}, is {result.status}", style=style))
