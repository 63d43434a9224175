"""What a command says while it works, on standard error: bars on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from concord.conformance.watching import Underway
from concord.terminal import Terminal

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
