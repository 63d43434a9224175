"""Output files: checked before a command, and written completely afterwards."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import typer

from concord.conformance.run import record
from concord.spec.errors import SpecError, collecting, located, refuse
from concord.spec.files import obstacle, read_json, same_file, write_text
from concord.terminal import Terminal

Output = tuple[Path | None, Callable[[], str]]  # a file, if requested, and a function that returns its text


# Files that the command reads (path()), which its output must not replace.
READ: list[Path] = []


def path(text: str) -> Path:
    """Parse and record the name of a file or folder to read."""
    READ.append(output(text))
    return READ[-1]


def output(text: str) -> Path:
    """Parse the name of a file or folder to write."""
    if not text:  # Path("") would be the current folder
        raise typer.BadParameter("a name is required")
    return Path(text)


def check(*paths: Path | None) -> None:
    """Refuse files that cannot be written, are identical, or would replace the command's input."""
    files = [path for path in paths if path is not None]
    problems = [problem for path in files if (problem := obstacle(path))]
    problems += [f"{b} is named twice as an output" for a, b in combinations(files, 2) if same_file(a, b)]
    refuse(problems)
    refuse(
        [
            f"{path} is an input of this command; name another file to write"
            for path in files
            if _is_read(path)
        ]
    )


def write(*outputs: Output, show: Callable[[], None] = lambda: None, problems: Sequence[str] = ()) -> None:
    """Write each file even if another fails, show the result, then raise all ``problems``."""
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


KINDS = {  # the type of each kind of record
    **record.KINDS,
    "speed": "concord.speed.record_schema:Measurements",
    "certificate": "concord.porting.certificate:Certificate",
}

PAGES = {  # the page of each kind of record that has one
    **dict.fromkeys(("check", "golden", "compare"), "concord.conformance.run.results_page:results_page"),
    "fuzz": "concord.conformance.fuzz.findings_page:findings_page",
    "mutants": "concord.conformance.mutants.detection_page:detection_page",
    "lockstep": "concord.conformance.lockstep.steps_page:steps_page",
    "speed": "concord.speed.speed_page:speed_page",
    "certificate": "concord.porting.certificate:certificate_page",
}


def page(written: record.Record) -> str:
    """Page of a record."""
    text: str = pkgutil.resolve_name(PAGES[written.kind])(written)
    return text


def read_page(path: Path) -> tuple[record.Record, str]:
    """Read a record, and return it with its page."""
    earlier = record.read(path, KINDS)
    with located(str(path)):
        return earlier, page(earlier)


# No command reads such files, so they may be replaced even inside an input folder.
PICTURES = (".html", ".svg", ".png", ".pdf", ".md")


def _is_read(written: Path) -> bool:
    # Either the link or its target may be in an input folder.
    names = (_real(written), _real(written.parent) / written.name)
    inside = any(name.is_relative_to(_real(read)) for name in names for read in READ)
    return any(same_file(written, read) for read in READ) or (
        inside and written.is_file() and not _made(written)
    )


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() fails for circular links


def _made(path: Path) -> bool:
    """Whether a file is an earlier page, picture or record."""
    try:
        return _real(path).suffix in PICTURES or read_json(path).get("schema") == record.SCHEMA
    except (SpecError, AttributeError):
        return False


def check_apart(folder: Path) -> None:
    """Refuse to replace a folder that equals, contains or is inside the command's input."""
    target = _real(folder)
    for read in READ:
        contains = any(_real(path).is_relative_to(target) for path in (read, *read.rglob("*")))
        if contains or target.is_relative_to(_real(read)):
            raise SpecError(
                f"{folder} is, contains or is inside {read}, which the command reads; name another folder "
                "to write"
            )


def check_folder(folder: Path, empty: bool = True) -> None:
    """Refuse a folder that cannot be written, or that must be empty but is not."""
    ancestor = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if problem := obstacle(ancestor / "one"):
        raise SpecError(f"{folder}: cannot be written: {problem.rpartition(': ')[2]}")
    if empty and folder.is_dir() and any(folder.iterdir()):
        raise SpecError(f"{folder.absolute()} is not empty; export into an empty folder")
