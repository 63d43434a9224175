"""The command line. Thin: it reads options, calls the packages and prints.

Exit codes: 0 agrees; 1 diverges; 2 bad usage or input; 3 a backend crashed or is missing; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from concord import DISTRIBUTION, backends, family, options, spec, speeding
from concord.conformance import campaign, check_jobs, doctor, dump, published, record, report
from concord.conformance.check import DTYPES, QUICK
from concord.conformance.mutants import matrix
from concord.conformance.mutants import table as mutants_table
from concord.progress import counting
from concord.spec.errors import SpecError, optional
from concord.spec.files import write_text
from concord.speed.peers import PEERS

app = typer.Typer(no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["--help", "-h"]}, rich_markup_mode=None, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if not asked:
        return
    try:
        print(f"concord {metadata.version(DISTRIBUTION)}")
    except metadata.PackageNotFoundError:
        print("concord, from a checkout that is not installed")
    raise typer.Exit(0)


@app.callback()
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False) -> None:
    """One Transformer classifier in four frameworks, and the proof that they compute the same."""


T = TypeVar("T")

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
    with counting(list(settings.places(names)), len(jobs)) as progress:
        return campaign.conduct(jobs, names, settings, progress)


def _finish(
    result: campaign.Report, console: Console, kind: str, json: Path | None, html: Path | None, group: str, title: str, markdown: Path | None = None
) -> None:
    report.show(result, console, title, group)
    data = record.record(result, kind, title) if json or html else {}
    if json is not None:
        record.write(json, data)
        console.print(f"written: {json}", highlight=False)
    if html is not None:
        from concord.conformance.html import page  # jinja2 need not be installed where no page is made

        write_text(html, page(data))
        console.print(f"written: {html}", highlight=False)
    if markdown is not None:
        report.put_into(markdown, "check", report.markdown(result))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    console.print(f"{time.perf_counter() - STARTED:.0f} s in all, imports included; this process held at most {peak:.0f} MiB", highlight=False)
    raise typer.Exit(result.exit_code)


@app.command()
def check(
    variant: options.Variants = None,
    backend: options.Backends = None,
    device: options.Devices = None,
    dtype: options.Dtypes = None,
    precision: options.Precision = "strict",
    deterministic: options.Deterministic = False,
    repeat: options.Repeat = 1,
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    part: options.Part = "model",
    case: options.Cases = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only float32, unless --dtype says otherwise: half the time, and what shows in float64 alone is not seen.")] = False,
    from_dump: Annotated[Path | None, typer.Option("--from-dump", metavar="DIR", help="Judge runs that came back as files for cases written by 'concord export-case'.")] = None,
    json: options.Json = None,
    html: options.Html = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Put the table between the markers of a Markdown file.")] = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Run the standard cases on every backend and judge them against the oracle."""
    console = Console()
    _writable(json, html)
    if from_dump is not None:
        _finish(dump.judge_dumps(from_dump), console, "check", json, html, "variant", f"Runs from {from_dump}")
    dtypes = _once(dtype) or list(QUICK if quick else DTYPES)
    settings, names, jobs = _all(
        lambda: options.settings(backend, device or "cpu", implementation, execution, python, ssh, time_limit, memory_limit, threads, precision, deterministic, repeat),
        lambda: _names(backend, python, ssh),
        lambda: check_jobs(_once(variant), dtypes, part, case),
    )
    result = _run(jobs, names, settings)
    _finish(result, console, "check", json, html, "variant", _title(settings, part), markdown)


def _title(settings: campaign.Settings, part: str) -> str:
    """Say what is checked, in words; what is as usual goes without saying."""
    unusual = [f"precision {settings.precision}"] if settings.precision != "strict" else []
    unusual += ["deterministic"] if settings.deterministic else []
    return f"Conformance: {', '.join([part, settings.implementation, settings.execution, *(settings.devices or [settings.device]), *unusual])}"


