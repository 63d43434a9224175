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
from functools import partial
from typing import Any

from concord.backends import SEARCHED, heaps
from concord.backends.bench import Bench
from concord.backends.interface import Backend, Unsupported
from concord.backends.training_sessions import TRAINING, TrainingSessions
from concord.backends.wire import Payload, decode_request, encode_run, pack, payload_of, returned
from concord.spec.errors import SpecError

LINE = 1000
"""Characters of an error that are told in one line."""

Reply = tuple[str, str, Payload]
"""Status, JSON and arrays. Status: ``ok``, ``unsupported``, ``refused``, ``error``, ``absent`` or
``broken``."""


def serve(channel: Any, target: str) -> None:
    """Answer requests.

    Args:
        channel: of execnet. Every message is ``(operation, header, size)``, every answer ``(status, header,
            size)``, each with a payload of so many bytes after it (:mod:`concord.backends.wire`).
        target: the backend's class, ``"package.module:Class"``.
    """
    started = time.perf_counter()
    status, payload = _construct(target)
    if not isinstance(payload, dict):
        backend, payload = payload, {}
        status, described, _ = _answer(lambda: ("ok", json.dumps(backend.describe()), Payload(b"")))
        payload, status = json.loads(described), "ok" if status == "ok" else "broken"
    channel.send(
        (status, json.dumps({"describe": payload, "import_seconds": time.perf_counter() - started}), 0)
    )
    if status != "ok":
        return
    bench, sessions = Bench(backend), TrainingSessions(backend)

    for operation, header, size in channel:
        given = payload_of(size, channel.receive)
        status, said, answer = _answer(partial(_perform, backend, bench, sessions, operation, header, given))
        large = max(size, answer.size) > heaps.LARGE
        if large:
            heaps.give_back()  # before the asker holds the answer too
        channel.send((status, said, answer.size))
        for chunk in answer.chunks():
            channel.send(chunk)
        if large:
            heaps.give_back()


def _construct(target: str) -> tuple[str, Any]:
    """Return the backend, or why there is none."""
    module, _, name = target.partition(":")
    try:
        made = getattr(importlib.import_module(module), name, None)
        if made is None:
            return "broken", {"message": f"module {module!r} has no {name!r}"}
        return "ok", made()
    except ModuleNotFoundError as error:
        sought = (
            error.name is not None
            and f"{module}.".startswith(f"{error.name}.")
            and not module.startswith("concord.")
        )
        return "absent", {"message": f"{error}; {SEARCHED}" if sought else f"{error}"}
    except Exception as error:
        return "broken", {"message": _told(error)}


def _perform(
    backend: Backend, bench: Bench, sessions: TrainingSessions, operation: str, header: str, given: Payload
) -> Reply:
    if operation.startswith(TRAINING):
        return _packed(*sessions.perform(operation, (header, given.take())))
    if operation not in ("run", "round_trip"):
        return _packed(*bench.perform(operation, header))
    request = decode_request((header, given.take()))
    request.validate(where=f"backend={backend.name}")
    if operation == "round_trip":
        return _packed("{}", pack(backend.round_trip(request)))  # type: ignore[attr-defined]
    run = returned(backend.run(request))
    run.info["peak_memory_bytes"] = peak_memory()
    return _packed(*encode_run(run))


def _packed(header: str, arrays: bytes) -> Reply:
    return "ok", header, Payload(arrays)


def _answer(function: Callable[[], Reply]) -> Reply:
    try:
        return function()
    except Unsupported as error:
        return "unsupported", json.dumps({"message": str(error)}), Payload(b"")
    except SpecError as error:
        return "refused", json.dumps({"message": str(error)}), Payload(b"")
    except MemoryError:
        raise
    except Exception as error:
        return "error", json.dumps({"message": _told(error)}), Payload(b"")


def _told(error: Exception) -> str:
    """Return an error in one line, and write all of it to standard error."""
    try:
        traceback.print_exception(error, file=sys.stderr)
        first_line = next(iter(str(error).strip().splitlines()), "")
    except Exception:  # an error may fail to say what it is
        first_line = "it cannot be told as text"
    return f"{type(error).__name__}: {first_line}"[:LINE]


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
