"""``concord show``: a page, a table or a figure of what is there already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import typer

from concord import options, spec, writing
from concord.model import reader
from concord.options import Written
from concord.progress import counting
from concord.spec.errors import SpecError, collect, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal, figures

if TYPE_CHECKING:
    from concord.training.attention.maps import ReadText
    from concord.training.positions import Form


def variants(
    name: str | None = None,
) -> None:
    """Show the family, and how its members differ.

    Args:
        name (VARIANT): Show one whole, as TOML.
    """
    if name is not None:
        print(spec.variant(name).to_toml(), end="")
        return
    configs = [spec.variant(name).as_dict() for name in spec.variants()]
    console, rows = Terminal(), []
    letters = dict(zip(ascii_lowercase, spec.variants(), strict=False))
    for letter, variant in letters.items():
        console.tell(f"{letter}  {variant}")
    for field in spec.FIELDS:
        values = [str(config.get(field, "–")) for config in configs]
        for value in dict.fromkeys(values) if len(set(values)) > 1 else ():
            named = field if value == values[0] else ""
            bearers = (letter if one == value else "·" for letter, one in zip(letters, values, strict=True))
            rows.append([named, value, "".join(bearers)])
    console.print()
    headings = ("field", "value", "variants")
    figures(console, headings, rows, (), headings)
    said = "Every other field is the same in all. 'concord show variants NAME' prints one whole."
    console.print(said, style="dim")


def report(
    file: Path,
    *,
    html: Written | None = None,
    runs: Written | None = None,
) -> None:
    """Make the page of an earlier run from its JSON, and end as that run did.

    Args:
        file: What --json wrote.
        html (--html, -o): Where to write the page.
        runs: Write what came of each run, its largest error, and where, in a line with tabs between.
    """
    from concord.conformance import report
    from concord.conformance.campaign import Report

    writing.check(html, runs)
    if html is None and runs is None:
        raise SpecError("neither --html nor --runs is given but one of them must be")
    made, page = writing.read_page(file)
    if runs and not isinstance(made.outcome, Report):
        raise SpecError(
            f"{file}: is a record of {made.kind}, but --runs takes one of check, golden or compare"
        )
    writing.write((html, lambda: page), (runs, lambda: report.runs(made.outcome)))
    raise typer.Exit(made.exit_code)


def attention(
    checkpoint: Path,
    text_a: str,
    text_b: str | None = None,
    *,
    workers: options.Runs,
    dtype: str = "float32",
    html: Written | None = None,
) -> None:
    """Show what each head attends to, and where two backends differ.

    Args:
        checkpoint (CHECKPOINT): A checkpoint of any format, or a run, of which the best.
        text_a (TEXT): A text that the model reads.
        text_b ([TEXT_B]): And the second of a pair.
    """
    from concord.conformance import report
    from concord.training.attention.maps import look
    from concord.training.attention.page import page

    writing.check(html)
    reading, names, settings, _ = collect(
        lambda: reading_of(checkpoint, text_a, text_b),
        workers.names,
        workers.settings,
        lambda: refuse(unknowns("dtype", [dtype], PRECISIONS)),
    )
    with counting(names, 1) as progress:
        found = look(reading, names, settings, dtype, progress)
    console = Terminal()
    report.show(found.report, console, f"Attention: {reading.title}", "text")
    for note in found.notes:
        console.tell(note, style="yellow")
    if found.sides:
        figures(console, *found.table(), less=("bits", "masked"), texts=())
    writing.write((html, lambda: page(found)))
    raise typer.Exit(found.report.exit_code)


def positions(
    checkpoint: Path | None = None,
    *,
    variant: str | None = None,
    svg: Written | None = None,
) -> None:
    """Show a table of positions, and how the product of two falls with their distance.

    Args:
        checkpoint (CHECKPOINT): A checkpoint of any format, or a run, of which the best.
        variant (V): Instead: the table of a variant.
    """
    from concord.training import positions as tables

    writing.check(svg)
    if (checkpoint is None) == (variant is None):
        raise SpecError("give either CHECKPOINT or --variant")
    forms = tables.forms(variant, spec.variant(variant)) if variant else forms_of(checkpoint or Path())
    console = Terminal()
    title = "Products of two positions by their distance, relative to that at distance 0"
    figures(console, *tables.table_of(forms), (), ("form",), title)
    writing.write((svg, lambda: tables.figure(forms)))


def forms_of(path: Path) -> list[Form]:
    """Return the tables of a checkpoint's positions."""
    from concord import porting
    from concord.porting.folder import name_of
    from concord.spec.sources.table import POSITIONS
    from concord.training import positions as tables

    found = porting.read(path)
    stored = found.tensors.get(POSITIONS)
    return tables.forms(name_of(path), found.config, None if stored is None else stored.read())


def reading_of(checkpoint: Path, text_a: str, text_b: str | None) -> ReadText:
    """Return texts as a checkpoint reads them.

    Raises:
        SpecError: if it cannot be read.
    """
    from concord.porting.folder import name_of
    from concord.training.attention.maps import of_texts

    return of_texts(name_of(checkpoint), reader(checkpoint, spelled=True), text_a, text_b)


def curves(
    runs: list[Path],
    *,
    out: Written | None = None,
) -> None:
    """Show runs of training over each other: figures, and curves of loss, accuracy and learning rate.

    Args:
        runs (RUN): Folders of runs.
        out (--out, -o): Write curves of loss, accuracy and learning rate as SVG.
    """
    writing.check(out)
    compare(runs, out)


def compare(runs: Sequence[Path], picture: Path | None = None) -> None:
    """Print figures of runs, and draw curves.

    Raises:
        SpecError: if a run cannot be read, or something cannot be written.
    """
    from concord.training import curves as drawn  # what draws need not be installed where nothing is drawn

    runs, console = list(dict.fromkeys(runs)), Terminal()
    logs = drawn.of_runs(runs)
    rows = [drawn.row(run, *named) for run, named in zip(runs, logs.items(), strict=True)]
    cells = [list(row.values()) for row in rows]
    figures(console, list(rows[0]), cells, drawn.LESS, ("run", "backend", "ended by"))
    writing.write((picture, lambda: drawn.figure(logs)))
