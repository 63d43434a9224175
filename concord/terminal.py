"""The terminal: what is printed is text and nothing else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from concord.spec.text import shown

NARROWEST, USUAL = 20, 80
"""Columns below which nothing can be read, and those of a terminal that says nothing else of itself."""

LONGEST_CELL = 100
"""Characters of a cell that holds words."""


class Terminal(Console):
    """A console that prints text as :func:`~concord.spec.text.shown` has it; brackets are no markup."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if self.width < NARROWEST:
            self.width = USUAL

    def on_broken_pipe(self) -> None:
        """Go on when the reader has had enough: what was asked for is done, and its exit code holds."""
        self.quiet = True
        discard(self.file)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as what is printed; tables measure it so too."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed."""
        if isinstance(renderable, Text) and (seen := shown(renderable.plain)) != renderable.plain:
            renderable = Text(seen, renderable.style, end=renderable.end)
        return super().render(renderable, options)

    def tell(self, text: str, style: str | None = None) -> None:
        """Print a text as one line (:func:`concord.spec.text.shown`), which a narrow terminal breaks."""
        self.print(shown(text), style=style, soft_wrap=True)


def figures(
    console: Terminal,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    less: Sequence[str],
    texts: Collection[str],
    title: str | None = None,
) -> None:
    """Print figures as a table: numbers to the right, words never broken.

    Args:
        headings: of the columns.
        rows: one text for each of them.
        less: headings of columns that a narrow terminal goes without, the first of them first.
        texts: headings of columns that hold words.
        title: of the table.
    """
    rows = [[shown(text, LONGEST_CELL) for text in row] for row in rows]
    columns = dict(zip(headings, zip(*rows, strict=True), strict=True))
    widths = {heading: max(map(len, [heading, *column])) for heading, column in columns.items()}

    def fit() -> bool:
        return sum(widths.values()) + 2 * (len(widths) - 1) <= console.width

    if not fit():
        widths = {heading: max(map(len, [*heading.split(), *column])) for heading, column in columns.items()}
    for heading in less:
        if not fit():
            del widths[heading]
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold"
    )
    for heading, width in widths.items():
        table.add_column(
            heading, justify="left" if heading in texts else "right", overflow="fold", width=width
        )
    for row in rows:
        table.add_row(*(text for heading, text in zip(headings, row, strict=True) if heading in widths))
    console.print(table)


def discard(stream: IO[str]) -> None:
    """Have nobody get what is written to a stream that takes nothing more."""
    with suppress(OSError, io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def complain(problem: str) -> None:
    """Print a problem as one line on standard error."""
    print(f"concord: error: {shown(problem)}", file=sys.stderr)
