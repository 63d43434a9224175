"""The command line. Thin: it reads options, calls the packages and prints.

Exit codes: 0 agrees; 1 diverges; 2 bad usage or input; 3 a backend crashed or is missing; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import backends
import spec
from concord import options
from conformance import campaign, check_jobs, doctor, dump, published, record, report
from conformance.check import DTYPES, check_cases, job_of
from spec.errors import SpecError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help="One Transformer classifier in four frameworks, and the proof that they compute the same.")

STARTED = time.perf_counter()
INTERRUPTED = 130


def main() -> None:
    """Run the command line, and turn refused input into one line for each problem and exit code 2."""
    try:
        app()
    except SpecError as error:
        for problem in error.problems:
            print(f"concord: error: {problem}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # typer has caught it
            print("concord: interrupted", file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print("concord: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(jobs: Sequence[campaign.Job], names: Sequence[str], settings: campaign.Settings) -> campaign.Report:
    """Run a campaign with a bar for each backend, where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {name: bars.add_task(name, total=len(jobs), now="starting") for name in names}

        def progress(name: str, done: str) -> None:
            bars.update(tasks[name], advance=0 if done == "started" else 1, now=done)

        return campaign.conduct(jobs, names, settings, progress)


def _finish(
    result: campaign.Report, console: Console, kind: str, json: Path | None, group: str, title: str, markdown: Path | None = None
) -> None:
    report.show(result, console, title, group)
    if json is not None:
        record.write(json, record.record(result, kind))
        console.print(f"written: {json}", highlight=False)
    if markdown is not None:
        report.put_into(markdown, "check", report.markdown(result))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    console.print(f"{time.perf_counter() - STARTED:.0f} s in all, imports included; this process held at most {peak:.0f} MiB", highlight=False)
    raise typer.Exit(result.exit_code)


