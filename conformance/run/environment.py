"""Diagnosis of the installed backends and this machine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from concord.backends import machine as here
from concord.backends.cores import available_cores
from concord.backends.wire import WorkerFailure
from concord.conformance.run.campaign import Setup


@dataclass(frozen=True)
class Installed:
    """A backend on this machine."""

    backend: str
    status: str  # "ready", or the status of a failed worker
    facts: dict[str, Any]  # its description and import time
    advice: list[str]  # lines of advice


def machine() -> dict[str, Any]:
    """This machine's facts."""
    total, free = here.memory()
    return {
        **here.describe(),
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        "gpus": ", ".join(here.gpus()) or "none",
    }


def diagnose(names: Sequence[str], settings: Setup) -> list[Installed]:
    """Start each backend and read its description."""

    def ask(name: str) -> Installed:
        try:
            with settings.open(name) as worker:
                facts = {**worker.description, "import_seconds": round(worker.import_seconds, 1)}
            return Installed(name, "ready", facts, _advice(facts, settings))
        except WorkerFailure as failure:
            advice = ["see the message; --python NAME=PATH gives the interpreter of another environment"]
            return Installed(name, failure.status, {"message": failure.detail}, advice)

    with ThreadPoolExecutor(max_workers=available_cores()) as pool:
        return list(pool.map(ask, names))


def conclusions(diagnoses: Sequence[Installed], settings: Setup) -> list[str]:
    """Advice about differing defaults and GPUs."""
    ready = [diagnosis for diagnosis in diagnoses if diagnosis.status == "ready"]
    lines = [line for kind in ("cpu", "cuda") if (line := _differing(ready, kind))]
    has_gpu = any(
        str(device).startswith("cuda") for diagnosis in ready for device in diagnosis.facts.get("devices", [])
    )
    if not has_gpu and not here.gpus():
        lines.append("no GPU here; docs/guides/gpu.md describes measurements on a GPU")
    elif not has_gpu and settings.device == "cpu":
        lines.append(
            "there is a GPU here, but --device cpu hides it from the backends; 'concord doctor --device "
            "cuda' shows how they use it"
        )
    return lines


def _differing(ready: Sequence[Installed], kind: str) -> str | None:
    backends_by_products: dict[str, list[str]] = {}
    for diagnosis in ready:
        products = diagnosis.facts.get("precision_defaults", {}).get("products", {}).get(kind)
        if products:
            backends_by_products.setdefault(products, []).append(diagnosis.backend)
    if len(backends_by_products) < 2:
        return None
    listing = "; ".join(
        f"{', '.join(names)} in {products}" for products, names in backends_by_products.items()
    )
    return (
        f"on {kind}, float32 products differ by default ({listing}), the most common cause of false alarms; "
        "--precision strict, the default of concord check, uses full float32 everywhere"
    )


def _advice(facts: dict[str, Any], settings: Setup) -> list[str]:
    advice = []
    expected, threads = settings.threads or available_cores(), facts.get("threads")
    if isinstance(threads, int) and threads not in (0, expected):
        advice.append(f"it computes with {threads} threads where {expected} were requested")
    if (
        settings.device != "cpu"
        and here.gpus()
        and not any(str(device).startswith("cuda") for device in facts.get("devices", []))
    ):
        advice.append(
            "it sees no GPU though there is one: its wheel may be CPU-only, or built for a CUDA version "
            "other than the driver's"
        )
    missing = {"bfloat16", "float16"} - set(facts.get("dtypes", {}).get(settings.device.split(":")[0], []))
    if missing:
        advice.append(
            f"no {' or '.join(sorted(missing))} on {settings.device}: Concord calls such runs unsupported"
        )
    if "MKL_DEBUG_CPU_TYPE" in facts.get("thread_switches", {}) and "AMD" in (here.processor() or ""):
        advice.append(
            "on AMD processors, its matrix products are several times faster with MKL_DEBUG_CPU_TYPE=5 in "
            "the environment"
        )
    return advice
