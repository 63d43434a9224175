"""``concord experiment``: the sources' questions, each answered by one command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from concord import fitting, options, spec, writing
from concord.conformance import record
from concord.ending import halting
from concord.looking import Png, Svg
from concord.progress import bars
from concord.spec.errors import SpecError, optional
from concord.spec.training.recipe import recipes
from concord.terminal import Terminal
from concord.terminal import figures as show_figures

if TYPE_CHECKING:
    from concord.training.experiments import Trained


def experiment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="depth, norm-placement, heads or variants.")],
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            metavar="DIR",
            parser=writing.path,
            help="A folder of samples: train, dev and perhaps test.",
        ),
    ],
    backend: options.Backends = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs of each model, from seed 0 on.")
    ] = 3,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            parser=writing.output,
            help="The folder of all runs; what is finished in it is kept, and what was begun goes on.",
        ),
    ] = Path("concord-experiment"),
    variant: Annotated[
        str,
        typer.Option(
            "--variant",
            metavar="V",
            autocompletion=options.among(spec.variants),
            help="What the models share, in small sizes; not of 'variants'.",
        ),
    ] = "nndl-paddle-api",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another value for a field of the configuration or the recipe; may be repeated.",
        ),
    ] = None,
    tokenization: options.Tokenization = "characters",
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Tokens of a sample; longer ones are cut.")
    ] = 64,
    recipe_name: Annotated[
        str,
        typer.Option(
            "--recipe",
            metavar="R",
            parser=fitting.named_recipe,
            autocompletion=options.among(recipes),
            help="A known recipe, or a TOML file.",
        ),
    ] = "adamw",
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Samples in a batch.")] = 32,
    epochs: Annotated[
        int | None, typer.Option("--epochs", metavar="N", help="Default: 3, if nothing else ends a run.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="End each run after so many steps.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every", metavar="N", help="Steps between two evaluations. Default: after each epoch."
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", metavar="N", help="Runs at a time, each in a worker of its own.")
    ] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="ADDRESS",
            help="Run on a Dask cluster instead, whose workers see the same files, for example tcp://host:8786.",
        ),
    ] = None,
    json: options.Json = None,
    html: options.Html = None,
    svg: Svg = None,
    png: Png = None,
    execution: options.Execution = "eager",
    implementation: options.Implementation = "explicit",
    device: options.Device = "cpu",
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    threads: options.Threads = None,
) -> None:
    """Train models that differ in one thing on the same data, with several seeds."""
    with optional("concord experiment", "training"):
        from concord.training import beginning, experiments, figures
        from concord.training.experiments import results
        from concord.training.experiments.ways import USUAL
        from concord.training.plan import Plan
    writing.check(json, html, svg, png)
    figures.check_matplotlib(html, svg, png)
    if parallel < 1:
        raise SpecError(f"--parallel is {parallel} but must be at least 1")
    trainer, (model, recipe), settings = options.collect(
        lambda: fitting.one_backend(backend),
        lambda: fitting.described(
            variant,
            None,
            recipe_name,
            [
                *(f"{key}={value}" for key, value in {**USUAL, "max_positions": tokens + 1}.items()),
                *(changes or []),
            ],
        ),
        lambda: options.settings(
            backend, device, implementation, execution, python, ssh, time_limit, None, threads
        ),
    )
    plan = Plan(
        backend=trainer, files=beginning.files(data), batch=batch, epochs=epochs, steps=steps, evaluate_every=evaluate_every, log_every=10,
        implementation=settings.implementation, execution=settings.execution, device=device,
    )  # fmt: skip
    texts = beginning.Texts(tokenization=tokenization, tokens=tokens)
    asked = experiments.Experiment(name, experiments.ways(name, model), seeds, recipe, plan, texts, out)
    with bars([name], len(asked.cells()), "runs") as reached, halting() as halted:
        found = experiments.conduct(asked, settings, parallel, scheduler, reached, halted)
        if halted():
            Terminal(stderr=True).print(
                f"what has come of it was kept; the same command with --out {out} goes on",
                highlight=False,
                soft_wrap=True,
            )
    console = Terminal()
    _show(found, console)
    data_of = results.as_data(asked, found)
    writing.write(console, (json, lambda: record.text(data_of)), (html, lambda: writing.page(data_of)))
    figures.write(console, lambda say: results.figure(found), svg, png, list(asked.ways))
    raise typer.Exit(int(data_of["exit_code"]))


def _show(found: Sequence[Trained], console: Terminal) -> None:
    """Print what each model came to, and why runs have no result."""
    from concord.training.experiments import results

    known = results.summaries(found)
    show_figures(
        console,
        results.HEADINGS,
        [one.row(way) for way, one in known.items()],
        results.LESS,
        ("model",),
        results.headline(found),
    )
    for way, one in known.items():
        for why in one.lacking:
            console.print(f"{way}, {why}", style="magenta", highlight=False, soft_wrap=True)
