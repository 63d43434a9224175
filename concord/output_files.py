"""Output files: looked at before a command works, and each written whole when it is done."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import typer

from concord.conformance.run import record
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.files import obstacle, read_json, same_file, write_text
from concord.terminal import Terminal

Output = tuple[Path | None, Callable[[], str]]
"""A file, if one was asked for, and what makes its text."""


READ: list[Path] = []
"""The files and folders that the command reads (:func:`path`): what it writes must not take their place."""


def path(text: str) -> Path:
    """Take the name of a file or folder that a command reads, and note it.

    Raises:
        BadParameter: for no name.
    """
    READ.append(output(text))
    return READ[-1]


def output(text: str) -> Path:
    """Take the name of a file or folder that a command writes: no name is not the current folder.

    Raises:
        BadParameter: for no name.
    """
    if not text:
        raise typer.BadParameter("a name is required")
    return Path(text)


def check(*paths: Path | None) -> None:
    """Refuse files that cannot be written, are one and the same, or would replace what the command reads.

    Raises:
        SpecError: listing every problem.
    """
    given = [path for path in paths if path is not None]
    problems = [problem for path in given if (problem := obstacle(path))]
    problems += [f"{other}: is named twice" for one, other in combinations(given, 2) if same_file(one, other)]
    refuse(problems)
    refuse([f"{one}: is read; name another file to write" for one in given if _is_read(one)])


def write(*outputs: Output, show: Callable[[], None] = lambda: None, problems: Sequence[str] = ()) -> None:
    """Write each file, whatever becomes of the others, then show what a command came to.

    Args:
        problems: what could not be written before.

    Raises:
        SpecError: listing what could not be written, when the rest was done.
    """
    problems, console, written = list(problems), Terminal(), list[Path]()
    for path, make in outputs:
        if path is not None:
            with collecting(problems):
                write_text(path, make())
                written.append(path)
    show()
    for path in written:
        console.tell(f"written: {path}")
    refuse(problems)


KINDS = {
    **record.KINDS,
    "speed": "concord.speed.record_schema:Measurements",
    "certificate": "concord.porting.certificate:Certificate",
}
"""What every kind of record holds."""

PAGES = {
    **dict.fromkeys(("check", "golden", "compare"), "concord.conformance.run.results_page:results_page"),
    "fuzz": "concord.conformance.fuzz.findings_page:findings_page",
    "mutants": "concord.conformance.mutants.detection_page:detection_page",
    "lockstep": "concord.conformance.lockstep.steps_page:steps_page",
    "speed": "concord.speed.speed_page:speed_page",
    "certificate": "concord.porting.certificate:certificate_page",
}
"""What makes the page of each kind."""


def page(made: record.Record) -> str:
    """Return the page of a record."""
    text: str = pkgutil.resolve_name(PAGES[made.kind])(made)
    return text


def read_page(path: Path) -> tuple[record.Record, str]:
    """Return the record in a file, and its page.

    Raises:
        SpecError: listing what keeps it from being one, each with the file.
    """
    made = record.read(path, KINDS)
    with located(str(path)):
        return made, page(made)


PICTURES = (".html", ".svg", ".png", ".pdf", ".md")
"""How names end of what no command reads."""


def _is_read(written: Path) -> bool:
    """Return whether a file is read, or is one of a folder that is; what commands made may be made anew."""
    names = (written.resolve(), written.parent.resolve() / written.name)
    inside = any(name.is_relative_to(read.resolve()) for name in names for read in READ)
    return any(same_file(written, read) for read in READ) or (
        inside and written.is_file() and not _made(written)
    )


def _made(path: Path) -> bool:
    """Say whether a file is what a command writes and none reads in a folder: a page, a picture, a record."""
    try:
        return path.resolve().suffix in PICTURES or read_json(path).get("schema") == record.SCHEMA
    except (SpecError, AttributeError):
        return False


def check_apart(folder: Path) -> None:
    """Refuse a folder to be replaced that is, holds or lies in what the command reads.

    Raises:
        SpecError: saying which.
    """
    target = folder.resolve()
    for read in READ:
        held = any(one.resolve().is_relative_to(target) for one in (read, *read.rglob("*")))
        if held or target.is_relative_to(read.resolve()):
            raise SpecError(
                f"{folder}: is, holds or lies in {read}, which is read; name another folder to write"
            )


def check_folder(folder: Path, empty: bool = True) -> None:
    """Refuse a folder that cannot be written, or holds something.

    Args:
        empty: whether it may hold nothing.

    Raises:
        SpecError: saying why.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if problem := obstacle(there / "one"):
        raise SpecError(f"{folder}: cannot be written: {problem.rpartition(': ')[2]}")
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise SpecError(f"{folder.absolute()}: holds something already; export into an empty folder")
