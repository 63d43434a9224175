"""``concord case``: cases as files, written, run and made small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import typer

from concord import options, writing
from concord.commands.check import Checked, Selection
from concord.conformance import campaign, dump, reducing, report
from concord.model import OwnModel
from concord.options import Written
from concord.progress import bars
from concord.running import judged
from concord.spec.errors import SpecError, collect
from concord.terminal import Terminal


def export(
    directory: Written,
    *,
    cases: Selection,
    model: OwnModel,
    uncomputed_padding: bool = False,
) -> None:
    """Write standard cases, or a model of your own, as files, to be run anywhere.

    Args:
        directory (DIR): An empty folder; 'concord check --from-dump DIR' judges what comes back.
        uncomputed_padding: For runs that do not compute rows of padding: no loss depends on one.
    """
    writing.check_folder(directory)
    jobs = cases.jobs(model)
    usable = [left for job in jobs if (left := job.independent() if uncomputed_padding else job)]
    written, without = dump.export_cases(directory, usable), ""
    if left_out := len(jobs) - len(usable):
        without = f"; {left_out} left out, since padding decides each sample"
    Terminal().tell(
        f"{len(written)} cases written to {directory}; put run.safetensors beside each case.json{without}"
    )


def run(
    directory: Path,
    *,
    workers: Checked,
    outputs: options.Outputs,
) -> None:
    """Run cases as files on every backend, and judge them.

    Args:
        directory (DIR): A folder of cases that 'concord case export' or 'concord fuzz' wrote.
    """
    outputs.check()
    settings, names, jobs = collect(workers.settings, workers.names, lambda: dump.read_jobs(directory))
    judged(jobs, names, settings, outputs, "group", str(directory))


def reduce(
    case: Path,
    *,
    workers: options.Runs,
    out: Written,
) -> None:
    """Make a failing case small: fewer layers, samples, tokens, heads, while the same thing is wrong.

    Args:
        case (CASE): A folder that 'concord case export' wrote: one case.json, with its tensors.
        out (DIR, -o, --out): An empty folder for the smallest case, written as 'concord case
            export' does.
    """
    writing.check_folder(out)
    settings, backend, jobs = collect(
        workers.settings, lambda: workers.one("it is the one that fails"), lambda: dump.read_jobs(case)
    )
    if len(jobs) > 1:
        raise SpecError(f"{case}: holds {len(jobs)} cases but must hold one: name its folder")

    def tell(tried: int, sizes: Mapping[str, int]) -> None:
        advance(backend, tried, ", ".join(f"{size} {length}" for size, length in sizes.items()))

    with bars([backend], None, "cases") as advance:
        found = reducing.reduce(jobs[0], backend, settings, tell)
    console = Terminal()
    if found.failed:
        sizes = (f"{size} {before} to {found.after[size]}" for size, before in found.before.items())
        console.tell(f"{found.tried} smaller cases were run: {', '.join(sizes)}")
        dump.export_cases(out, [found.job])
        console.tell(f"written: {out / found.job.name}")
    outcome = campaign.Report([found.result], {}, settings)
    report.show(outcome, console, f"{found.job.case} on {backend}", "case")
    raise typer.Exit(outcome.exit_code)
