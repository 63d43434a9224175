"""The terminal: plain text on standard output, progress on standard error."""

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
from rich.table import Column
from rich.text import Text

from concord.spec.text import shown

# Columns: the minimum for legibility, and the default for terminals of unknown width.
NARROWEST, USUAL = 20, 80


class Terminal(Console):
    """A console that escapes text (:func:`~concord.spec.text.shown`) and has no markup."""

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if self.width < NARROWEST:
            self.width = USUAL

    def on_broken_pipe(self) -> None:
        """Continue silently."""
        # As with ``| head``: the work is done, and its exit code remains valid.
        self.quiet = True
        discard(self.file)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string before its width is measured."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape a text."""
        if isinstance(renderable, Text) and (text := shown(renderable.plain)) != renderable.plain:
            renderable = Text(text, renderable.style, end=renderable.end)
        return super().render(renderable, options)

    def tell(self, text: str, style: str | None = None) -> None:
        """Print a text as one line that only the terminal wraps."""
        self.print(shown(text), style=style, soft_wrap=True)


def discard(stream: IO[str]) -> None:
    """Discard all further output to a stream."""
    # Python flushes at exit, where a closed pipe would raise an error again.
    with suppress(OSError, io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def complain(problem: str) -> None:
    """Print a problem as one line on standard error."""
    print(f"concord: error: {shown(problem)}", file=sys.stderr)


# Progress: bars on a terminal, otherwise occasional lines.

EVERY = 10.0  # seconds between lines

Advance = Callable[[str, int, str], None]  # a name, the amount of work done, the last step


@contextmanager
def bars(names: Sequence[str], total: int | None, unit: str = "") -> Iterator[Advance]:
    """Show each name's progress in ``unit``, towards a total that may be unknown."""
    console = Terminal(stderr=True)
    if not console.is_terminal:
        yield _lines(console, total, unit)
        return
    # A bar without a total would say nothing. Texts wrap, so that a narrow terminal cuts nothing.
    bar = [BarColumn(16), MofNCompleteColumn()] if total else []
    columns = (_text("{task.description:>8}"), TimeElapsedColumn(), *bar, _text("{task.fields[now]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=total, now=unit) for name in names}
        yield lambda name, done, now: progress.update(tasks[name], completed=done, now=now or unit)


@contextmanager
def counting(names: Sequence[str], total: int) -> Iterator[Callable[[str, str], None]]:
    """Count the finished jobs of each name; ``"started"`` does not count."""
    from concord.conformance.progress import Underway  # this imports the judge, which a refusal does not need

    counts = dict.fromkeys(names, 0)
    with bars(names, total) as advance:

        def progress(name: str, now: str) -> None:
            counts[name] += now != "started" and not isinstance(now, Underway)
            advance(name, counts[name], now)

        yield progress


def telling() -> Callable[[str], None]:
    """A function that prints each step with the elapsed time."""
    console, started = Terminal(stderr=True), time.perf_counter()
    return lambda text: console.tell(f"{time.perf_counter() - started:4.0f} s  {text}")


_text = partial(TextColumn, markup=False, table_column=Column())


def _lines(console: Terminal, total: int | None, unit: str) -> Advance:
    started, last = time.perf_counter(), dict[str, float]()

    def advance(name: str, done: int, now: str) -> None:
        seconds = time.perf_counter() - started
        if name not in last or done == total or seconds - last[name] >= EVERY:
            last[name] = seconds
            count = f"{done} of {total} {unit}" if total else f"{done} {unit}" if unit or done else ""
            words = f"{count.strip()} ({now})" if count and now else count.strip() or now
            console.tell(f"{seconds:4.0f} s  {name}: {words}")

    return advance
