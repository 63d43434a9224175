"""The command line. Thin: it reads options, calls the packages and prints.

Exit codes: 0 agrees; 1 diverges; 2 bad usage or input; 3 a backend crashed or is missing; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from concord import (
    DISTRIBUTION,
    backends,
    certifying,
    family,
    looking,
    options,
    port,
    predicting,
    reducing,
    running,
    spec,
    speeding,
    train,
    writing,
)
from concord.conformance import campaign, check_jobs, doctor, dump, published, report
from concord.conformance.bugs.bug import Bug
from concord.conformance.campaign import repeated
from concord.conformance.check import DTYPES, QUICK, sequence
from concord.conformance.mutants import matrix
from concord.conformance.mutants import table as mutants_table
from concord.conformance.watching import told
from concord.ending import end
from concord.progress import bars, counting
from concord.spec.errors import SpecError, optional
from concord.speed.peers import PEERS
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.own import Given

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
case = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Cases as files, to be run anywhere.")
show = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a page, a table or a figure.")
app.add_typer(case, name="case")
app.add_typer(show, name="show")


def _version(asked: bool) -> None:
    if not asked:
        return
    try:
        print(f"concord {metadata.version(DISTRIBUTION)}")
    except metadata.PackageNotFoundError:
        print("concord, from a checkout that is not installed")
    raise typer.Exit(0)


@app.callback()
def about(
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:  # its callback has done it
    """One Transformer classifier in four frameworks, and the proof that they compute the same."""
    writing.READ.clear()


STARTED = time.perf_counter()


def main() -> None:
    """Run the command line, and turn refused input into one line for each problem and exit code 2."""
    end(app)


def _run(jobs: Sequence[campaign.Job], names: Sequence[str], settings: campaign.Settings) -> campaign.Report:
    with counting(list(settings.places(names)), len(repeated(jobs, settings.repeat))) as progress:
        return campaign.conduct(jobs, names, settings, progress)


def _finish(
    result: campaign.Report,
    console: Console,
    kind: str,
    json: Path | None,
    html: Path | None,
    group: str,
    title: str,
    markdown: Path | None = None,
) -> None:
    result = result.explained()
    put = partial(report.within, markdown, "check") if markdown else str
    writing.outcome(
        result,
        kind,
        title,
        console,
        json,
        html,
        lambda: report.show(result, console, title, group),
        (markdown, lambda: put(report.markdown(result))),
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    console.print(
        f"{time.perf_counter() - STARTED:.0f} s in all, imports included; this process held at most {peak:.0f} MiB",
        highlight=False,
    )
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
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Only float32, unless --dtype says otherwise: half the time, and what shows in float64 alone is not seen.",
        ),
    ] = False,
    forward_only: options.ForwardOnly = False,
    checkpoint: options.Checkpoint = None,
    form: options.Format = "auto",
    table: options.NameTable = None,
    texts: options.Texts = None,
    inputs: options.Inputs = None,
    batch: options.Samples = None,
    max_tokens: options.MaxTokens = None,
    show_tokens: options.ShowTokens = False,
    from_dump: Annotated[
        Path | None,
        typer.Option(
            "--from-dump",
            metavar="DIR",
            parser=writing.path,
            help="Judge runs that came back as files for cases written by 'concord case export'.",
        ),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            parser=writing.output,
            help="Put the table between the markers of a Markdown file.",
        ),
    ] = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Run the standard cases, or a model of your own, on every backend, and judge them."""
    console = Terminal()
    writing.check(json, html, markdown=markdown, markers="check")
    if from_dump is not None:
        with bars(["judging"], None) as reached, told(lambda text: reached("judging", 0, text)):
            judged = dump.judge_dumps(from_dump)
        _finish(judged, console, "check", json, html, "variant", f"Runs from {from_dump}", markdown)
    dtypes = options.once(dtype) or list(QUICK if quick else DTYPES)
    settings, names, jobs = options.collect(
        lambda: options.settings(
            backend,
            device or "cpu",
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
            deterministic,
            repeat,
        ),
        lambda: options.names(backend, python, ssh),
        lambda: _jobs(
            options.given(
                checkpoint,
                form,
                table,
                texts,
                inputs,
                batch,
                max_tokens,
                {"--variant": variant, "--case": case},
            ),
            options.once(variant),
            dtypes,
            part,
            case,
            forward_only,
            show_tokens,
        ),
    )
    result = _run(jobs if checkpoint else sequence(jobs), names, settings)
    _finish(
        result,
        console,
        "check",
        json,
        html,
        "checkpoint" if checkpoint else "variant",
        _title(settings, jobs[0].part),
        markdown,
    )


