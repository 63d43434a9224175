"""``concord golden``: backends beside the tensors that the published sources computed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from concord import options
from concord.conformance import published
from concord.running import finish, run
from concord.spec.errors import collect


def golden(
    directory: Path = published.INCLUDED,
    *,
    workers: options.Runs,
    record: options.Outputs,
    forward_only: bool = False,
) -> None:
    """Compare backends with tensors of the published sources.

    Args:
        directory (DIR): A folder of golden files, with subfolders.
    """
    record.check()
    settings, names, (known, notes) = collect(
        workers.settings, workers.names, lambda: published.collect(directory)
    )
    jobs = known
    if forward_only:
        jobs = [dataclasses.replace(job, gradients=False) for job in jobs if job.training is None]
    found = run(jobs, names, settings)
    found.notes.update(notes)
    if left := len(known) - len(jobs):
        found.notes["--forward-only"] = f"{left} runs of training are left out"
    finish(found, record, "golden", "source", f"Golden files of {directory}")
