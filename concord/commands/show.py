"""``concord show``: pages and tables of variants, earlier runs, and attention."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

import typer
from rich.table import Table

from concord import options, output_files, spec
from concord.conformance.run import record
from concord.exit_codes import FAULT
from concord.options import Written
from concord.own_model import PARTS
from concord.spec.cases import scenarios_of
from concord.spec.errors import SpecError, collect, refuse, unknowns
from concord.spec.precision import PRECISIONS
from concord.terminal import Terminal, counting


def variants(
    name: str | None = None,
) -> None:
    """Show the variants of the built-in model, and how they differ.

    Args:
        name (VARIANT): Print one variant in full, as TOML.

    Examples: concord show variants bert
    """
    if name is not None:
        print(spec.variant(name).to_toml(), end="")
        return
    names, console = dict(zip(ascii_lowercase, spec.variants(), strict=False)), Terminal()
    configs = {letter: spec.variant(name).as_dict() for letter, name in names.items()}
    for letter, name in names.items():
        console.tell(f"{letter}  {name:20} {', '.join(scenarios_of(name))}")
    table = Table("field", "value", "variants", box=None, pad_edge=False)
    for field in spec.FIELDS:
        values = {letter: str(config.get(field, "–")) for letter, config in configs.items()}
        different = list(dict.fromkeys(values.values()))
        for place, value in enumerate(different if len(different) > 1 else ()):
            bearers = (letter if own == value else "·" for letter, own in values.items())
            table.add_row("" if place else field, value, "".join(bearers))
    console.print()
    console.print(table)
    console.print(
        "Every other field is the same in all variants. 'concord show variants NAME' prints one in full. "
        "A variant's cases are named VARIANT-SCENARIO, such as bert-ragged.",
        style="dim",
    )


def report(
    file: Path,
    *,
    html: Written | None = None,
    markdown: Written | None = None,
    runs: Written | None = None,
) -> None:
    """Make the page of an earlier run from its JSON, and exit with that run's code, or 3 if it was stopped.

    Args:
        file: A file that --json wrote.
        html (--html, -o): Where to write the page.
        markdown: Replace the table in a Markdown file; it stands between begin and end markers
            (check, compare or speed).
        runs: Write a line for each run; its fields, separated by tabs, are its result, its largest
            error and the place of that error.

    Examples: concord show report check.json --html check.html
    """
    from concord.conformance.run import report
    from concord.conformance.run.campaign import Report
    from concord.speed import table

    output_files.check(html, markdown, runs)
    if html is markdown is runs is None:
        raise SpecError("none of --html, --markdown and --runs is given but at least one is required")
    earlier, page = output_files.read_page(file)
    outcome, judged = earlier.outcome, isinstance(earlier.outcome, Report)
    if runs and not judged:
        raise SpecError(
            f"{file} is a record of {earlier.kind}, but --runs takes one of check, golden or compare"
        )
    text = ""
    if markdown:
        if earlier.kind not in ("check", "compare", "speed"):
            raise SpecError(
                f"{file} is a record of {earlier.kind}, but --markdown takes one of check, compare or speed"
            )
        if outcome.unfinished if judged else not record.data(earlier)["complete"]:
            raise SpecError(f"{file} is not complete: the --markdown table would lack runs")
        of_runs = report.candidates_markdown if earlier.kind == "compare" else report.markdown
        lines = of_runs(outcome) if judged else table.markdown(record.data(earlier))
        text = report.within(markdown, earlier.kind, lines)
    output_files.write((html, lambda: page), (markdown, lambda: text), (runs, lambda: report.runs(outcome)))
    raise typer.Exit(min(earlier.exit_code, FAULT))  # nothing has interrupted this command


def attention(
    checkpoint: Path,
    text_a: str,
    text_b: str | None = None,
    *,
    dtype: str = "float32",
    html: Written | None = None,
    workers: options.Runs,
) -> None:
    """Show what each head attends to, and where two backends differ.

    Args:
        checkpoint (CHECKPOINT): A checkpoint in any format, with its tokenizer.
        text_a (TEXT): A text that the model reads.
        text_b ([TEXT_B]): The second text of a pair.

    Examples: concord show attention all-MiniLM-L6-v2 "A cat sat." --backend jax
    """
    from concord.conformance.run import report
    from concord.porting.attention_page import attention_page, look
    from concord.porting.prediction import TextModel
    from concord.porting.texts import Text

    output_files.check(html)
    model, text, names, settings, _ = collect(
        lambda: TextModel.read(checkpoint, PARTS),
        lambda: Text(text_a, text_b),
        workers.names,
        workers.settings,
        lambda: refuse(unknowns("dtype", [dtype], PRECISIONS)),
    )
    with counting(names, 1) as progress:
        attended = look(model, text, names, settings, dtype, progress)
    report.show(attended.report, console := Terminal(), f"Attention: {attended.title}", "text")
    if not attended.maps:
        console.tell("no backend exposes attention weights: they stay inside library kernels", "yellow")
    output_files.write((html, lambda: attention_page(attended)))
    raise typer.Exit(attended.report.exit_code)