def _jobs(
    own: Given | None,
    variants: list[str] | None,
    dtypes: Sequence[str],
    part: str,
    cases: list[str] | None,
    forward_only: bool,
    show_tokens: bool,
) -> list[campaign.Job]:
    """Return standard cases, or a model of one's own, as jobs."""
    if own is not None:
        from concord.own import jobs

        return jobs(own, part, dtypes, not forward_only, show_tokens)
    return [
        dataclasses.replace(job, gradients=not forward_only)
        for job in check_jobs(variants, dtypes, part, cases)
    ]


def _title(settings: campaign.Settings, part: str) -> str:
    """Say what is checked, in words; what is as usual goes without saying."""
    unusual = [f"precision {settings.precision}"] if settings.precision != "strict" else []
    unusual += ["deterministic"] if settings.deterministic else []
    return f"Conformance: {', '.join([part, settings.implementation, settings.execution, *(settings.devices or [settings.device]), *unusual])}"


@app.command()
def golden(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", parser=writing.path, help="A folder of golden files, with subfolders."),
    ] = published.INCLUDED,
    backend: options.Backends = None,
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    forward_only: options.ForwardOnly = False,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", parser=writing.path, hidden=True)] = None,
    json: options.Json = None,
    html: options.Html = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Compare backends with tensors of the published sources."""
    if checkpoint is not None:
        raise SpecError(
            "--checkpoint is given, but golden files bring weights and inputs of their own; 'concord check --checkpoint' judges yours"
        )
    writing.check(json, html)
    settings, names, collection = options.collect(
        lambda: options.settings(
            backend,
            device,
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
        ),
        lambda: options.names(backend, python, ssh),
        lambda: published.collect(directory),
    )
    jobs = (
        [dataclasses.replace(job, gradients=False) for job in collection.jobs if job.training is None]
        if forward_only
        else collection.jobs
    )
    result = _run(jobs, names, settings)
    result.notes.update(collection.notes)
    if forward_only and (left := len(collection.jobs) - len(jobs)):
        result.notes["--forward-only"] = f"{left} runs of training are left out"
    _finish(result, Terminal(), "golden", json, html, "source", f"Golden files of {directory}")


@app.command()
def mutants(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="B",
            help="torch, tf, paddle or jax; may be repeated. Default: all that are installed.",
        ),
    ] = None,
    mutant: Annotated[
        list[str] | None,
        typer.Option(
            "--mutant",
            metavar="M",
            help="A mutant by name, or a group of them; may be repeated. Default: all.",
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Say what each mutant is, and run none.")] = False,
    criteria: Annotated[
        bool,
        typer.Option(
            "--criteria",
            help="Compare the judge with usual criteria: what each finds of the mutants, and flags of right variations and random cases.",
        ),
    ] = False,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            parser=writing.output,
            help="With --criteria: put the table between its markers in FILE.",
        ),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: options.Threads = None,
) -> None:
    """Put porting bugs into every backend, and show what is found."""
    console = Terminal()
    if markdown is not None and not criteria:
        raise SpecError("--markdown is given but --criteria is not: only its table goes into a Markdown file")
    if criteria and html is not None:
        raise SpecError(
            "--html is given with --criteria, which has no page: --json and --markdown write its table"
        )
    writing.check(json, html, markdown=markdown, markers="criteria")
    settings, names, chosen = options.collect(
        lambda: options.settings(backend, time_limit=time_limit, memory_limit=memory_limit, threads=threads),
        lambda: matrix.mutable(options.once(backend)),
        lambda: matrix.chosen(options.once(mutant)),
    )
    if listed:
        console.print(mutants_table.catalogue(chosen, console.width))
        raise typer.Exit(0)
    if criteria:
        with optional("--criteria", "fuzz"):
            from concord import comparing
        raise typer.Exit(
            comparing.compare(
                [one for one in chosen if isinstance(one, Bug)],
                names,
                settings,
                console,
                json,
                html,
                markdown,
            )
        )
    with counting(names, len(chosen)) as progress:
        found = matrix.conduct(chosen, names, settings, progress)
    title = f"{len(chosen)} mutant{'' if len(chosen) == 1 else 's'}"
    writing.outcome(found, "mutants", title, console, json, html, lambda: mutants_table.show(found, console))
    raise typer.Exit(found.exit_code)


@show.command(name="report")
def report_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=writing.path, help="What --json wrote.")],
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", parser=writing.output, help="Where to write the page.")
    ],
) -> None:
    """Make the page of an earlier run from its JSON, and end as that run did."""
    writing.check(html)
    made, page = writing.read_page(file)
    writing.write(Terminal(), (html, lambda: page))
    raise typer.Exit(made.exit_code)


@case.command(name="export")
def export_case(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            parser=writing.output,
            help="An empty folder; 'concord check --from-dump DIR' judges what comes back.",
        ),
    ],
    variant: options.Variants = None,
    dtype: options.Dtypes = None,
    part: options.Part = "model",
    case: options.Cases = None,
    forward_only: options.ForwardOnly = False,
    checkpoint: options.Checkpoint = None,
    form: options.Format = "auto",
    table: options.NameTable = None,
    texts: options.Texts = None,
    inputs: options.Inputs = None,
    batch: options.Samples = None,
    max_tokens: options.MaxTokens = None,
    show_tokens: options.ShowTokens = False,
    uncomputed_padding: Annotated[
        bool,
        typer.Option(
            "--uncomputed-padding",
            help="For runs that do not compute rows of padding: no loss depends on one.",
        ),
    ] = False,
) -> None:
    """Write standard cases, or a model of your own, as files, to be run anywhere."""
    writing.check_folder(directory)
    own = options.given(
        checkpoint, form, table, texts, inputs, batch, max_tokens, {"--variant": variant, "--case": case}
    )
    jobs = _jobs(
        own, options.once(variant), options.once(dtype) or DTYPES, part, case, forward_only, show_tokens
    )
    usable = [left for job in jobs if (left := job.independent() if uncomputed_padding else job)]
    written = dump.export_cases(directory, usable)
    without = (
        f"; {len(jobs) - len(usable)} left out, since padding decides each sample"
        if len(usable) < len(jobs)
        else ""
    )
    Terminal().print(
        f"{len(written)} cases written to {directory}; put run.safetensors beside each case.json{without}",
        highlight=False,
    )


@app.command()
def fuzz(
    backend: options.Backends = None,
    cases: Annotated[
        int | None,
        typer.Option(
            "--cases", metavar="N", help="How many random cases. Default: 100; with --time: no limit."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="What the cases follow from.")] = 0,
    seconds: Annotated[
        float | None, typer.Option("--time", metavar="SECONDS", help="Stop after this time.")
    ] = None,
    dtype: options.Dtypes = None,
    part: options.Parts = None,
    shapes: Annotated[
        int,
        typer.Option(
            "--shapes", metavar="N", help="How many tuples of sizes the cases share; 0: each has its own."
        ),
    ] = 12,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end", help="Judge end to end too; it decides nothing, and takes as long again."
        ),
    ] = False,
    stop_first: Annotated[bool, typer.Option("--stop-first", help="Stop at the first failure.")] = False,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS",
            help="Run on a Dask cluster instead, for example tcp://host:8786.",
        ),
    ] = None,
    forward_only: options.ForwardOnly = False,
    checkpoint: options.Checkpoint = None,
    form: options.Format = "auto",
    table: options.NameTable = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", parser=writing.output, help="Where failures are written.")
    ] = Path("concord-fuzz"),
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="DIR", parser=writing.path, help="Run failures again that were written there."
        ),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    device: options.Device = "cpu",
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    memory_limit: options.MemoryLimit = None,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", help="Computing threads of each backend.")
    ] = 1,
) -> None:
    """Run random cases on every backend; make failures small."""
    with optional("concord fuzz", "fuzz"):
        from concord import fuzzing

    writing.check(json, html)
    elsewhere = {
        "--scheduler": scheduler,
        "--replay": replay,
        "--time": seconds,
        "--part": part,
    }
    settings, names, again, plan, _, given = options.collect(
        lambda: options.settings(
            backend,
            device,
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            memory_limit,
            threads,
            precision,
        ),
        lambda: options.names(backend, python, ssh),
        lambda: fuzzing.Replay(replay) if replay is not None else None,
        lambda: fuzzing.plan(
            options.once(backend) or backends.names(),
            seed,
            cases,
            seconds,
            options.once(dtype),
            options.once(part),
            shapes,
            end_to_end,
            stop_first,
            not forward_only,
        ),
        lambda: fuzzing.check_places(scheduler, out),
        lambda: options.given(checkpoint, form, table, None, None, None, None, elsewhere),
    )
    if given is not None:
        jobs = fuzzing.on_own_weights(given, seed, cases, plan, out)
        result = _run(jobs, names, settings)
        fuzzing.write_own_failures(result, jobs, out)
        _finish(
            result,
            Terminal(),
            "check",
            json,
            html,
            "checkpoint",
            f"{len(jobs)} random inputs on the weights of {checkpoint}",
        )
    if again is None:
        findings = fuzzing.run(plan, settings, scheduler, out, json, html)
        raise typer.Exit(findings.exit_code)
    asked = options.once(backend) or again.backends
    names = asked if backend else list(dict.fromkeys([*asked, *names]))
    result = _run(again.jobs, names, dataclasses.replace(settings, asked=tuple(asked)))
    again.tell(result, Terminal())
    _finish(result, Terminal(), "check", json, html, "case", f"Failures of {replay}, run again")


@app.command()
def speed(
    backend: options.Backends = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="P",
            help="nndl, tf1, minilm, bert-base or bert-large; may be repeated. Default: minilm and bert-base; on a GPU bert-base and bert-large.",
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", metavar="V", help="A variant as it was published; may be repeated."),
    ] = None,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            parser=writing.path,
            help="A model of your own, as TOML ('concord show variants NAME' prints one); may be repeated.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="PATH",
            parser=writing.path,
            help="The model of a checkpoint of your own, by its configuration: weights are drawn, for time does not depend on them.",
        ),
    ] = None,
    form: options.Format = "auto",
    table: options.NameTable = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            "--texts",
            metavar="FILE",
            parser=writing.path,
            help="With --checkpoint: a batch of as many samples as there are texts, as long as they are.",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="N", help="Samples in a batch. Default: as the preset says, else 8."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Tokens in a sample. Default: as the preset says, else 128 or as many as there is room for.",
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="K",
            help="inference or training; may be repeated. Default: inference; on a GPU both.",
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(
            "--lengths",
            metavar="L",
            help="full (the default): no padding. ragged: as long as real texts are. May be repeated.",
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(
            "--implementation", metavar="I", help="explicit, library, or a backend's own; may be repeated."
        ),
    ] = None,
    execution: Annotated[
        list[str] | None,
        typer.Option(
            "--execution",
            metavar="E",
            help="eager, compiled, unpadded or unpadded-compiled; may be repeated.",
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            metavar="P",
            help="tuned: the same threads for all, and documented switches. as shipped: neither. Default: both.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep", metavar="AXIS", help="Vary tokens, batch or layers, and fit how the time grows."
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtypes = None,
    precision: options.Precision = "strict",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Two turns, library layers in the tuned profile only; neither imports nor a large product are timed.",
        ),
    ] = False,
    turns: Annotated[
        int | None,
        typer.Option(
            "--turns", metavar="N", help="How often each backend has its turn, at least. Default: 3."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="S",
            help="Seconds within which to stay; --resume goes on with what is left. Default: 340 if nothing is chosen, else no limit.",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="FILE", parser=writing.path, help="Go on with a record that was interrupted."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="OLD NEW",
            parser=writing.path,
            help="Measure nothing; say what changed between two records.",
        ),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--markdown",
            metavar="FILE",
            parser=writing.output,
            help="Put the tables between the markers of a Markdown file.",
        ),
    ] = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    threads: options.Threads = None,
) -> None:
    """Measure backends side by side, in turns, if they conform."""
    if compare is not None:
        raise typer.Exit(speeding.changes(*compare))
    writing.check(json, html, markdown=markdown, markers="speed", goes_on=resume)
    asked = [name for name in backend or () if name not in PEERS] or None
    sizes = {"--batch": batch, "--tokens": tokens, "--sweep": sweep} if texts else {}
    given = options.given(
        checkpoint,
        form,
        table,
        texts,
        None,
        None,
        None,
        {"--preset": preset, "--variant": variant, "--config": config, **sizes},
    )
    own_models = [] if given is None else speeding.own_model(given, batch, tokens)
    settings, names, works, modes = options.collect(
        lambda: options.settings(
            asked, device, python=python, ssh=ssh, time_limit=time_limit, threads=threads, precision=precision
        ),
        lambda: (
            [*options.names(asked, python, ssh), *(name for name in backend or () if name in PEERS)]
            if asked or not backend
            else list(backend)
        ),
        lambda: speeding.workloads(
            own_models
            or speeding.models(
                options.once(preset), options.once(variant), options.once(config), batch, tokens, device
            ),
            options.once(kind),
            options.once(lengths) or (["ragged"] if texts else None),
            options.once(dtype),
            sweep,
            device,
        ),
        lambda: speeding.modes(
            implementation, execution, profile, "ragged" in (lengths or []), quick, device
        ),
    )
    names = speeding.with_peers(names, backend, works)
    usual = (
        not any(
            (
                preset,
                variant,
                config,
                checkpoint,
                batch,
                tokens,
                kind,
                lengths,
                dtype,
                implementation,
                execution,
                profile,
                sweep,
                quick,
            )
        )
        and device == "cpu"
    )
    raise typer.Exit(
        speeding.run(
            speeding.plan(names, works, modes, settings, turns, budget, quick, usual),
            json,
            html,
            resume,
            markdown,
        )
    )


show.command()(looking.attention)
show.command()(looking.positions)
app.command()(predicting.evaluate)
app.command()(predicting.predict)
case.command()(running.run)
app.command()(train.train)
app.command()(port.port)
app.command()(certifying.certify)
app.command()(certifying.verify)
app.command()(certifying.diff)
case.command()(reducing.reduce)
show.command()(train.curves)


@show.command()
def variants(
    name: Annotated[str | None, typer.Argument(metavar="VARIANT", help="Show one whole, as TOML.")] = None,
) -> None:
    """Show the family, and how its members differ."""
    if name is not None:
        print(spec.variant(name).to_toml(), end="")
        return
    console = Terminal()
    console.print(family.table(console.width))
    console.print(
        "Every other field is the same in all. 'concord show variants NAME' prints one whole.", style="dim"
    )


@app.command(name="doctor")
def doctor_command(
    backend: options.Backends = None,
    device: options.Device = "cpu",
    python: options.Python = None,
    ssh: options.Ssh = None,
    threads: options.Threads = None,
) -> None:
    """Show what is installed, how it is set, and what to do."""
    console = Terminal()
    settings = options.settings(backend, device, python=python, ssh=ssh, threads=threads)
    names = options.names(backend, python, ssh)
    console.print(_facts(doctor.machine()), highlight=False)
    with console.status("starting each backend to ask it", spinner="line"):
        diagnoses = doctor.diagnose(names, settings)
    for diagnosis in diagnoses:
        console.print(Group("", f"{diagnosis.backend}: {diagnosis.status}"), style="bold", highlight=False)
        table = _facts(diagnosis.facts)
        for advice in diagnosis.advice:
            table.add_row("advice", Text(advice), style="yellow")
        console.print(table, highlight=False)
    for line in doctor.conclusions(diagnoses, settings):
        console.print(Group("", line), style="yellow", highlight=False)
    raise typer.Exit(
        0 if all(d.status == "ready" or (d.status == "absent" and not backend) for d in diagnoses) else 3
    )


def _facts(facts: Mapping[str, object]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=True)
    for fact, value in facts.items():
        table.add_row(fact, Text(doctor.plain(value)))
    return table
