"""Jobs on backends, and a report of them: what several commands do."""

from __future__ import annotations

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


def run(jobs: Sequence[campaign.Job], names: Sequence[str], settings: campaign.Setup) -> campaign.Report:
    """Run jobs on backends, judge them, and show how far each has come."""
    with counting(list(names), len(repeated(jobs, settings.repeat))) as progress:
        return campaign.conduct(jobs, names, settings, progress)


def judged(
    jobs: Sequence[campaign.Job],
    names: Sequence[str],
    settings: campaign.Setup,
    outputs: Outputs,
    group: str,
    what: str,
    markdown: Path | None = None,
) -> NoReturn:
    """Run and judge jobs, and end the command; see :func:`finish`."""
    how = [what, settings.implementation, settings.execution, settings.device]
    how += [f"precision {settings.precision}"] * (settings.precision != "strict")
    how += ["deterministic"] * settings.deterministic
    title = f"Conformance: {', '.join(how)}"
    finish(run(jobs, names, settings), outputs, "check", group, title, markdown)


def finish(
    found: campaign.Report,
    outputs: Outputs,
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
    found = found.explained()
    put = partial(report.within, markdown, "check") if markdown else str
    table = (markdown, lambda: put(report.markdown(found)))
    raise typer.Exit(
        outputs.finish(found, kind, title, lambda: report.show(found, Terminal(), title, group), table)
    )


@contextmanager
def opened(backend: str, settings: campaign.Setup) -> Iterator[Worker]:
    """Open a worker; that its backend is not there, or cannot, ends the command with exit code 3."""
    try:
        with settings.open(backend) as worker:
            yield worker
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None