@app.command()
def golden(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of golden files, with subfolders.")] = published.INCLUDED,
    backend: options.Backends = None,
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    json: options.Json = None,
    html: options.Html = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Compare every backend with tensors that the published sources themselves computed."""
    _writable(json, html)
    settings, names, collection = _all(
        lambda: options.settings(backend, device, implementation, execution, python, ssh, time_limit, memory_limit, threads, precision),
        lambda: _names(backend, python, ssh),
        lambda: published.collect(directory),
    )
    result = _run(collection.jobs, names, settings)
    result.notes.update(collection.notes)
    _finish(result, Console(), "golden", json, html, "source", f"Golden files of {directory}")


@app.command()
def mutants(
    backend: Annotated[list[str] | None, typer.Option("--backend", metavar="B", help="torch, tf, paddle or jax; may be repeated. Default: all that are installed.")] = None,
    mutant: Annotated[list[str] | None, typer.Option("--mutant", metavar="M", help="A mutant by name; may be repeated. Default: all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what each mutant is, and run none.")] = False,
    criteria: Annotated[bool, typer.Option("--criteria", help="Compare the judge with usual criteria: what each finds of the mutants, and flags of right variations and random cases.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="With --criteria: put the table between its markers in FILE.")] = None,
    json: options.Json = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Put porting bugs into every backend, and show which are found, where, and by how much."""
    console = Console()
    _writable(json)
    settings, names, chosen = _all(
        lambda: options.settings(backend, time_limit=time_limit, memory_limit=memory_limit, threads=threads),
        lambda: matrix.mutable(_once(backend)),
        lambda: matrix.chosen(_once(mutant)),
    )
    if listed:
        console.print(mutants_table.catalogue(chosen, console.width))
        raise typer.Exit(0)
    if criteria:
        with optional("--criteria", "fuzz"):
            from concord import comparing
        raise typer.Exit(comparing.compare(chosen, names, settings, console, json, markdown))
    with counting(names, len(chosen)) as progress:
        found = matrix.conduct(chosen, names, settings, progress)
    mutants_table.show(found, console)
    if json is not None:
        record.write(json, found.as_dict())
        console.print(f"written: {json}", highlight=False)
    raise typer.Exit(found.exit_code)


@app.command(name="report")
def report_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --json wrote.")],
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="Where to write the page.")],
) -> None:
    """Make the page of an earlier run from its JSON."""
    if file.resolve() == html.resolve():
        raise SpecError(f"{html}: is the record itself; name another file for the page")
    from concord.conformance.html import page

    _writable(html)
    write_text(html, page(record.read(file)))
    Console().print(f"written: {html}", highlight=False)


@app.command(name="export-case")
def export_case(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder.")],
    variant: options.Variants = None,
    dtype: options.Dtypes = None,
    part: options.Part = "model",
    case: options.Cases = None,
) -> None:
    """Write standard cases as files that can be run anywhere; judge what comes back with 'concord check --from-dump DIR'."""
    if directory.is_dir() and any(directory.iterdir()):
        raise SpecError(f"{directory.absolute()}: holds something already; export into an empty folder")
    written = dump.export_cases(directory, check_jobs(_once(variant), _once(dtype) or DTYPES, part, case))
    Console().print(f"{len(written)} cases written to {directory}; put run.safetensors beside each case.json", highlight=False)


@app.command()
def fuzz(
    backend: options.Backends = None,
    cases: Annotated[int | None, typer.Option("--cases", metavar="N", help="How many random cases. Default: 100; with --time: no limit.")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="What the cases follow from.")] = 0,
    seconds: Annotated[float | None, typer.Option("--time", metavar="SECONDS", help="Stop after this time.")] = None,
    dtype: options.Dtypes = None,
    part: options.Parts = None,
    shapes: Annotated[int, typer.Option("--shapes", metavar="N", help="How many tuples of sizes the cases share; 0: each has its own.")] = 12,
    end_to_end: Annotated[bool, typer.Option("--end-to-end", help="Judge end to end too; it decides nothing, and takes as long again.")] = False,
    stop_first: Annotated[bool, typer.Option("--stop-first", help="Stop at the first failure.")] = False,
    sets: Annotated[int | None, typer.Option("--sets", metavar="N", help="Sets of workers on this machine, each judged by a process of its own. Default: 1.")] = None,
    host: Annotated[list[str] | None, typer.Option("--host", metavar="HOST[:DIR]", help="One more set, whose workers run there by ssh, from a checkout in DIR; may be repeated.")] = None,
    scheduler: Annotated[str | None, typer.Option("--scheduler", metavar="ADDRESS", help="Run on a Dask cluster instead, for example tcp://host:8786.")] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where failures are written.")] = Path("concord-fuzz"),
    replay: Annotated[Path | None, typer.Option("--replay", metavar="DIR", help="Run failures again that were written there.")] = None,
    json: options.Json = None,
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: Annotated[int, typer.Option("--threads", metavar="N", help="Computing threads of each backend.")] = 1,
) -> None:
    """Run random cases on every backend, and make each failure as small as can be."""
    with optional("concord fuzz", "fuzz"):
        from concord import fuzzing

    _writable(json)
    settings, names, again, plan, _ = _all(
        lambda: options.settings(backend, device, implementation, execution, python, ssh, time_limit, memory_limit, threads, precision),
        lambda: _names(backend, python, ssh),
        lambda: fuzzing.Replay(replay) if replay is not None else None,
        lambda: fuzzing.plan(_once(backend) or backends.names(), seed, cases, seconds, _once(dtype), _once(part), shapes, end_to_end, stop_first),
        lambda: fuzzing.check_places(sets, host, scheduler, out),
    )
    if again is None:
        findings = fuzzing.run(plan, settings, sets, host, scheduler, out, json)
        raise typer.Exit(INTERRUPTED if findings.interrupted else findings.exit_code)
    asked = _once(backend) or again.backends
    names = asked if backend else list(dict.fromkeys([*asked, *names]))
    result = _run(again.jobs, names, dataclasses.replace(settings, asked=tuple(asked)))
    again.tell(result, Console())
    _finish(result, Console(), "check", json, None, "case", f"Failures of {replay}, run again")


