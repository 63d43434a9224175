"""What machine and what Python a result comes from."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from concord import DISTRIBUTION


def describe() -> dict[str, Any]:
    """Return JSON data about the machine and the process that judges or measures."""
    try:
        installed = version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout that is not installed
        installed = None
    return {
        "concord": installed,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
    }


def memory() -> tuple[int, int]:
    """Return this machine's memory and what is free of it, in bytes."""
    found = psutil.virtual_memory()
    return int(found.total), int(found.available)


def resident(pid: int) -> int:
    """Return the resident size of a process in bytes; 0 for one that has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def marked(mark: str) -> list[int]:
    """Return the processes that have a mark in their environment; none where the system does not say.

    Its text is sent to workers too, so it stands on its own.
    """
    import os

    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(name))
        except (OSError, ValueError):  # ended, another user's, or no process
            pass
    return found


def held_by(pids: Iterable[int], limit: int) -> int:
    """Return how many bytes processes hold together.

    What they share counts once where that decides on which side of a limit it is.
    """
    sizes = {pid: resident(pid) for pid in pids}
    return (
        sum(sizes.values())
        if sum(sizes.values()) <= limit
        else sum(_proportional(pid, size) for pid, size in sizes.items())
    )


def _proportional(pid: int, size: int) -> int:
    try:
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", size))  # Linux alone says it
    except psutil.Error:
        return size


def processor_seconds(pid: int) -> float | None:
    """Return how long the threads of a process have computed, all together; None for one that has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


REST = 0.5
"""Seconds that a process is given to come to rest after its work."""


def cores_busy(seconds: float = 0.5) -> float:
    """Return how many cores are kept busy, by whatever runs, while this process waits."""
    return float(psutil.cpu_percent(interval=seconds)) / 100 * (os.cpu_count() or 1)


def wrong_host(host: str) -> str:
    """Say what is wrong with a host that ssh would take for something else, such as an option.

    Args:
        host: ``"host"`` or ``"host:/path/to/checkout"``.

    Returns:
        The problem; nothing if there is none.
    """
    name = host.partition(":")[0]
    right = re.fullmatch(r"\w[\w.%-]*(@\w[\w.%-]*)?", name)
    return "" if right else f"host is {name!r} but must be a name or an address, or USER@HOST"


def wait_for_rest(pid: int, longest: float = REST) -> None:
    """Wait until no thread of a process runs, or wants to.

    Pools of threads spin for a while before they sleep.

    Args:
        longest: seconds after which to go on all the same.
    """
    tasks, end, resting = Path(f"/proc/{pid}/task"), time.perf_counter() + longest, 0
    while (
        resting < 2 and time.perf_counter() < end
    ):  # seen twice: between two glances a thread may just have waited for another
        time.sleep(0.005)
        resting = resting + 1 if not any(_runs(task) for task in tasks.glob("*/stat")) else 0


def _runs(task: Path) -> bool:
    try:
        return task.read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def gpus() -> list[str]:
    """Return what the GPUs of this machine are called, whichever framework sees them.

    Those of NVIDIA alone.
    """
    described = [path.read_text() for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    models = [
        line.partition(":")[2].strip()
        for text in described
        for line in text.splitlines()
        if line.startswith("Model:")
    ]
    return models or [
        f"NVIDIA device {path.name.removeprefix('nvidia')}"
        for path in sorted(Path("/dev").glob("nvidia[0-9]*"))
    ]


def processor() -> str | None:
    """Return what the processor calls itself, where the system says so."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
