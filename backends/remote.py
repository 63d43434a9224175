"""The worker's side: it constructs one backend and answers requests until its channel closes.

Imported in the worker process only. The framework is imported when the backend's module is.
"""

from __future__ import annotations

import importlib
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from concord.backends.bench import Bench
from concord.backends.interface import Backend, Unsupported
from concord.backends.wire import decode_request, encode_run, pack
from concord.spec.errors import SpecError

Reply = tuple[str, str, bytes]
"""Status, JSON and arrays. Status: ``ok``, ``unsupported``, ``refused``, ``error``, ``absent`` or ``broken``."""


def serve(channel: Any, target: str) -> None:
    """Answer requests.

    Args:
        channel: of execnet. Every message is ``(operation, header, arrays)``; every answer a :data:`Reply`.
        target: the backend's class, ``"package.module:Class"``.
    """
    started = time.perf_counter()
    status, payload = _construct(target)
    if not isinstance(payload, dict):
        backend, payload = payload, {}
        status, described, _ = _answer(lambda: ("ok", json.dumps(backend.describe()), b""))
        payload, status = json.loads(described), "ok" if status == "ok" else "broken"
    channel.send((status, json.dumps({"describe": payload, "import_seconds": time.perf_counter() - started}), b""))
    if status != "ok":
        return
    bench = Bench(backend)
    for operation, header, arrays in channel:
        channel.send(_answer(lambda: _perform(backend, bench, operation, (header, arrays))))  # noqa: B023 - answered at once


def _construct(target: str) -> tuple[str, Any]:
    """Return the backend, or why there is none."""
    module, _, name = target.partition(":")
    try:
        return "ok", getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError as error:
        return "absent", {"message": f"{error}"}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return "broken", {"message": f"{type(error).__name__}: {error}"}


def _perform(backend: Backend, bench: Bench, operation: str, message: tuple[str, bytes]) -> Reply:
    if operation not in ("run", "round_trip"):
        return "ok", *bench.perform(operation, message[0])
    request = decode_request(message)
    request.validate(where=f"backend={backend.name}")
    if operation == "round_trip":
        return "ok", "{}", pack(backend.round_trip(request))  # type: ignore[attr-defined]
    run = backend.run(request)
    run.info["peak_memory_bytes"] = peak_memory()
    header, arrays = encode_run(run)
    return "ok", header, arrays


def _answer(function: Callable[[], Reply]) -> Reply:
    try:
        return function()
    except Unsupported as error:
        return "unsupported", json.dumps({"message": str(error)}), b""
    except SpecError as error:
        return "refused", json.dumps({"message": str(error)}), b""
    except MemoryError:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        first_line = next(iter(str(error).strip().splitlines()), "")
        return "error", json.dumps({"message": f"{type(error).__name__}: {first_line}"}), b""


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
