"""What a command says while it works, on standard error: bars on a terminal, else a line for each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from concord.conformance.watching import Underway
from concord.terminal import Terminal

PARTS = 10
"""Into how many parts work is divided where each has a line."""

EVERY = 100
"""After how many there is a line where nobody knows how many there will be."""

MINUTE = 60.0
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
    done = dict.fromkeys(names, 0)
    with bars(names, total) as advance:

        def progress(name: str, now: str) -> None:
            done[name] += now != "started" and not isinstance(now, Underway)
            advance(name, done[name], now)

        yield progress


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Say what is being done."""
    console, started = Terminal(stderr=True), time.perf_counter()

    def now(text: str) -> str:
        return f"{time.perf_counter() - started:4.0f} s  {text}"

    if not console.is_terminal:
        yield lambda text: console.print(now(text), highlight=False, soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(now(text)))


_text = partial(TextColumn, markup=False)


def _lines(console: Console, total: int | None, unit: str) -> Advance:
    """Return what prints a line at the start, for each part, and each minute in which something was done."""
    started, said = time.perf_counter(), dict[str, tuple[int, int, int]]()

    def advance(name: str, done: int, now: str) -> None:
        seconds = time.perf_counter() - started
        part, minute = done * PARTS // total if total else done // EVERY, int(seconds // MINUTE)
        last_part, last_minute, last_done = said.get(name, (-1, 0, -1))
        if part > last_part or (minute > last_minute and (done > last_done or isinstance(now, Underway))):
            said[name] = part, minute, done
            words = (f"{done} of {total}" if total else str(done), unit, f"({now})" if now else "")
            console.print(
                f"{seconds:4.0f} s  {name}: {' '.join(filter(None, words))}", highlight=False, soft_wrap=True
            )

    return advance
