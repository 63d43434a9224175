"""Failures as folders: the case as ``concord case export`` writes it, and ``found.json`` that says what it
found.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from pathlib import Path

from concord.backends import machine
from concord.conformance import record
from concord.conformance.campaign import Setup
from concord.conformance.dump import case_files
from concord.conformance.fuzz.findings import Failure, Findings
from concord.spec.errors import collecting
from concord.spec.folders import write_folder

SETTINGS = ("device", "implementation", "execution", "precision")
"""What of the settings of a hunt is kept: the options by which a failure is run again."""


def write_failures(folder: Path, findings: Findings, settings: Setup) -> list[str]:
    """Write each failure as a folder that ``concord case run`` runs again.

    Each then says where. The names of folders say what is in them: the same finding under
    the same settings is written once, and none takes the place of another.

    Returns:
        What kept others from being written.
    """
    problems: list[str] = []
    for failure in findings.failures:
        backend, dtype = failure.result.backend, failure.result.dtype
        chosen = {name: getattr(settings, name) for name in SETTINGS}
        about = {
            **record.plain(failure),
            "versions": {
                **machine.describe(),
                backend: findings.environments.get(backend, {}).get("version"),
            },
            "settings": chosen,
        }
        case = case_files(failure.case.job(failure.name))
        content = hashlib.sha256(b"".join([*case.values(), str([backend, chosen]).encode()]))
        target = folder / f"{failure.name}-{dtype}-{content.hexdigest()[:8]}"
        with collecting(problems):
            with contextlib.suppress(FileExistsError):
                write_folder(target, {**case, "found.json": record.lines(about).encode()})
            failure.folder = str(target)
    return problems


def commands(failure: Failure, settings: Setup) -> list[str]:
    """Return the commands that run a failure again, and make it small, from the folder that it was
    written to.
    """
    usual = Setup()
    options = [
        f"--{name} {getattr(settings, name)}"
        for name in SETTINGS
        if getattr(settings, name) != getattr(usual, name)
    ]
    how = " ".join([*options, f"--backend {shlex.quote(failure.result.backend)}"])
    folder = shlex.quote(failure.folder)
    return [
        f"concord case run {folder} {how}",
        f"concord case reduce {folder} {how} -o smaller",
    ]