@app.command()
def speed(
    backend: options.Backends = None,
    preset: Annotated[list[str] | None, typer.Option("--preset", metavar="P", help="nndl, tf1, minilm, bert-base or bert-large; may be repeated. Default: minilm and bert-base; on a GPU bert-base and bert-large.")] = None,
    variant: Annotated[list[str] | None, typer.Option("--variant", metavar="V", help="A variant as it was published; may be repeated.")] = None,
    config: Annotated[list[Path] | None, typer.Option("--config", metavar="FILE", help="A model of your own, as TOML ('concord variants NAME' prints one); may be repeated.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", metavar="N", help="Samples in a batch. Default: as the preset says, else 8.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", metavar="N", help="Tokens in a sample. Default: as the preset says, else 128 or as many as there is room for.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", metavar="K", help="inference or training; may be repeated. Default: inference; on a GPU both.")] = None,
    lengths: Annotated[list[str] | None, typer.Option("--lengths", metavar="L", help="full (the default): no padding. ragged: as long as real texts are. May be repeated.")] = None,
    implementation: Annotated[list[str] | None, typer.Option("--implementation", metavar="I", help="explicit, library, or a backend's own; may be repeated.")] = None,
    execution: Annotated[list[str] | None, typer.Option("--execution", metavar="E", help="eager, compiled, packed or packed-compiled; may be repeated.")] = None,
    profile: Annotated[list[str] | None, typer.Option("--profile", metavar="P", help="tuned: the same threads for all, and documented switches. as shipped: neither. Default: both.")] = None,
    sweep: Annotated[str | None, typer.Option("--sweep", metavar="AXIS", help="Vary tokens, batch or layers, and fit how the time grows.")] = None,
    device: options.Device = "cpu",
    dtype: options.Dtypes = None,
    precision: options.Precision = "strict",
    quick: Annotated[bool, typer.Option("--quick", help="Two turns, library layers in the tuned profile only; neither imports nor a large product are timed.")] = False,
    turns: Annotated[int | None, typer.Option("--turns", metavar="N", help="How often each backend has its turn, at least. Default: 3.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="S", help="Seconds within which to stay; --resume goes on with what is left. Default: 340 if nothing is chosen, else no limit.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="FILE", help="Go on with a record that was interrupted.")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option("--compare", metavar="OLD NEW", help="Measure nothing; say what changed between two records.")] = None,
    json: options.Json = None,
    html: options.Html = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Put the tables between the markers of a Markdown file.")] = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    threads: options.Threads = None,
) -> None:
    """Measure the backends side by side: in turns, and only what conforms."""
    if compare is not None:
        raise typer.Exit(speeding.changes(*compare))
    _writable(json, html)
    asked = [name for name in backend or () if name not in PEERS] or None
    settings, names, works, modes = _all(
        lambda: options.settings(asked, device, python=python, ssh=ssh, time_limit=time_limit, threads=threads, precision=precision),
        lambda: [*_names(asked, python, ssh), *(name for name in backend or () if name in PEERS)] if asked or not backend else list(backend),
        lambda: speeding.workloads(
            speeding.models(_once(preset), _once(variant), _once(config), batch, tokens, device), _once(kind), _once(lengths), _once(dtype), sweep, device
        ),
        lambda: speeding.modes(implementation, execution, profile, "ragged" in (lengths or []), quick, device),
    )
    names = speeding.with_peers(names, backend, works)
    usual = not any((preset, variant, config, batch, tokens, kind, lengths, dtype, implementation, execution, profile, sweep, quick)) and device == "cpu"
    raise typer.Exit(speeding.run(speeding.plan(names, works, modes, settings, turns, budget, quick, usual), json, html, resume, markdown))


@app.command()
def variants(name: Annotated[str | None, typer.Argument(metavar="VARIANT", help="Show one whole, as TOML.")] = None) -> None:
    """Show the family, and how its members differ."""
    if name is not None:
        print(spec.variant(name).to_toml(), end="")
        return
    console = Console()
    console.print(family.table(console.width))
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
    for line in doctor.conclusions(diagnoses, settings):
        console.print(f"\n{line}", style="yellow", highlight=False)
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


def _once(values: list[T] | None) -> list[T] | None:
    """Return each value of a repeated option once."""
    return list(dict.fromkeys(values)) if values else None


def _writable(*paths: Path | None) -> None:
    """Refuse files that cannot be written, or are one and the same, before anything runs."""
    given = [path for path in paths if path is not None]
    problems = [problem for path in given if (problem := _obstacle(path))]
    if len({path.resolve() for path in given}) < len(given):
        problems.append(f"{given[0]}: is named twice")
    if problems:
        raise SpecError(problems)


def _obstacle(path: Path) -> str | None:
    """Return what keeps a file from being written."""
    folder = path.parent
    problem = (
        errno.EISDIR if path.is_dir()
        else errno.ENOENT if not folder.exists()
        else errno.ENOTDIR if not folder.is_dir()
        else errno.EACCES if not os.access(folder, os.W_OK)
        else None
    )  # fmt: skip
    return f"{path}: cannot be written: {os.strerror(problem)}" if problem else None
