"""Results as data: the JSON that ``--json`` writes (docs/guides/json.md)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from conformance.campaign import Report, Result
from conformance.comparison import Row
from spec.errors import SpecError

SCHEMA = "concord.report/1"


def record(report: Report, kind: str, complete: bool = False) -> dict[str, Any]:
    """Return a report as JSON data.

    Args:
        kind: ``"check"`` or ``"golden"``.
        complete: whether to keep the row of every tensor; otherwise only of those that do not agree.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "exit_code": report.exit_code,
        "seconds": report.seconds,
        "machine": {"python": platform.python_version(), "numpy": np.__version__, "system": platform.platform(), "cores": os.cpu_count()},
        "settings": dataclasses.asdict(report.settings),
        "backends": report.environments,
        "notes": report.notes,
        "results": [_result(result, complete) for result in report.results],
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON data to a file, whole or not at all.

    Raises:
        SpecError: if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise SpecError(f"{path}: cannot be written: {error.strerror}") from None


def _result(result: Result, complete: bool) -> dict[str, Any]:
    data: dict[str, Any] = {key: getattr(result, key) for key in ("backend", "group", "case", "part", "dtype", "status", "detail", "seconds")}
    if result.verdict:
        data["worst"] = result.worst
        data["first_divergence"] = result.first_divergence.tensor if result.first_divergence else None
        data["tensors"] = [_row(row) for row in result.verdict.table if complete or row.status != "agrees"]
    if result.stderr:
        data["stderr"] = result.stderr
    return data


def _row(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "element": list(row.element)}


def _finite(value: Any) -> Any:
    """Return JSON data with what JSON has no number for as text: ``"inf"``, ``"-inf"``, ``"nan"``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value
