"""``concord check``: standard cases, or a model of one's own, judged on every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import typer

from concord import options
from concord.backends.worker import TIME_LIMIT
from concord.conformance import check_jobs, dump
from concord.conformance.campaign import Job
from concord.conformance.check import DTYPES, sequence
from concord.conformance.watching import listening
from concord.model import OwnModel
from concord.progress import bars
from concord.running import finish, judged
from concord.spec.errors import collect


@dataclass(frozen=True)
class Checked(options.Runs):
    """Backends that run each case repeatedly.

    Attributes:
        deterministic: Only kernels that give the same bits each time; what has none is
            unsupported.
        repeat: Run each case so often on the same inputs, and say whether the results are the
            same bit for bit.
        time_limit (SECONDS): Seconds that one run may take.
        memory_limit (MIB): MiB that one worker may hold. Default: four fifths of the machine's
            memory.
    """

    deterministic: bool = False
    repeat: int = 1
    time_limit: float = TIME_LIMIT
    memory_limit: float | None = None


@dataclass(frozen=True)
class Selection(options.OptionGroup):
    """Standard cases, and what runs of each.

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
        """Return the standard cases, or those of a model of one's own, as jobs.

        Raises:
            SpecError: for names that are unknown, or a model that cannot be read.
        """
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
        from_dump (DIR): Judge runs that came back as files for cases of 'concord case export'.
    """
    outputs.check()
    if from_dump is not None:
        with bars(["judging"], None) as advance, listening(lambda text: advance("judging", 0, text)):
            found = dump.judge_dumps(from_dump)
        raise typer.Exit(finish(found, outputs, "check", "variant", f"Runs from {from_dump}"))
    settings, names, jobs = collect(workers.settings, workers.names, lambda: cases.jobs(model))
    own = model.checkpoint is not None
    group = "checkpoint" if own else "variant"
    judged(jobs if own else sequence(jobs), names, settings, outputs, group, jobs[0].part)
