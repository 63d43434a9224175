"""What machine and what Python a result comes from."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


def describe() -> dict[str, Any]:
    """Return JSON data about the machine and the process that judges or measures."""
    try:
        concord = version("concord")
    except PackageNotFoundError:  # run from a checkout that is not installed
        concord = None
    return {
        "concord": concord,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def processor() -> str | None:
    """Return what the processor calls itself, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
