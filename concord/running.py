"""Jobs on backends, and a report of them: what several commands do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer

from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker
from concord.conformance import campaign, report
from concord.conformance.campaign import repeated
from concord.ending import halting
from concord.options import Outputs
from concord.progress import counting
from concord.terminal import Terminal, complain


def judged(
    jobs: Sequence[campaign.Job],
    names: Sequence[str],
    settings: campaign.Setup,
    outputs: Outputs,
    group: str,
    what: str,
    kind: str = "check",
    notes: Mapping[str, str] | None = None,
) -> NoReturn:
    """Run and judge jobs, show how far each backend has come, and end the command; see :func:`finish`.

    A signal ends the command once what was judged until then is written and shown.
    """
    how = [what, settings.implementation, settings.execution, settings.device]
    how += [f"precision {settings.precision}"] * (settings.precision != "strict")
    how += ["deterministic"] * settings.deterministic
    with halting() as stopped:
        with counting(list(names), len(repeated(jobs, settings.repeat))) as progress:
            report = campaign.conduct(jobs, names, settings, progress, stopped)
        report.notes.update(notes or {})
        code = report.exit_code
        if report.results or not stopped():
            title = what if kind == "golden" else f"Conformance: {', '.join(how)}"
            code = finish(report, outputs, kind, group, title)
    raise typer.Exit(code)


def finish(
    found: campaign.Report,
    outputs: Outputs,
    kind: str,
    group: str,
    title: str,
) -> int:
    """Write a report, show it, and return its exit code.

    Args:
        group: what a line of the table stands for.
    """
    found = found.explained()
    return outputs.finish(found, kind, title, lambda: report.show(found, Terminal(), title, group))


@contextmanager
def opened(backend: str, settings: campaign.Setup) -> Iterator[Worker]:
    """Open a worker; that its backend is not there, or cannot, ends the command with exit code 3."""
    try:
        with settings.open(backend) as worker:
            yield worker
    except (WorkerFailure, Unsupported) as error:
        complain(f"{backend}: {error}")
        raise typer.Exit(3) from None
