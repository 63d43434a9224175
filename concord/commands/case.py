"""``concord case``: cases as files, a model of one's own run without a judgement, and failures made small."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from safetensors.numpy import save

from concord import options, writing
from concord.backends.wire import run_arrays
from concord.commands.check import Selection
from concord.conformance import campaign, dump, report
from concord.model import OwnModel
from concord.options import Written
from concord.progress import bars
from concord.running import opened
from concord.spec.batch import from_arrays
from concord.spec.errors import SpecError, collect, refuse, unknowns
from concord.spec.files import write_bytes
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal, figures

ROWS = 32
"""Samples that are computed at once, where nothing but the output is wanted."""

ALL = 2**62
"""More samples than any file has: they are one batch, of one width."""

FORMAT = "concord.run/1"


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
    *,
    workers: options.Runs,
    model: OwnModel,
    out: Written,
    taps: bool = False,
    gradients: bool = False,
    part: str = "model",
    dtype: str = "float32",
) -> None:
    """Run a model of your own on one backend, and write what it computes.

    Args:
        out (-o, --out): Where to write the arrays, as safetensors.
        taps: Write every activation too, as taps/NAME.
        gradients: Write the gradient of the loss for every parameter too, as gradients/NAME.
    """
    writing.check(out)
    whole = taps or gradients
    wrong = {
        "CHECKPOINT is not given: what is to be run?": model.checkpoint is None,
        "neither --texts nor --inputs is given: what is it to be run on?": not (model.texts or model.inputs),
        "--batch is given beside --taps or --gradients: those are of all samples at once": model.batch
        and whole,
    }
    refuse([problem for problem, there in wrong.items() if there])
    settings, backend, *_ = collect(
        workers.settings,
        lambda: workers.one("one framework computes"),
        model.check,
        lambda: refuse(unknowns("dtype", [dtype], PRECISIONS)),
    )
    found = dataclasses.replace(model, batch=ALL).announced(part, gradients)
    (batch,) = found.batches.values()
    given = batch.arrays()
    count = len(given["input_ids"])
    rows = count if whole else model.batch or ROWS
    with opened(backend, settings) as worker, bars([backend], count, "samples") as advance:
        runs = []
        for start in range(0, count, rows):
            some = from_arrays({name: array[start : start + rows] for name, array in given.items()})
            how = (dtype, settings.implementation, settings.execution, taps, gradients, settings.precision)
            runs.append(worker.run(found.config, found.weights, some, found.part, *how))
            advance(backend, min(start + rows, count), "")
    arrays = {f"inputs/{name}": array for name, array in given.items()}
    if len(runs) > 1:
        arrays["output"] = np.concatenate([one.output for one in runs])
    else:
        arrays |= run_arrays(runs[0])
    if not gradients:
        arrays = {name: array for name, array in arrays.items() if name.removeprefix("inputs/") not in LOSS}
    header = {
        "format": FORMAT,
        "checkpoint": str(model.checkpoint),
        "part": found.part,
        "dtype": dtype,
        "backend": backend,
        "info": json.dumps(runs[0].info, sort_keys=True),
    }
    write_bytes(out, save({name: np.asarray(array, order="C") for name, array in arrays.items()}, header))
    Terminal().tell(f"written: {out}: {', '.join(_shown(arrays))}")


LOSS = ("labels", "cotangent", "loss", "taps/loss", "taps/losses")
"""Arrays that the loss alone takes or gives."""


def _shown(arrays: Mapping[str, NDArray[Any]]) -> Iterator[str]:
    """Yield what was written, in words: arrays by name, those of a kind by their number."""
    yield from (f"{name} {array.dtype} {array.shape}" for name, array in arrays.items() if "/" not in name)
    kinds = [name.partition("/")[0] for name in arrays if "/" in name]
    yield from (f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


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
    from concord.conformance import reducing  # draws cases, as few commands do

    writing.check_folder(out)
    settings, backend = collect(workers.settings, lambda: workers.one("it is the one that fails"))
    job = _job(case)

    def tell(tried: int, sizes: Mapping[str, int]) -> None:
        advance(backend, tried, ", ".join(f"{size} {length}" for size, length in sizes.items()))

    with bars([backend], None, "cases") as advance:
        found = reducing.reduce(job, backend, settings, tell)
    console = Terminal()
    if found.failed:
        rows = [[size, str(before), str(found.after[size])] for size, before in found.before.items()]
        figures(
            console,
            ("size", "before", "after"),
            rows,
            (),
            ("size",),
            f"{found.tried} smaller cases were run",
        )
        dump.export_cases(out, [found.job])
        console.tell(f"written: {out / found.job.name}")
    outcome = campaign.Report([found.result], {}, settings)
    report.show(outcome, console, f"{found.job.case} on {backend}", "case")
    raise typer.Exit(outcome.exit_code)


def _job(folder: Path) -> campaign.Job:
    """Return the case of a folder.

    Raises:
        SpecError: if there is none, or it cannot be read.
    """
    if folder.is_dir() and not (folder / "case.json").exists():
        inside = sorted(path.parent.name for path in folder.glob("*/case.json"))
        hint = "'concord case export' writes cases"
        if inside:
            hint = f"it holds cases: name one, for example {folder / inside[0]}"
        raise SpecError(f"{folder}: holds no case.json; {hint}")
    return dump.read_job(folder)
