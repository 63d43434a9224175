"""What is installed here, what it would run on, and what to do about what is not as it should be."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from backends.worker import WorkerFailure
from conformance.campaign import Settings

EXTRAS = {"torch": "torch", "tf": "tf", "paddle": "paddle", "jax": "jax"}


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about one backend.

    Attributes:
        status: ``"ready"``, ``"absent"``, ``"broken"`` or another status of a failed worker.
        facts: what the backend says of itself, with the seconds that its import took.
        advice: what to do, one line each.
    """

    backend: str
    status: str
    facts: dict[str, Any]
    advice: list[str]


def machine() -> dict[str, str]:
    """Return the facts of this machine that results depend on."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB, {psutil.virtual_memory().available / 2**30:.1f} GiB free",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def diagnose(names: Sequence[str], settings: Settings, done: Callable[[str], None] = lambda name: None) -> list[Diagnosis]:
    """Start each backend and ask it what it is.

    Args:
        done: called with each name when it has been asked.
    """

    def ask(name: str) -> Diagnosis:
        try:
            with settings.open(name) as worker:
                facts = {**worker.description, "import_seconds": round(worker.import_seconds, 1)}
            return Diagnosis(name, "ready", facts, _advice(name, facts, settings))
        except WorkerFailure as failure:
            return Diagnosis(name, failure.status, {"message": failure.detail}, [_remedy(name, failure)])
        finally:
            done(name)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(ask, names))


def plain(value: object) -> str:
    """Return a fact as a person writes it."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {plain(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "on", False: "off"}[value]
    return str(value)


def _remedy(name: str, failure: WorkerFailure) -> str:
    if failure.status == "absent" and name in EXTRAS:
        return f"install it with: pip install -e .[{EXTRAS[name]}] -c constraints/py311.txt"
    return "see the message; another environment's interpreter can be given with --python NAME=PATH"


def _advice(name: str, facts: dict[str, Any], settings: Settings) -> list[str]:
    advice = []
    wanted, threads = settings.threads or os.cpu_count() or 1, facts.get("threads")
    if isinstance(threads, int) and threads not in (0, wanted):
        advice.append(f"it computes with {threads} threads where {wanted} were asked for")
    missing = {"bfloat16", "float16"} - set(facts.get("dtypes", {}).get(settings.device.split(":")[0], []))
    if missing:
        advice.append(f"no {' or '.join(sorted(missing))} on {settings.device}: such runs are reported as unsupported")
    if "MKL_DEBUG_CPU_TYPE" in facts.get("thread_switches", {}) and "AMD" in _processor():
        advice.append("on AMD processors MKL_DEBUG_CPU_TYPE=5 in the environment makes its matrix products several times faster")
    return advice
