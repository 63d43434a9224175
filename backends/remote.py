"""The worker's side: it constructs one backend and answers requests until its channel closes.

Imported in the worker process only. The framework is imported when the backend's module is.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load

from concord.backends import SEARCHED, heaps
from concord.backends.bench import Bench
from concord.backends.interface import Backend, TrainingSession, Unsupported
from concord.backends.wire import (
    TRAINING,
    Message,
    Payload,
    arrays_of,
    batches_of_step,
    decode_request,
    encode_run,
    pack,
    payload_of,
    returned,
)
from concord.spec.errors import SpecError
from concord.spec.training.plan import StepPlan

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


class TrainingSessions:
    """The worker's end: the training sessions that it holds, by number."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.held: dict[int, TrainingSession] = {}
        self.opened = 0

    def perform(self, operation: str, message: Message) -> Message:
        """Answer one message: ``open``, ``load``, ``step``, ``predict``, ``state``, ``plan`` or ``close``."""
        if operation == f"{TRAINING}open":
            return self.open(message)
        said, arrays = json.loads(message[0]), load(message[1])
        session = self.held[said["session"]]
        found: Mapping[str, NDArray[Any]] = {}
        match operation.removeprefix(TRAINING):
            case "load":
                session.load(arrays, said["step"])
            case "step":
                found = arrays_of("step", session.step(batches_of_step(arrays, said["size"]), said["report"]))
            case "predict":
                found = arrays_of("predict", {"output": session.predict(batches_of_step(arrays, 1)[0])})
            case "state":
                found = arrays_of("state", session.state())
            case "plan":
                return self.plan(session, said["sizes"], arrays), pack({})
            case "close":
                del self.held[said["session"]]
        return "{}", pack(found)

    def plan(self, session: TrainingSession, sizes: Sequence[int], arrays: Mapping[str, NDArray[Any]]) -> str:
        """Return what a session is going to do with batches, as JSON."""
        if not hasattr(session, "plan"):
            raise Unsupported(
                f"{self.backend.name} does not say what it is going to do: its session has no method 'plan'"
            )
        batches = iter(batches_of_step(arrays, sum(sizes)))
        found = session.plan([[next(batches) for _ in range(size)] for size in sizes])
        if not isinstance(found, StepPlan):
            raise TypeError(f"plan() returned a {type(found).__name__} but must return a StepPlan")
        return json.dumps(dataclasses.asdict(found))

    def open(self, message: Message) -> Message:
        """Open a session on a request."""
        train = getattr(self.backend, "train", None)
        if train is None:
            raise Unsupported(f"{self.backend.name} cannot hold training open: it has no method 'train'")
        request = decode_request(message)
        request.validate(where=f"backend={self.backend.name}")
        session: TrainingSession = train(request)
        self.opened += 1
        self.held[self.opened] = session
        return json.dumps({"session": self.opened, "info": session.info()}), pack({})


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
