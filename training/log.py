"""The log of a run: JSON Lines."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from concord.spec.errors import SpecError
from concord.spec.files import parse_json, read_text

COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "loss",
    "learning_rate",
    "norm",
    "tokens_per_second",
    "memory_mib",
    "dev_loss",
    "dev_accuracy",
)
"""What a line may say, if it is known; ``loss`` and ``norm`` are means since the line before."""

FILE = "log.jsonl"


class Log:
    """The log of a run. Use it in a ``with`` block.

    Args:
        run: the folder of the run.
        length: bytes that belong to the run so far: what a kill left behind them is cut off.

    Raises:
        SpecError: if it cannot be written.
    """

    def __init__(self, run: Path, length: int) -> None:
        self.run = run
        try:
            self.file = (run / FILE).open("ab")
            self.file.truncate(length)
        except OSError as error:
            raise self._refused(error) from None

    def add(self, **row: Any) -> None:
        """Add a line.

        Raises:
            SpecError: if it cannot be written.
        """
        try:
            self.file.write((json.dumps(row) + "\n").encode())
            self.file.flush()
        except OSError as error:
            raise self._refused(error) from None

    def length(self) -> int:
        """Return how many bytes it has."""
        return os.fstat(self.file.fileno()).st_size

    def _refused(self, error: OSError) -> SpecError:
        return SpecError(f"{self.run}: the log cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()


def read_log(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log.

    Raises:
        SpecError: if it cannot be read.
    """
    path = run / FILE
    lines = read_text(path).splitlines()
    return [parse_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
