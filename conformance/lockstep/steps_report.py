"""Printing of lockstep training."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from concord.conformance.judging.verdict import NOT_JUDGED, number
from concord.conformance.lockstep.outcome import MODES, Curve, Lockstep, Track
from concord.conformance.run.report import STYLES, indented


def show(found: Lockstep, console: Console, title: str) -> None:
    """Print table and divergences."""
    console.print(title, style="bold")
    console.print(table(found))
    console.print(explanation(found), style="dim")
    for track in found.tracks:
        for line, style in lines(track, found):
            console.print(indented(line, style))
    console.print(f"{found.seconds:.0f} s in all")


def table(found: Lockstep) -> Table:
    """Largest errors in tolerances."""
    tracks = found.tracks
    columns = [Column(track.backend, justify="right", overflow="fold") for track in tracks]
    drawn = Table("", *columns)
    statuses = ((track.status, STYLES.get(track.status, "bold magenta")) for track in tracks)
    drawn.add_row("", *(Text(status, style) for status, style in statuses))
    drawn.add_row("steps", *(str(track.steps) for track in tracks))
    drawn.add_row("diverge", *(str(track.diverged) for track in tracks))
    for section in found.sections:
        drawn.add_row(section, *(_error(track.curve(section), found.mode) for track in tracks))
    return drawn


def _error(curve: Curve | None, mode: str) -> Text:
    if curve is None:
        return Text("–")
    if not curve.judged:
        return Text(NOT_JUDGED, style="yellow")
    return Text(number(curve.largest), style="bold red" if curve.largest > 1 and mode == MODES[0] else "")


def explanation(found: Lockstep) -> str:
    """Explain the table."""
    how = (
        "each step starts from the reference's weights and state, and the second from the backend's own"
        if found.mode == MODES[0]
        else "each backend continues from its own last step, unjudged: correct backends drift apart too"
    )
    return f"Largest error of any step, in tolerances; {found.mode}: {how}."


def unjudged(track: Track, found: Lockstep) -> str:
    """Describe unjudged sections, the reason, and a remedy."""
    sections = [
        f"{curve.section} at {curve.unjudged} of {track.steps} steps"
        for curve in track.curves
        if curve.unjudged
    ]
    if not sections:
        return ""
    names = ", ".join(line.partition(" ")[0] for line in found.lost)
    why = (
        f"{found.dtype} cannot represent the recipe's {names} (OPT-11)"
        if names
        else f"the values they are computed from are out of the range of {found.dtype}"
    )
    return (
        f"not judged: {', '.join(sections)}: {why}; train with values that {found.dtype} can represent, or "
        "in another precision (--dtype float32)"
    )


def lines(track: Track, found: Lockstep) -> list[tuple[str, str]]:
    """Describe divergence, unjudged sections, and failure."""
    described = [(f"{track.backend} diverges first at {track.first.text}", "bold red")] if track.first else []
    if why := unjudged(track, found):
        described.append((f"{track.backend}: {why}", "yellow"))
    if track.detail:
        after = f" after {track.steps} steps" if track.steps else ""
        described.append((f"{track.backend}: {track.status}{after}: {track.detail}", "bold magenta"))
    return described + [(f"  {line}", "dim") for line in track.stderr.splitlines()[-4:]]
