"""``concord check``: judge every backend on standard cases, or on the user's model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from concord import options
from concord.backends.worker import TIME_LIMIT
from concord.conformance import check_jobs
from concord.conformance.progress import listening
from concord.conformance.run import dump
from concord.conformance.run.campaign import Job, Setup, conduct, repeated
from concord.conformance.run.standard_jobs import DTYPES, sequence
from concord.exit_codes import halting
from concord.own_model import OwnModel
from concord.spec.errors import collect
from concord.terminal import bars, counting


@dataclass(frozen=True)
class Checked(options.Runs):
    """Backends that may run each case repeatedly.

    Attributes:
        deterministic: Use only kernels that give the same bits each time; a case without such
            kernels is unsupported.
        repeat: Run each case this many times on the same inputs, and say whether the results are
            the same bit for bit.
        time_limit (SECONDS): Seconds that one run may take.
        memory_limit (MIB): MiB of memory that one worker may use. Default: four fifths of the
            machine's memory.
    """

    deterministic: bool = False
    repeat: int = 1
    time_limit: float = TIME_LIMIT
    memory_limit: float | None = None


@dataclass(frozen=True)
class Selection(options.OptionGroup):
    """A selection of standard cases, and of the parts that run.

    Attributes:
        dtype (D): {values}; may be repeated.
    """

    panel = "Cases"

    variant: list[str] | None = None
    case: list[str] | None = None
    dtype: list[str] | None = None
    part: str = "model"
    forward_only: bool = False

    def jobs(self, model: OwnModel) -> list[Job]:
        """Jobs of standard cases, or of the user's model."""
        dtypes = self.dtype or list(DTYPES)
        if model.check(variant=self.variant, case=self.case):
            return model.jobs(self.part, dtypes, not self.forward_only)
        jobs = check_jobs(self.variant, dtypes, self.part, self.case)
        return [dataclasses.replace(job, gradients=not self.forward_only) for job in jobs]


def check(
    *,
    from_dump: Path | None = None,
    cases: Selection,
    model: OwnModel,
    workers: Checked,
    outputs: options.Outputs,
) -> None:
    """Judge every backend on standard cases, or on a model of your own.

    Args:
        from_dump (DIR): Judge runs in files; the folder holds the cases that 'concord case export' wrote.

    Examples: concord check --backend torch --backend jax ·
        concord check all-MiniLM-L6-v2 --texts texts.txt
    """
    outputs.check()
    if from_dump is not None:
        with bars(["judging"], None) as advance, listening(lambda text: advance("judging", 0, text)):
            report = dump.judge_dumps(from_dump)
        raise typer.Exit(outputs.show_report(report, "check", f"Runs from {from_dump}", "variant"))
    settings, names, jobs = collect(workers.settings, workers.names, lambda: cases.jobs(model))
    own = model.checkpoint is not None
    group = "checkpoint" if own else "variant"
    judge_jobs(jobs if own else sequence(jobs), names, settings, outputs, group, jobs[0].part)


def judge_jobs(
    jobs: Sequence[Job],
    names: Sequence[str],
    settings: Setup,
    outputs: options.Outputs,
    group: str,
    what: str,
    kind: str = "check",
    notes: Mapping[str, str] | None = None,
) -> NoReturn:
    """Run and judge jobs, show each backend's progress, and end the command."""
    how = [what, settings.implementation, settings.execution, settings.device]
    how += [f"precision {settings.precision}"] * (settings.precision != "strict")
    how += ["deterministic"] * settings.deterministic
    # The first signal ends the command after the verdicts so far have been written and shown.
    with halting() as stopped:
        with counting(names, len(repeated(jobs, settings.repeat))) as progress:
            report = conduct(jobs, names, settings, progress, stopped)
        report.notes.update(notes or {})
        code = report.exit_code
        if report.results or not stopped():
            title = what if kind == "golden" else f"Conformance: {', '.join(how)}"
            code = outputs.show_report(report, kind, title, group)
    raise typer.Exit(code)
