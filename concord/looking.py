"""``concord show attention`` and ``concord show positions``: what a model attends to, and what it knows of places."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from concord import options, spec, writing
from concord.progress import counting
from concord.spec.errors import SpecError, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal
from concord.terminal import figures as show_figures

if TYPE_CHECKING:
    from concord.training.attention import Reading
    from concord.training.positions import Form

Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        parser=writing.path,
        help="A model: a checkpoint of any format, or a run, of which the best.",
    ),
]
Variant = Annotated[
    str | None,
    typer.Option(
        "--variant",
        metavar="V",
        autocompletion=options.among(spec.variants),
        help="Instead: an example of a variant, with random weights, narrow, and its layers and heads.",
    ),
]
Svg = Annotated[
    Path | None,
    typer.Option(
        "--svg", metavar="FILE", parser=writing.output, help="Write a figure as SVG, whose text stays text."
    ),
]


def attention(
    checkpoint: Checkpoint = None,
    text_a: Annotated[
        str | None, typer.Option("--text-a", metavar="TEXT", help="What the model of the checkpoint reads.")
    ] = None,
    text_b: Annotated[
        str | None, typer.Option("--text-b", metavar="TEXT", help="And the second of a pair.")
    ] = None,
    variant: Variant = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Tokens of an example. Default: 17.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="What an example follows from.")] = 0,
    layer: Annotated[
        int | None, typer.Option("--layer", metavar="N", help="Of the figure, from 0. Default: all.")
    ] = None,
    head: Annotated[
        int | None, typer.Option("--head", metavar="N", help="Of the figure, from 0. Default: all.")
    ] = None,
    backend: options.Backends = None,
    dtype: options.Dtype = "float32",
    device: options.Devices = None,
    precision: options.Precision = "strict",
    implementation: options.Implementation = "explicit",
    execution: options.Execution = "eager",
    svg: Svg = None,
    python: options.Python = None,
    ssh: options.Ssh = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME_LIMIT,
    threads: options.Threads = None,
) -> None:
    """Show what each head attends to, and where two backends differ."""
    from concord.conformance import report
    from concord.training import figures
    from concord.training.attention import look
    from concord.training.attention.figure import chosen, figure

    writing.check(svg)
    if svg is not None:
        figures.check_matplotlib()
    reading, names, settings, _ = options.collect(
        lambda: reading_of(checkpoint, text_a, text_b, variant, tokens, seed),
        lambda: options.names(backend, python, ssh),
        lambda: options.settings(
            backend,
            device or "cpu",
            implementation,
            execution,
            python,
            ssh,
            time_limit,
            None,
            threads,
            precision,
        ),
        lambda: refuse(unknowns("dtype", [dtype], PRECISIONS)),
    )
    chosen(reading, layer, head)
    with counting(list(settings.places(names)), 1) as progress:
        found = look(reading, names, settings, dtype, progress)
    console = Terminal()
    report.show(found.report, console, f"Attention: {reading.title}", "text")
    for note in found.notes:
        console.print(note, style="yellow", highlight=False)
    if found.sides:
        show_figures(console, *found.table(), less=("bits", "masked"), texts=())
        figures.write(console, svg, lambda: figure(found, layer, head))
    raise typer.Exit(found.report.exit_code)


def positions(
    checkpoint: Checkpoint = None,
    variant: Annotated[
        str | None,
        typer.Option(
            "--variant",
            metavar="V",
            autocompletion=options.among(spec.variants),
            help="Instead: the table of a variant.",
        ),
    ] = None,
    svg: Svg = None,
) -> None:
    """Show a table of positions, and how the product of two falls with their distance."""
    from concord.training import figures
    from concord.training import positions as tables

    writing.check(svg)
    if svg is not None:
        figures.check_matplotlib()
    if (checkpoint is None) == (variant is None):
        raise SpecError("give either --checkpoint or --variant")
    forms = tables.forms(variant, spec.variant(variant)) if variant else forms_of(checkpoint or Path())
    console = Terminal()
    headings, rows = tables.table_of(forms)
    table = Table(
        *headings,
        title="Products of two positions by their distance, relative to that at distance 0",
        title_justify="left",
        title_style="bold",
    )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    figures.write(console, svg, lambda: tables.figure(forms))


def forms_of(path: Path) -> list[Form]:
    """Return the tables of a checkpoint's positions."""
    from concord import porting
    from concord.porting.folder import name_of
    from concord.spec.sources.table import POSITIONS
    from concord.training import positions as tables

    found = porting.read(path)
    return tables.forms(
        name_of(path),
        found.config,
        {name: tensor.read() for name, tensor in found.tensors.items() if name == POSITIONS},
    )


def reading_of(
    checkpoint: Path | None,
    text_a: str | None,
    text_b: str | None,
    variant: str | None,
    tokens: int | None,
    seed: int,
) -> Reading:
    """Return what is looked at: texts that a checkpoint reads, or an example of a variant.

    Raises:
        SpecError: if neither or both are asked for, or an option belongs to the other.
    """
    from concord.porting.folder import name_of
    from concord.pretrained import reads
    from concord.training.attention import example, of_texts

    if (checkpoint is None) == (variant is None):
        raise SpecError("give either --checkpoint with --text-a, or --variant")
    mine, others = (
        ("--checkpoint", {"--tokens": tokens})
        if checkpoint is not None
        else ("--variant", {"--text-a": text_a, "--text-b": text_b})
    )
    wrong = [
        f"{name} is given with {mine}, which has no use for it"
        for name, given in others.items()
        if given is not None
    ]
    if checkpoint is not None and text_a is None:
        wrong.append("--checkpoint is given but --text-a is not: what is the model to read?")
    if wrong:
        raise SpecError(wrong)
    if checkpoint is None:
        return example(variant or "", tokens, seed)
    found, encoder = reads(checkpoint)
    return of_texts(
        name_of(checkpoint), found.config, found.weights(), encoder, text_a or "", text_b, found.part
    )
