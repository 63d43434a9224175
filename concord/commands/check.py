"""``concord check``: standard cases, or a model of one's own, judged on every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from concord import options
from concord.conformance import check_jobs, dump
from concord.conformance.campaign import Job
from concord.conformance.check import DTYPES, QUICK, sequence
from concord.conformance.watching import listening
from concord.model import OwnModel
from concord.options import Written
from concord.progress import bars
from concord.running import finish, run
from concord.spec.errors import SpecError, collect


@dataclass(frozen=True)
class Checked(options.Spread):
    """Backends that run each case repeatedly.

    Attributes:
        deterministic: Only kernels that give the same bits each time; what has none is
            unsupported.
        repeat: Run each case so often on the same inputs, and say whether the results are the
            same bit for bit.
    """

    deterministic: bool = False
    repeat: int = 1


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

    def jobs(self, model: OwnModel, dtypes: list[str] | None = None) -> list[Job]:
        """Return the standard cases, or those of a model of one's own, as jobs.

        Raises:
            SpecError: for names that are unknown, or a model that cannot be read.
        """
        dtypes = options.once(self.dtype) or dtypes or list(DTYPES)
        if model.check(variant=self.variant, case=self.case):
            return model.jobs(self.part, dtypes, not self.forward_only)
        jobs = check_jobs(options.once(self.variant), dtypes, self.part, self.case)
        return [dataclasses.replace(job, gradients=not self.forward_only) for job in jobs]


def check(
    *,
    workers: Checked,
    cases: Selection,
    model: OwnModel,
    record: options.Outputs,
    quick: bool = False,
    from_cases: Path | None = None,
    from_dump: Path | None = None,
    markdown: Written | None = None,
) -> None:
    """Judge every backend on standard cases, or on a model of your own.

    Args:
        quick: Only float32, unless --dtype says otherwise: half the time; float64 shows what this
            does not.
        from_cases (DIR): Run cases instead that 'concord case export' or 'concord fuzz' wrote.
        from_dump (DIR): Judge runs that came back as files for cases of 'concord case export'.
    """
    record.check(markdown=markdown, markers="check")
    if from_dump is not None:
        with bars(["judging"], None) as advance, listening(lambda text: advance("judging", 0, text)):
            judged = dump.judge_dumps(from_dump)
        finish(judged, record, "check", "variant", f"Runs from {from_dump}", markdown)
    if from_cases is not None and (model.checkpoint or quick or cases != Selection()):
        raise SpecError("--from-cases is given beside other cases, whose place it takes; leave one out")
    settings, names, jobs = collect(
        workers.settings,
        workers.names,
        lambda: (
            dump.read_jobs(from_cases) if from_cases else cases.jobs(model, list(QUICK) if quick else None)
        ),
    )
    own = model.checkpoint is not None
    found = run(jobs if own or from_cases else sequence(jobs), names, settings)
    devices = settings.devices or [settings.device]
    how = [str(from_cases or jobs[0].part), settings.implementation, settings.execution, *devices]
    how += [f"precision {settings.precision}"] * (settings.precision != "strict")
    how += ["deterministic"] * settings.deterministic
    group = "checkpoint" if own else "group" if from_cases else "variant"
    finish(found, record, "check", group, f"Conformance: {', '.join(how)}", markdown)
