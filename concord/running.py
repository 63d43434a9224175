"""Jobs on backends, and a report of them: what several commands do."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import typer

from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker
from concord.conformance import campaign, report
from concord.conformance.campaign import repeated
from concord.options import Outputs
from concord.progress import counting
from concord.terminal import Terminal, complain

STARTED = time.perf_counter()


def run(jobs: Sequence[campaign.Job], names: Sequence[str], settings: campaign.Setup) -> campaign.Report:
    """Run jobs on backends, judge them, and show how far each has come."""
    with counting(list(settings.places(names)), len(repeated(jobs, settings.repeat))) as progress:
        return campaign.conduct(jobs, names, settings, progress)


def judged(
    jobs: Sequence[campaign.Job],
    names: Sequence[str],
    settings: campaign.Setup,
    record: Outputs,
    group: str,
    what: str,
    markdown: Path | None = None,
) -> NoReturn:
    """Run and judge jobs, and end the command; see :func:`finish`."""
    devices = settings.devices or [settings.device]
    how = [what, settings.implementation, settings.execution, *devices]
    how += [f"precision {settings.precision}"] * (settings.precision != "strict")
    how += ["deterministic"] * settings.deterministic
    finish(run(jobs, names, settings), record, "check", group, f"Conformance: {', '.join(how)}", markdown)


def finish(
    found: campaign.Report,
    record: Outputs,
    kind: str,
    group: str,
    title: str,
    markdown: Path | None = None,
) -> NoReturn:
    """Write a report, show it, and leave with its exit code.

    Args:
        group: what a line of the table stands for.
        markdown: a file that gets the table between its markers.
    """
    console, found = Terminal(), found.explained()
    put = partial(report.within, markdown, "check") if markdown else str
    record.finish(
        found,
        kind,
        title,
        lambda: report.show(found, console, title, group),
        markdown=(markdown, lambda: put(report.markdown(found))),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    console.tell(
        f"{time.perf_counter() - STARTED:.0f} s in all, imports included; "
        f"this process held at most {peak:.0f} MiB"
    )
    raise typer.Exit(found.exit_code)


@contextmanager
def opened(backend: str, settings: campaign.Setup) -> Iterator[Worker]:
    """Open a worker; that its backend is not there, or cannot, ends the command with exit code 3."""
    try:
        with settings.open(backend) as worker:
            yield worker
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None