@app.command()
def check(
    variant: options.Variants = None,
    backend: options.Backends = None,
    device: options.Device = "cpu",
    dtype: options.Dtypes = None,
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    part: options.Part = "model",
    case: options.Cases = None,
    from_dump: Annotated[Path | None, typer.Option("--from-dump", metavar="DIR", help="Judge runs that came back as files for cases written by 'concord export-case'.")] = None,
    json: options.Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Put the table between the markers of a Markdown file.")] = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Run the standard cases on every backend and judge them against the oracle."""
    console = Console()
    _writable(json)
    if from_dump is not None:
        _finish(dump.judge_dumps(from_dump), console, "check", json, "variant", f"Runs from {from_dump}")
    dtypes = _once(dtype) or list(DTYPES)
    settings, names, cases = _all(
        lambda: options.settings(backend, device, implementation, execution, python, ssh, time_limit, memory_limit, threads),
        lambda: _names(backend, python, ssh),
        lambda: check_cases(_once(variant), dtypes, part, case),
    )
    result = _run([job_of(case, dtype) for case in cases for dtype in dtypes], names, settings)
    _finish(result, console, "check", json, "variant", f"Conformance: {part}, {implementation}, {execution}, {device}", markdown)


@app.command()
def golden(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of golden files, with subfolders.")] = published.INCLUDED,
    backend: options.Backends = None,
    device: options.Device = "cpu",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    json: options.Json = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Compare every backend with tensors that the published sources themselves computed."""
    _writable(json)
    settings, names, collection = _all(
        lambda: options.settings(backend, device, implementation, execution, python, ssh, time_limit, memory_limit, threads),
        lambda: _names(backend, python, ssh),
        lambda: published.collect(directory),
    )
    result = _run(collection.jobs, names, settings)
    result.notes.update(collection.notes)
    _finish(result, Console(), "golden", json, "source", f"Golden files of {directory}")


@app.command(name="export-case")
def export_case(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder.")],
    variant: options.Variants = None,
    dtype: options.Dtypes = None,
    part: options.Part = "model",
    case: options.Cases = None,
) -> None:
    """Write standard cases as files that can be run anywhere; judge what comes back with 'concord check --from-dump DIR'."""
    written = dump.export_cases(directory, check_jobs(_once(variant), _once(dtype) or DTYPES, part, case))
    Console().print(f"{len(written)} cases written to {directory}; put run.safetensors beside each case.json", highlight=False)


@app.command()
def variants(name: Annotated[str | None, typer.Argument(metavar="VARIANT", help="Show one whole, as TOML.")] = None) -> None:
    """Show the family, and how its members differ."""
    if name is not None:
        print(spec.variant(name).to_toml(), end="")
        return
    console = Console()
    configs = {name: spec.variant(name).as_dict() for name in spec.variants()}
    fields = [f for f in spec.FIELDS if len({str(config.get(f)) for config in configs.values()}) > 1]
    # Variants side by side need room; on a narrow terminal they follow each other.
    for group in [list(configs)] if console.width >= 170 else [[name] for name in configs]:
        table = Table("field", *group, padding=(0, 1))
        for field in fields:
            table.add_row(field, *(str(configs[name].get(field, "–")) for name in group))
        console.print(table)
    console.print("Every other field is the same in all. 'concord variants NAME' prints one whole.", style="dim")


@app.command(name="doctor")
def doctor_command(
    backend: options.Backends = None,
    device: options.Device = "cpu",
    python: options.Python = None,
    ssh: options.Ssh = None,
    threads: options.Threads = None,
) -> None:
    """Show what is installed, devices, threads and precision switches, and what to do about them."""
    console = Console()
    settings = options.settings(backend, device, python=python, ssh=ssh, threads=threads)
    names = _names(backend, python, ssh)
    console.print(_facts(doctor.machine()), highlight=False)
    with console.status("starting each backend to ask it", spinner="line"):
        diagnoses = doctor.diagnose(names, settings)
    for diagnosis in diagnoses:
        console.print(f"\n{diagnosis.backend}: {diagnosis.status}", style="bold", highlight=False)
        table = _facts(diagnosis.facts)
        for advice in diagnosis.advice:
            table.add_row("advice", Text(advice), style="yellow")
        console.print(table, highlight=False)
    raise typer.Exit(0 if all(d.status == "ready" or (d.status == "absent" and not backend) for d in diagnoses) else 3)


def _facts(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for fact, value in facts.items():
        table.add_row(fact, Text(doctor.plain(value)))
    return table


def _all(*steps: Callable[[], Any]) -> list[Any]:
    """Return the result of each step, or raise what is wrong with all of them at once."""
    results, problems = [], []
    for step in steps:
        try:
            results.append(step())
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return results


def _names(asked: list[str] | None, *elsewhere: list[str] | None) -> list[str]:
    """Return the backends to run: those asked for, each once, or all known ones.

    Args:
        elsewhere: options that place a backend, as ``NAME=VALUE``; each has to name one that runs.
    """
    names = _once(asked) or backends.names()
    # A name that no backend bears is the options' own error.
    placed = [name for values in elsewhere for name, equals, _ in (value.partition("=") for value in values or []) if equals and _known(name)]
    problems = [f"{name!r} is given an interpreter or a host but does not run; add --backend {name}" for name in placed if name not in names]
    for name in names:
        try:
            backends.resolve(name)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return names


def _known(name: str) -> bool:
    try:
        backends.resolve(name)
    except SpecError:
        return False
    return True


def _once(values: list[str] | None) -> list[str] | None:
    """Return each value of a repeated option once."""
    return list(dict.fromkeys(values)) if values else None


def _writable(path: Path | None) -> None:
    """Refuse a file that cannot be written before anything runs."""
    if path is None:
        return
    folder = path.parent
    problem = (
        errno.EISDIR if path.is_dir()
        else errno.ENOENT if not folder.exists()
        else errno.ENOTDIR if not folder.is_dir()
        else errno.EACCES if not os.access(folder, os.W_OK)
        else None
    )  # fmt: skip
    if problem:
        raise SpecError(f"{path}: cannot be written: {os.strerror(problem)}")
