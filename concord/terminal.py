"""The terminal: what is printed is text and nothing else; on standard error, what a command is doing."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from concord.spec.text import shown

NARROWEST, USUAL = 20, 80
"""Columns below which nothing can be read, and those of a terminal that says nothing else of itself."""


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


def discard(stream: IO[str]) -> None:
    """Have nobody get what is written to a stream that takes nothing more."""
    with suppress(OSError, io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def complain(problem: str) -> None:
    """Print a problem as one line on standard error."""
    print(f"concord: error: {shown(problem)}", file=sys.stderr)


# Progress: bars on a terminal, else a line now and then.

EVERY = 10.0
"""Seconds after which there is another line."""

Advance = Callable[[str, int, str], None]
"""Called with a name, how much of its work is done, and what was done last."""


@contextmanager
def bars(names: Sequence[str], total: int | None, unit: str = "") -> Iterator[Advance]:
    """Show how far each has come.

    Args:
        total: how much there is to do for each, if that is known.
        unit: what is counted.
    """
    console = Terminal(stderr=True)
    if not console.is_terminal:
        yield _lines(console, total, unit)
        return
    columns = (
        _text("{task.description:>8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _text("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        tasks = {name: shown.add_task(name, total=total, now=unit) for name in names}
        yield lambda name, done, now: shown.update(tasks[name], completed=done, now=now or unit)


@contextmanager
def counting(names: Sequence[str], total: int) -> Iterator[Callable[[str, str], None]]:
    """Show how far each has come, told of every job that one has done, and that it has ``"started"``."""
    from concord.conformance.progress import Underway  # with all that judges: a refusal needs none of it

    done = dict.fromkeys(names, 0)
    with bars(names, total) as advance:

        def progress(name: str, now: str) -> None:
            done[name] += now != "started" and not isinstance(now, Underway)
            advance(name, done[name], now)

        yield progress


def telling() -> Callable[[str], None]:
    """Return what says what is being done, a line each."""
    console, started = Terminal(stderr=True), time.perf_counter()
    return lambda text: console.tell(f"{time.perf_counter() - started:4.0f} s  {text}")


_text = partial(TextColumn, markup=False)


def _lines(console: Terminal, total: int | None, unit: str) -> Advance:
    """Return what prints a line at the start, and when some seconds have passed since the last."""
    started, last = time.perf_counter(), dict[str, float]()

    def advance(name: str, done: int, now: str) -> None:
        seconds = time.perf_counter() - started
        if name not in last or done == total or seconds - last[name] >= EVERY:
            last[name] = seconds
            words = (f"{done} of {total}" if total else str(done), unit, f"({now})" if now else "")
            console.tell(f"{seconds:4.0f} s  {name}: {' '.join(filter(None, words))}")

    return advance
