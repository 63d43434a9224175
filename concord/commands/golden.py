"""``concord golden``: compare backends with tensors of the published sources."""

from __future__ import annotations

from pathlib import Path

from concord import options
from concord.commands.check import judge_jobs
from concord.spec.errors import collect, optional


def golden(
    directory: Path | None = None,
    *,
    workers: options.Runs,
    outputs: options.Outputs,
) -> None:
    """Compare backends with tensors of the published sources.

    Args:
        directory (DIR): A folder of golden files, with subfolders. Default: the golden files that
            come with Concord.

    Examples: concord golden --backend jax
    """
    with optional("concord golden", "all"):
        from concord.conformance.golden import golden_files

    outputs.check()
    directory = directory or golden_files.INCLUDED
    settings, names, (jobs, notes) = collect(
        workers.settings, workers.names, lambda: golden_files.collect(directory)
    )
    title = f"Golden files of {directory}"
    judge_jobs(jobs, names, settings, outputs, "source", title, kind="golden", notes=notes)
