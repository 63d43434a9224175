"""The log of a run: JSON Lines.

A line says what is known of step, epoch, seconds, loss, learning_rate, norm, tokens_per_second, memory_mib,
dev_loss and dev_accuracy; ``loss`` and ``norm`` are means since the line before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from concord.spec.files import parse_json, read_text, refusing

FILE = "log.jsonl"


def cut(run: Path, length: int) -> None:
    """Begin a log, or go on with one: what a kill left behind the bytes that belong to the run goes.

    Raises:
        SpecError: if it cannot be written.
    """
    with refusing(run / FILE), (run / FILE).open("ab") as file:
        file.truncate(length)


def add(run: Path, **row: Any) -> None:
    """Add a line to the log of a run.

    Raises:
        SpecError: if it cannot be written.
    """
    with refusing(run / FILE), (run / FILE).open("ab") as file:
        file.write((json.dumps(row) + "\n").encode())


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log.

    Raises:
        SpecError: if it cannot be read.
    """
    path = run / FILE
    lines = read_text(path).splitlines()
    return [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
