"""Failures as folders: the case as ``concord case export`` writes it, and ``found.json`` that says what it
found.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from concord.backends import machine
from concord.conformance import record
from concord.conformance.campaign import Job, Setup
from concord.conformance.dump import Name, case_files, read_job
from concord.conformance.fuzz.findings import Findings
from concord.spec.errors import SpecError, collect, collecting
from concord.spec.files import find, read_as, read_bytes, write_text
from concord.spec.folders import write_folder

FORMAT = "concord.found/1"

SETTINGS = ("device", "implementation", "execution", "precision")
"""What of the settings of a hunt is kept: the options by which a failure is run again."""


@dataclass(frozen=True)
class FoundAbout:
    """What ``found.json`` says that a replay has to know."""

    format: Literal["concord.found/1"]
    backend: Name
    status: Name
    settings: dict[str, str]


def write_failures(folder: Path, findings: Findings, settings: Setup) -> list[str]:
    """Write each failure as a folder that ``concord fuzz --replay`` runs again.

    A hunt that finds a case again finds it written already. Whatever else has its name, of another hunt or no
    finding at all, stays: the new one gets a number. :attr:`Findings.folders` then names the folders.

    Returns:
        What kept others from being written.
    """
    problems: list[str] = []
    for failure in findings.failures:
        about = {
            "format": FORMAT,
            **record.plain(failure),
            "versions": {
                **machine.describe(),
                failure.backend: findings.environments.get(failure.backend, {}).get("version"),
            },
            "settings": {name: getattr(settings, name) for name in SETTINGS},
        }
        files = case_files(failure.case.job(failure.name))
        with collecting(problems):
            written = _write(folder, f"{failure.name}-{failure.dtype}", files, about)
            findings.folders[failure.name] = str(written)
    return problems


def _write(folder: Path, name: str, case: Mapping[str, bytes], about: dict[str, Any]) -> Path:
    for number in itertools.count(1):
        target = folder / (name if number == 1 else f"{name}-{number}")
        try:
            write_folder(target, {**case, "found.json": record.lines(about).encode()})
            return target
        except FileExistsError:
            if _is_of(target, case, about):
                write_text(target / "found.json", record.lines(about))
                return target
    raise AssertionError


def _is_of(target: Path, case: Mapping[str, bytes], about: Mapping[str, Any]) -> bool:
    """Return whether a folder holds a case, found by the same backend under the same settings."""
    try:
        known = read_as(target / "found.json", FoundAbout)
        same = all(read_bytes(target / name) == content for name, content in case.items())
    except SpecError:
        return False
    return same and (known.backend, known.settings) == (about["backend"], about["settings"])


def read_found(folder: Path) -> list[tuple[Job, FoundAbout]]:
    """Read the failures under a folder.

    Returns:
        For each the job that runs it again, and what ``found.json`` says.

    Raises:
        SpecError: if there is none, or a file is missing or corrupt; every such file is listed.
    """
    paths = find(folder, "found.json")
    if not paths:
        raise SpecError(f"{folder}: holds no found.json; 'concord fuzz' writes such folders")

    def read(path: Path) -> tuple[Job, FoundAbout]:
        about = read_as(path, FoundAbout)
        return read_job(path.parent), about

    return collect(*(partial(read, path) for path in paths))


def command(folder: str, backend: str, settings: Setup) -> str:
    """Return the command that runs a failure again."""
    usual = Setup()
    options = [
        f"--{name} {getattr(settings, name)}"
        for name in SETTINGS
        if getattr(settings, name) != getattr(usual, name)
    ]
    return " ".join(
        [
            "concord fuzz",
            *options,
            f"--backend {shlex.quote(backend)}",
            f"--replay {shlex.quote(folder)}",
        ]
    )
