"""Failures as folders: the case as ``concord export-case`` writes it, and ``found.json`` that says what it found."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

from concord.conformance import record
from concord.conformance.campaign import Job, Settings
from concord.conformance.dump import export_cases, read_exported
from concord.conformance.fuzz.findings import Failure, Findings, machine
from concord.spec.cases.files import read_object
from concord.spec.errors import SpecError

FORMAT = "concord.found/1"

SETTINGS = ("device", "implementation", "execution", "precision")
"""What of the settings of a hunt is kept: the options by which a failure is run again."""


def write_failures(folder: Path, findings: Findings, settings: Settings) -> dict[str, Path]:
    """Write each failure as a folder that ``concord fuzz --replay`` runs again.

    A folder of an earlier hunt that found the same case is replaced.

    Returns:
        Failure's name to folder.

    Raises:
        SpecError: if a folder cannot be written.
    """
    written = {}
    for failure in findings.failures:
        target = folder / f"{failure.name}-{failure.dtype}"
        if (target / "found.json").is_file():
            shutil.rmtree(target)
        (written[failure.name],) = export_cases(folder, [_named(failure)])
        about = {
            "format": FORMAT,
            **failure.as_dict(),
            "versions": {**machine(), failure.backend: findings.environments.get(failure.backend, {}).get("version")},
            "settings": {name: getattr(settings, name) for name in SETTINGS},
        }
        record.write(target / "found.json", about)
    return written


def _named(failure: Failure) -> Job:
    return failure.case.job(failure.name)


def read_found(folder: Path) -> list[tuple[Job, dict[str, Any]]]:
    """Read the failures under a folder.

    Returns:
        For each the job that runs it again, and what ``found.json`` says.

    Raises:
        SpecError: if there is none, or a file is missing or corrupt; every such file is listed.
    """
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder")
    found, problems = [], []
    for path in sorted(folder.rglob("found.json")):
        try:
            about = _about(path)
            request, manifest = read_exported(path.parent)
        except SpecError as error:
            problems += error.problems
            continue
        job = Job(str(manifest["group"]), str(manifest["case"]), request.dtype, request.part, request.config, request.weights, request.batch)
        found.append((job, about))
    if problems:
        raise SpecError(problems)
    if not found:
        raise SpecError(f"{folder}: holds no found.json; 'concord fuzz' writes such folders")
    return found


def _about(path: Path) -> dict[str, Any]:
    about = read_object(path)
    if about.get("format") != FORMAT:
        raise SpecError(f"{path}: has format {about.get('format')!r} but must have {FORMAT!r}")
    missing = [key for key in ("backend", "status", "settings") if key not in about]
    if missing:
        raise SpecError(f"{path}: lacks {', '.join(map(repr, missing))}")
    return about


def command(folder: Path, backend: str, settings: Settings) -> str:
    """Return the command that runs a failure again."""
    usual = Settings()
    options = [f"--{name} {getattr(settings, name)}" for name in SETTINGS if getattr(settings, name) != getattr(usual, name)]
    return " ".join(["concord fuzz", *options, f"--backend {shlex.quote(backend)}", f"--replay {shlex.quote(str(folder))}"])
