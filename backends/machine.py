"""The machine and Python version of a result."""

from __future__ import annotations

import os
import platform
import time
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
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that is not installed
        installed = None
    return {
        "concord": installed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "cores": available_cores(),
    }


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


def processor_seconds(pid: int) -> float | None:
    """A process's CPU time; None if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


# Seconds for a process to become idle after its work.
REST = 0.5


def cores_busy(seconds: float = 0.5) -> float:
    """Count busy cores while this process waits."""
    return float(psutil.cpu_percent(interval=seconds)) / 100 * (os.cpu_count() or 1)


def wait_for_rest(pid: int, longest: float = REST) -> None:
    """Wait until all threads of a process are idle."""
    # Thread pools spin for a while before they sleep, which would slow down the next measurement.
    tasks, end, resting = Path(f"/proc/{pid}/task"), time.perf_counter() + longest, 0
    while resting < 2 and time.perf_counter() < end:  # twice: a thread may just be waiting for another
        time.sleep(0.005)
        resting = resting + 1 if not any(_runs(task) for task in tasks.glob("*/stat")) else 0


def _runs(task: Path) -> bool:
    try:
        return task.read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def gpus() -> list[str]:
    """Names of all NVIDIA GPUs, including those that no framework sees."""
    descriptions = [
        path.read_text() for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    ]
    models = [
        line.partition(":")[2].strip()
        for text in descriptions
        for line in text.splitlines()
        if line.startswith("Model:")
    ]
    return models or [
        f"NVIDIA device {path.name.removeprefix('nvidia')}"
        for path in sorted(Path("/dev").glob("nvidia[0-9]*"))
    ]


def processor() -> str | None:
    """The processor's name with family and model, if the system provides them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    first = lines[: lines.index("")] if "" in lines else lines
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first)}
    # Names of virtual machines, such as "AMD EPYC", are shared by generations of different speed.
    numbers = [f"{key.split()[-1]} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    name = facts.get("model name")
    return f"{name} ({', '.join(numbers)})" if name and numbers else name
