"""The machine and Python version of a result."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from contextlib import suppress
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from concord import DISTRIBUTION
from concord.backends.cores import available_cores
from concord.spec.errors import SpecError


def describe() -> dict[str, Any]:
    """Describe the machine and this process as JSON data."""
    return {
        "concord": installed(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "cores": available_cores(),
    }


def installed() -> str | None:
    """Concord's version; None for a checkout that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def memory() -> tuple[int, int]:
    """Total and available bytes."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def require(needed: int, remedy: str) -> None:
    """Refuse a task that does not fit in the available memory.

    Raises:
        SpecError: with the needed and the available memory.
    """
    _, available = memory()
    if needed > available:
        raise SpecError(
            f"this needs about {needed / 2**30:.1f} GiB of memory, "
            f"but {available / 2**30:.1f} GiB are available: {remedy}"
        )


def resident(pid: int) -> int:
    """A process's resident bytes; 0 if it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def waited(pid: int) -> Counter[str]:
    """Nanoseconds for which each thread of a process has waited for a core; empty if not counted."""
    waits = Counter[str]()
    for path in glob(f"/proc/{pid}/task/*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waits[path] = int(Path(path).read_text().split()[1])
    return waits


def cores_busy() -> float:
    """Count busy cores while this process waits."""
    return float(psutil.cpu_percent(interval=0.5)) / 100 * (os.cpu_count() or 1)


def gpus() -> list[str]:
    """Names of all NVIDIA GPUs, including those that no framework sees."""
    models = [
        model
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for model in re.findall(r"^Model:\s*(.*\S)", path.read_text(), re.M)
    ]
    return models or [
        f"NVIDIA device {path.name.removeprefix('nvidia')}"
        for path in sorted(Path("/dev").glob("nvidia[0-9]*"))
    ]


def processor() -> str | None:
    """The processor's name with family and model, if the system provides them."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return platform.processor() or None
    facts = dict(re.findall(r"^(cpu family|model|model name)\s*: (.*)$", first, re.M))
    if len(facts) < 3:
        return facts.get("model name")
    # Names of virtual machines, such as "AMD EPYC", are shared by generations of different speed.
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
