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


def memory() -> tuple[int, int]:
    """Return this machine's memory and what is free of it, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        import psutil  # only where the system does not say it in files

        found = psutil.virtual_memory()
        return int(found.total), int(found.available)
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sizes["MemTotal"], sizes["MemAvailable"]


def resident(pid: int) -> int:
    """Return the resident size of a process in bytes; 0 for one that has ended."""
    if Path("/proc/meminfo").exists():
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def gpus() -> list[str]:
    """Return what the GPUs of this machine are called, whichever framework sees them; those of NVIDIA alone."""
    described = [path.read_text() for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    models = [line.partition(":")[2].strip() for text in described for line in text.splitlines() if line.startswith("Model:")]
    return models or [f"NVIDIA device {path.name.removeprefix('nvidia')}" for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


def processor() -> str | None:
    """Return what the processor calls itself, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
