"""The terminal: what is printed is text and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from concord.backends.wire import legible

LONGEST = 4000
"""Characters of a problem that are printed."""


class Terminal(Console):
    """A console to which names and reasons are text: brackets are no markup, and what is not printable is written out."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=legible(segment.text))


def figures(console: Terminal, headings: Sequence[str], rows: Sequence[Sequence[str]], less: Sequence[str], texts: Collection[str], title: str | None = None) -> None:
    """Print figures as a table: numbers to the right, words never broken.

    Args:
        headings: of the columns.
        rows: one text for each of them.
        less: headings of columns that a narrow terminal goes without, the first of them first.
        texts: headings of columns that hold words.
        title: of the table.
    """
    columns = dict(zip(headings, zip(*rows, strict=True), strict=True))
    widths = {heading: max(map(len, [heading, *column])) for heading, column in columns.items()}

    def fit() -> bool:
        return sum(widths.values()) + 2 * (len(widths) - 1) <= console.width

    if not fit():
        widths = {heading: max(map(len, [*heading.split(), *column])) for heading, column in columns.items()}
    for heading in less:
        if not fit():
            del widths[heading]
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold")
    for heading, width in widths.items():
        table.add_column(heading, justify="left" if heading in texts else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*(text for heading, text in zip(headings, row, strict=True) if heading in widths))
    console.print(table)


def complain(problem: str) -> None:
    """Print a problem as one line on standard error; of a very long one, such as a name that a file was given to do harm, its beginning and its end."""
    line = legible(problem if len(problem) <= LONGEST else f"{problem[: LONGEST - 200]} … {problem[-200:]}").replace("\n", "\\n")
    print(f"concord: error: {line}", file=sys.stderr)
