"""``concord diff``: differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from concord import output_files
from concord.conformance.run import record
from concord.conformance.wording import once
from concord.options import Written
from concord.spec.errors import collect
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.porting.comparison import Comparison
    from concord.porting.difference import TensorDifference

MOST = 80  # lines about differing tensors


def diff(
    first: Path,
    second: Path,
    *,
    json: Written | None = None,
) -> None:
    """Compare two checkpoints, in any formats, tensor by tensor.

    Args:
        first (A): A checkpoint in any format.
        second (B): Another checkpoint, of the same or a different format.

    Examples: concord diff all-MiniLM-L6-v2 minilm-jax
    """
    from concord.porting import read
    from concord.porting.comparison import compare

    output_files.check(json)
    a, b = collect(lambda: read(first), lambda: read(second))
    with Terminal(stderr=True).status("comparing tensors", spinner="line"):
        comparison = compare(a, b)
    text = record.lines(record.plain(comparison))
    output_files.write((json, lambda: text), show=lambda: _show(comparison, Terminal()))
    raise typer.Exit(comparison.exit_code)


def _show(comparison: Comparison, console: Terminal) -> None:
    for key, (mine, other) in comparison.config.items():
        console.tell(f"configuration: {key} is {mine} in A and {other} in B")
    for name, words in comparison.files.items():
        console.tell(f"{name}: {words}", style="red")
    for names, where in zip(comparison.alone, ("A", "B"), strict=True):
        if names:
            console.tell(f"files only in {where}: {', '.join(names)}")
    lines = once((name, "missing in B", "") for name in comparison.missing)
    lines += once((name, "only in B", "") for name in comparison.extra)
    lines += _differences(comparison.pairs)
    lines += _differences(comparison.others.pairs, ", which is not a parameter")
    for line in lines[:MOST]:
        console.tell(line, style=None if line.startswith(" ") else "red")
    if len(lines) > MOST:
        console.tell(f"and {len(lines) - MOST} more lines (use --json)")
    reasons = comparison.others.apart.items()
    for line in once(
        (name, f"{reason.removeprefix('is ')}; not part of this model, so not compared", reason)
        for name, reason in reasons
    ):
        console.tell(line, style="magenta")
    console.tell(comparison.summary, style="bold")


def _differences(pairs: Iterable[TensorDifference], suffix: str = "") -> list[str]:
    return once(
        (f"{pair.name}{suffix}", pair.words + f"\n  likely: {pair.cause}" * bool(pair.cause), pair.reason)
        for pair in pairs
    )
