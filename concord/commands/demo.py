"""``concord demo``: plant a bug in one framework, and show the verdict that names it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import typer

from concord import backends, output_files
from concord.backends.wire import WorkerFailure
from concord.backends.worker import Worker
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.judging.verdict import Result, divergence_lines, verdict_lines
from concord.conformance.mutants.matrix import plugin
from concord.conformance.run import record
from concord.conformance.run.campaign import Report, Setup, environment_of
from concord.conformance.run.standard_jobs import job_of
from concord.options import Written
from concord.spec.cases import build_case
from concord.spec.errors import refuse, unknowns
from concord.terminal import Terminal, complain

# A common bug that is hardly visible in the output.
PLANTED = BUGS["gelu_tanh_for_erf"]

NEXT = (
    "next, with your own model:",
    "  concord compare my_package.model:build port.onnx    a PyTorch model compared with any port",
    "  concord check --backend my_package.model:Backend    your own backend on the standard cases",
    "  concord port SRC -o DST --to FORMAT                 a checkpoint for another framework",
)


def demo(
    *,
    backend: str | None = None,
    html: Written = Path("concord-demo.html"),
) -> None:
    """Plant a bug in one framework, and see it found and named.

    Args:
        backend (B): torch, tf, paddle or jax. Default: the first that is installed.
        html: Where to write the page.

    Examples: concord demo --backend jax
    """
    output_files.check(html)
    names, console = [backend] if backend else list(backends.BUILT_IN), Terminal()
    refuse(unknowns("backend", names, backends.BUILT_IN))
    case = build_case(PLANTED.variant, PLANTED.scenario, options=dict(PLANTED.options))
    job = job_of(case, "float32")
    name, worker = _first(names)
    with worker:
        buggy = f"{name} with a bug"
        console.tell(
            f"A small {case.variant} model with seeded random weights runs twice on {name} in {job.dtype}: "
            "unchanged, and with a bug. Each run is compared with NumPy in float64."
        )
        runs = {
            label: worker.run(job.config, job.weights, job.batch, job.part, job.dtype, how)
            for label, how in ((name, "explicit"), (buggy, f"mutant:{PLANTED.name}"))
        }
        environment = environment_of(worker, [])
    verdicts = {label: job.judge(run).explained() for label, run in runs.items()}
    results = [
        Result(label, job.group, job.case, job.dtype, verdict.status, verdict=verdict)
        for label, verdict in verdicts.items()
    ]
    difference = np.abs(runs[buggy].output - runs[name].output).max()
    console.print()
    console.tell(f"{name} {verdict_lines(verdicts[name])[0]}", style="green")
    console.print()
    console.tell(f"The bug: {PLANTED.text} It changes the logits by {difference:.1e}. Rounding, or a bug?")
    console.print()
    for line in divergence_lines(results[1]):
        console.tell(line, style=None if line.startswith(" ") else "red")
    console.print()
    title = f"Demonstration: {PLANTED.text}"
    written = record.make_record(Report(results, dict.fromkeys(runs, environment), Setup()), "check", title)
    output_files.write((html, lambda: output_files.page(written)))
    for line in NEXT:
        console.tell(line)
    # The demonstration fails unless the bug is named (decision 0033).
    cause = verdicts[buggy].cause
    raise typer.Exit(
        0 if verdicts[name].passed and PLANTED.diagnosed(cause.hypothesis if cause else "") == "right" else 1
    )


def _first(names: list[str]) -> tuple[str, Worker]:
    """The first installed backend, and a worker in which bugs can be planted."""
    reason = ""
    for name in names:
        try:
            return name, Setup().open(plugin(name))
        except WorkerFailure as failure:
            reason = f"{name}: {failure.detail}"
    complain(f"{reason}; 'concord doctor' says how to install a framework")
    raise typer.Exit(3)
