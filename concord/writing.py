"""The files that a command writes: looked at before it works, and each written whole when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from concord.conformance import record
from concord.conformance.report import around
from concord.spec.errors import SpecError
from concord.spec.files import obstacle, same_file, write_text

Output = tuple[Path | None, Callable[[], str]]
"""A file, if one was asked for, and what makes its text."""


def path(text: str) -> Path:
    """Read the name of a file or folder on the command line: no name is not the current folder.

    Raises:
        BadParameter: for no name.
    """
    if not text:
        raise typer.BadParameter("a name is required")
    return Path(text)


def check(*paths: Path | None, markdown: Path | None = None, markers: str = "", read: Iterable[Path | None] = ()) -> None:
    """Refuse files that cannot be written, or are one and the same, before anything runs.

    Args:
        markdown: a file that has to have markers of this name.
        read: files that the command reads: none may be replaced.

    Raises:
        SpecError: listing every problem.
    """
    given = [path for path in (*paths, markdown) if path is not None]
    problems = [problem for path in given if (problem := obstacle(path))]
    problems += [f"{other}: is named twice" for one, other in combinations(given, 2) if same_file(one, other)]
    problems += [f"{one}: is read; name another file to write" for one in given for other in read if other is not None and same_file(one, other)]
    try:
        if markdown is not None and not problems:
            around(markdown, markers)
    except SpecError as error:
        problems += error.problems
    if problems:
        raise SpecError(problems)


def write(console: Console, *outputs: Output, problems: Sequence[str] = ()) -> None:
    """Write each file, whatever becomes of the others.

    Args:
        problems: what could not be written before.

    Raises:
        SpecError: listing what could not be written.
    """
    problems = list(problems)
    for path, make in outputs:
        if path is None:
            continue
        try:
            write_text(path, make())
        except SpecError as error:
            problems += error.problems
        else:
            console.print(f"written: {path}", highlight=False, soft_wrap=True)
    if problems:
        raise SpecError(problems)


def outcome(
    found: Any,
    kind: str,
    title: str,
    console: Console,
    json: Path | None,
    html: Path | None,
    show: Callable[[], None],
    markdown: Output = (None, str),
    problems: Sequence[str] = (),
) -> None:
    """Write what a command came to, as :func:`concord.conformance.record.record` takes it, and show it.

    The record is written before anything is shown: what was found is not lost then, whatever becomes of the rest.

    Raises:
        SpecError: listing what could not be written, when the rest was done.
    """
    data = record.record(found, kind, title) if json or html else {}
    lost = list(problems)
    try:
        if json is not None:
            write_text(json, record.text(data))
    except SpecError as error:
        json = None
        lost += error.problems
    show()
    if json is not None:
        console.print(f"written: {json}", highlight=False, soft_wrap=True)
    write(console, (html, lambda: page(data)), markdown, problems=lost)


def page(data: dict[str, Any]) -> str:
    """Return the page of a record."""
    if data["kind"] == "speed":
        from concord.speed.page import page as of_speed  # jinja2 need not be installed where no page is made

        return of_speed(data)
    if data["kind"] == "attention":
        from concord.training.attention.page import page as of_attention

        return of_attention(data)
    if data["kind"] == "experiment":
        from concord.training.experiments.results import page as of_experiment

        return of_experiment(data)
    if data["kind"] == "certificate":
        from concord.porting.certificate.page import page as of_certificate

        return of_certificate(data)
    from concord.conformance.html import page as of_outcome

    return of_outcome(data)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, or holds something.

    Raises:
        SpecError: saying why.
    """
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise SpecError(f"{folder.absolute()}: holds something already; export into an empty folder")
    except OSError as error:
        raise SpecError(f"{folder}: cannot be written: {error.strerror}") from None
