"""``concord case reduce``: a case on which a backend fails, made small."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from concord import backends, options, writing
from concord.conformance import campaign, dump, report
from concord.progress import bars
from concord.spec.errors import SpecError
from concord.terminal import Terminal, figures

if TYPE_CHECKING:
    from concord.conformance.reducing import Reduced


def reduce(
    case: Annotated[
        Path,
        typer.Argument(
            metavar="CASE",
            parser=writing.path,
            help="A folder that 'concord case export' wrote: one case.json, with its tensors.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            parser=writing.output,
            help="An empty folder for the smallest case, written as 'concord case export' does.",
        ),
    ],
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="B",
            autocompletion=options.among(backends.names),
            help="The one that fails: torch, tf, paddle, jax, an installed plugin, or package.module:Class.",
        ),
    ],
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Make a failing case small: fewer layers, samples, tokens and heads, as long as the same thing is wrong."""
    from concord.conformance import reducing  # draws cases, as few commands do

    writing.check_folder(out)
    options.names([backend], python, ssh)
    settings = options.settings(
        [backend],
        device,
        implementation,
        execution,
        python,
        ssh,
        time_limit,
        memory_limit,
        threads,
        precision,
    )
    job = _job(case)
    with bars([backend], None, "cases") as reached:
        found = reducing.reduce(
            job, backend, settings, lambda tried, sizes: reached(backend, tried, _said(sizes))
        )
    console = Terminal()
    if found.failed:
        _show(found, console)
        dump.export_cases(out, [found.job])
        console.print(f"written: {out / found.job.name}", highlight=False, soft_wrap=True)
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
        hint = (
            f"; it holds cases: name one, for example {folder / inside[0]}"
            if inside
            else "; 'concord case export' writes cases"
        )
        raise SpecError(f"{folder}: holds no case.json{hint}")
    request, manifest = dump.read_exported(folder)
    return campaign.Job(
        manifest.group,
        manifest.case,
        request.dtype,
        request.part,
        request.config,
        request.weights,
        request.batch,
        gradients=request.gradients,
    )


def _said(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{size} {length}" for size, length in sizes.items())


def _show(found: Reduced, console: Terminal) -> None:
    """Print how large the case was, and is."""
    rows: list[list[Any]] = [
        [size, str(before), str(found.after[size])] for size, before in found.before.items()
    ]
    figures(
        console, ("size", "before", "after"), rows, (), ("size",), f"{found.tried} smaller cases were run"
    )
