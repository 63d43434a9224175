"""``concord case``: cases as files."""

from __future__ import annotations

from pathlib import Path

from concord import options, output_files
from concord.commands.check import Selection, judge_jobs
from concord.conformance.run import dump
from concord.conformance.wording import counted
from concord.options import Written
from concord.own_model import OwnModel
from concord.spec.errors import collect
from concord.terminal import Terminal


def export(
    directory: Written,
    *,
    uncomputed_padding: bool = False,
    cases: Selection,
    model: OwnModel,
) -> None:
    """Write standard cases, or a model of your own, as files to run anywhere.

    Args:
        directory (DIR): An empty folder; 'concord check --from-dump DIR' judges the returned runs.
        uncomputed_padding: Export cases for runs that do not compute padding rows: no loss
            depends on such a row.

    Examples: concord case export cases --variant bert
    """
    output_files.check_folder(directory)
    jobs = cases.jobs(model)
    usable = [usable_job for job in jobs if (usable_job := job.independent() if uncomputed_padding else job)]
    paths, without = dump.export_cases(directory, usable), ""
    if left_out := len(jobs) - len(usable):
        without = f"; {left_out} left out, because every sample in them depends on padding"
    Terminal().tell(
        f"{counted(len(paths), 'case')} written to {directory}; put run.safetensors beside each "
        f"case.json{without}"
    )


def run(
    directory: Path,
    *,
    workers: options.Runs,
    outputs: options.Outputs,
) -> None:
    """Run exported cases on every backend, and judge them.

    Args:
        directory (DIR): A folder that 'concord case export' or 'fuzz' wrote.

    Examples: concord case run cases --backend torch
    """
    outputs.check()
    settings, names, jobs = collect(workers.settings, workers.names, lambda: dump.read_jobs(directory))
    judge_jobs(jobs, names, settings, outputs, "group", str(directory))
