"""Processor cores of this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Number of usable cores: a container or ``taskset`` may exclude some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
