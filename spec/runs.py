"""Runs of training: folders of checkpoints, ``step-<number>``, of which the last one says which was the
best.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from concord.spec.checkpoints import CONTENTS
from concord.spec.errors import SpecError
from concord.spec.files import read_json

STEP = re.compile(r"step-(\d{8,})")

PROGRESS = "progress.json"
"""The file of a checkpoint that says how far training had come, and which evaluation was the best."""


def step_folder(run: Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return run / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """Return the steps of which a run has a whole checkpoint, in ascending order.

    Raises:
        SpecError: if it cannot be read.
    """
    try:
        names = os.listdir(run) if run.is_dir() else []
    except OSError as error:
        raise SpecError(f"{run}: cannot be read: {error.strerror}") from None
    return sorted(
        int(match[1])
        for name in names
        if (match := STEP.fullmatch(name)) and (run / name / CONTENTS).is_file()
    )


def place(folder: Path, which: Literal["best", "last"] = "best") -> Path:
    """Return the folder of a checkpoint: of a run's, the best or the last.

    Raises:
        SpecError: if there is none.
    """
    if (folder / CONTENTS).exists():
        return folder
    whole = steps(folder)
    if not whole:
        raise SpecError(
            f"{folder}: "
            f"{'is neither a checkpoint nor a run that has one' if folder.is_dir() else 'no such folder'}"
        )
    last = step_folder(folder, whole[-1])
    best = _best(last / PROGRESS) if which == "best" else None
    return step_folder(folder, best) if best in whole else last


def _best(path: Path) -> int | None:
    """Return the step of the best evaluation; None: nobody says."""
    said = read_json(path)
    best = said.get("best") if isinstance(said, dict) else None
    step = best.get("step") if isinstance(best, dict) else None
    return step if type(step) is int else None
