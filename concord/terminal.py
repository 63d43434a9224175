"""The terminal: what is printed is text and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from concord.backends.wire import legible


class Terminal(Console):
    """A console to which names and reasons are text: brackets are no markup, and what is not printable is written out."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=legible(segment.text))


def complain(problem: str) -> None:
    """Print a problem as one line on standard error."""
    line = legible(problem).replace("\n", "\\n")
    print(f"concord: error: {line}", file=sys.stderr)
