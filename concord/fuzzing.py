"""What ``concord fuzz`` does with its options."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from concord import backends, writing
from concord.conformance import campaign, dump
from concord.conformance.fuzz import Findings, Plan, hunt, read_found, summary, write_failures
from concord.conformance.fuzz.cases import PADDINGS, FuzzCase
from concord.conformance.fuzz.findings import FAILED
from concord.ending import halting
from concord.progress import bars
from concord.spec.errors import SpecError, unknowns
from concord.spec.files import obstacle
from concord.spec.precision import PRECISIONS
from concord.spec.tensors import PARTS
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.own import Given

CASES = 100
"""Cases of a hunt unless a number or a time is given."""

ADDRESS = re.compile(r"(\w+://)?(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}")

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
    gradients: bool = True,
) -> Plan:
    """Return the plan that the options describe.

    Args:
        cases, seconds: either may be absent, both: :data:`CASES`.

    Raises:
        SpecError: listing every option that cannot be understood.
    """
    problems = unknowns("dtype", dtypes or [], PRECISIONS) + unknowns("part", parts or [], PARTS)
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
        gradients=gradients,
        until=None if seconds is None else time.time() + seconds,
    )


def check_places(scheduler: str | None, out: Path) -> None:
    """Refuse what is no address of a scheduler, and a folder that cannot be written.

    Raises:
        SpecError: listing every problem.
    """
    problems = []
    if scheduler is not None and not ADDRESS.fullmatch(scheduler):
        problems.append(
            f"--scheduler is {scheduler!r} but must be HOST:PORT or PROTOCOL://HOST:PORT, "
            "for example tcp://host:8786"
        )
    try:
        out.lstat()
        there = out
    except FileNotFoundError:
        there = next(path for path in out.absolute().parents if path.exists())
    except (OSError, ValueError) as error:
        there = None
        problems.append(f"--out {out}: cannot be written: {getattr(error, 'strerror', None) or error}")
    if there is not None and not there.is_dir():
        problems.append(f"--out {out}: cannot be written: {os.strerror(errno.ENOTDIR)}")
    elif there is not None and (problem := obstacle(there / "found.json")):
        problems.append(f"--out {out}: cannot be written: {problem.rpartition(': ')[2]}")
    if problems:
        raise SpecError(problems)


def run(
    chosen: Plan,
    settings: campaign.Settings,
    scheduler: str | None,
    out: Path,
    json: Path | None,
    html: Path | None = None,
) -> Findings:
    """Hunt, print what was found, and write it; a signal ends the hunt, and the command once that is done.

    Raises:
        SpecError: if a scheduler does not answer, or something cannot be written.
    """
    with halting() as stopped:
        chunks = (
            "cases"
            if chosen.chunks is None
            else f"cases, {chosen.chunks} chunk{'' if chosen.chunks == 1 else 's'} of {chosen.chunk}"
        )
        with bars(["cases"], chosen.cases, chunks) as reached:
            findings = hunt(chosen, settings, scheduler, lambda done: reached("cases", done, ""), stopped)
        console = Terminal()
        folders, problems = write_failures(out, findings, settings)
        findings.plan, findings.folders = chosen, {name: str(path) for name, path in folders.items()}
        title = f"Random cases, seed {chosen.seed}, {', '.join(chosen.dtypes)}"
        writing.outcome(
            findings,
            "fuzz",
            title,
            console,
            json,
            html,
            lambda: summary.show(findings, console, settings, folders),
            problems=problems,
        )
    return findings


TOKENS = 37
"""Of a case on weights of one's own, at most."""

SAMPLES = 5

OWN_CASES = 20
"""Cases on weights of one's own, unless a number is given: each takes a step of a real model."""


def on_own_weights(given: Given, seed: int, cases: int | None, plan: Plan, out: Path) -> list[campaign.Job]:
    """Return jobs that run a model of one's own on random ids, each with padding of one kind.

    Args:
        seed: what they follow from.
        cases: how many; by default :data:`OWN_CASES`.
        out: where failures are to be written.

    Raises:
        SpecError: if the checkpoint cannot be read, or the folder holds something.
    """
    from concord.own import load

    writing.check_folder(out)
    own, gradients, dtypes = load(given, gradients=plan.gradients), plan.gradients, list(plan.dtypes)
    config = own.config
    room, flat = (
        config.max_positions - config.position_start,
        config.pooling == "flatten" and own.part == "model",
    )
    jobs = []
    for number in range(cases or OWN_CASES):
        generator = np.random.default_rng([seed, number])
        tokens = config.max_positions if flat else int(generator.integers(1, min(room, TOKENS) + 1))
        case = FuzzCase(
            config=config, part=own.part, dtype=str(generator.choice(dtypes)), batch=int(generator.integers(1, SAMPLES + 1)), tokens=tokens, queries=tokens,
            weights_seed=0, inputs_seed=int(generator.integers(2**31)), profile="generic", scale=1.0, offset=0.0,
            padding=str(generator.choice(list(PADDINGS))), key_mask="none", query_mask=False,
        )  # fmt: skip
        jobs.append(
            campaign.Job(
                own.name,
                f"{own.name}-random-{seed}-{number}",
                case.dtype,
                own.part,
                config,
                own.weights,
                case.inputs(),
                gradients=gradients,
                end_to_end=not gradients,
            )
        )
    return jobs


def write_own_failures(report: campaign.Report, jobs: Sequence[campaign.Job], out: Path) -> None:
    """Write each case that failed as files, as 'concord case export' does.

    Raises:
        SpecError: if they cannot be written.
    """
    failed = {(result.case, result.dtype) for result in report.results if result.status in FAILED}
    chosen = [job for job in jobs if (job.case, job.dtype) in failed]
    if chosen:
        written = dump.export_cases(out, chosen)
        Terminal().print(
            f"{len(written)} cases that failed are written to {out}", highlight=False, soft_wrap=True
        )


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
            SpecError: for one that is not known.
        """
        found = list(dict.fromkeys(about.backend for _, about in self.found))
        backends.check_offered(found, "found.json")
        return found

    def tell(self, report: campaign.Report, console: Console) -> None:
        """Say of each failure whether it is still one."""
        for job, about in self.found:
            again = [
                r
                for r in report.results
                if (r.backend, r.case, r.dtype) == (about.backend, job.case, job.dtype)
            ]
            for result in again:
                still = result.status in FAILED
                same = "still fails" if still else "no longer fails"
                style = "bold red" if still else "green"
                console.print(
                    Text(
                        f"{job.case}: {result.backend} {same}: was {about.status}, is {result.status}",
                        style=style,
                    )
                )
