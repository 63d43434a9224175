"""The worker's side: objects whose methods the parent calls. Imported only in workers."""

from __future__ import annotations

import dataclasses
import importlib
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

import numpy as np

from concord.backends import heaps
from concord.backends.bench import Bench, peak_memory
from concord.backends.interface import Backend, Request, Run, Unsupported
from concord.backends.wire import (
    WorkerFailure,
    arrays_of,
    check_description,
    decode,
    encode,
    in_order,
    plain,
    returned,
)
from concord.spec.arrays import Array, Arrays
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.errors import SpecError
from concord.spec.precision import precision
from concord.spec.text import first_line
from concord.spec.training.trajectory import Training

# Maximum characters of an error message.
LINE = 1000


class StaysHere:
    """An object that stays in the worker; the caller gets its number."""


def serve(descriptor: int, target: str) -> None:
    """Answer calls to an object of ``"package.module:name"`` until the parent disconnects.

    A call is ``[object number, method, arguments, named arguments]``, an answer ``[status, value]`` with
    status ``"ok"``, ``"unsupported"``, ``"refused"``, or one of :class:`concord.backends.wire.WorkerFailure`.
    """
    module, _, name = target.partition(":")
    objects = [getattr(importlib.import_module(module), name)()]
    connection, status = Connection(descriptor), "ok"
    while status not in ("crashed", "out of memory"):
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent has disconnected
            return
        size = len(message)
        try:
            number, method, arguments, keywords = decode(message)
            del message  # it may take gigabytes
            value = attrgetter(method)(objects[number])(*arguments, **keywords)
            del arguments, keywords
            if isinstance(value, StaysHere):
                objects.append(value)
                value = len(objects) - 1
            status, answer = "ok", encode(["ok", value])
        # Whatever a backend raises is an answer; only a crash ends the worker.
        except BaseException as error:
            status, value = failure(error)
            answer = encode([status, value])
        del value
        size = max(size, len(answer))
        heaps.give_back(size)  # before the parent also holds the answer
        connection.send_bytes(answer)
        del answer
        heaps.give_back(size)


def failure(error: BaseException) -> tuple[str, Any]:
    """An error's status and message."""
    match error:
        case Unsupported():
            return "unsupported", str(error)
        case SpecError():
            return "refused", error.problems
        case WorkerFailure():
            return error.status, error.detail
        case MemoryError():
            return "out of memory", in_one_line(error)
    return "error" if isinstance(error, Exception) else "crashed", in_one_line(error)


def in_one_line(error: BaseException) -> str:
    """An error as one line; its traceback goes to standard error."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}"[:LINE]


class Service:
    """The first object of a backend's worker."""

    backend: Backend

    def introduce(self, target: str) -> tuple[dict[str, Any], float]:
        """Import ``"package.module:Class"``; return its description, and the seconds needed.

        Raises:
            WorkerFailure: if it is not installed or cannot be imported.
        """
        started = time.perf_counter()
        module, _, name = target.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name, None)
            if factory is None:
                raise WorkerFailure("broken", f"module {module!r} has no {name!r}")
            self.backend = factory()
            description = check_description(plain(self.backend.describe()))
        except ModuleNotFoundError as error:
            sought = error.name and f"{module}.".startswith(f"{error.name}.")
            where = (  # of a user's own class (docs/guides/joining.md)
                "; Concord searches for its module in the current folder, in PYTHONPATH and in the "
                "environment's packages"
                if sought and not module.startswith("concord.")
                else ""
            )
            raise WorkerFailure("absent", f"{error}{where}") from None
        except (WorkerFailure, MemoryError):
            raise
        except Exception as error:
            raise WorkerFailure("broken", in_one_line(error)) from None
        return description, time.perf_counter() - started

    @cached_property
    def bench(self) -> Bench:
        """The backend's measurement."""
        return Bench(self.backend)  # type: ignore[arg-type]  # it checks for optional methods

    def run(self, request: Request) -> Run:
        """Compute a request or a complete training run."""
        training = request.training
        run = self._trained(request, training) if training else returned(self.backend.run(ordered(request)))
        run.info["peak_memory_bytes"] = peak_memory()
        return run

    def _trained(self, request: Request, training: Training) -> Run:
        session = self.train(request)
        steps: Arrays = {}
        for step, batches in enumerate(training.steps):
            reported = session.step(batches, step in training.reported)
            steps |= {f"steps.{step}.{name}": array for name, array in reported.items()}
        *_, loss = (array for name, array in steps.items() if ".losses." in name)
        return Run(loss, None, info=session.info(), steps=steps)

    def train(self, request: Request) -> HeldTraining:
        """Open a training session."""
        train = getattr(self.backend, "train", None)
        if train is None:
            raise Unsupported(f"{self.backend.name} cannot hold a training session: it has no method 'train'")
        request = ordered(request)
        return HeldTraining(self.backend.name, request, train(request))


def ordered(request: Request) -> Request:
    """Return a request with ordered weights in its precision."""
    weights = in_order(request.weights, request.config, request.part)
    if request.dtype == "float64":  # float32 values are sent as float32
        weights = {name: array.astype(np.float64, copy=False) for name, array in weights.items()}
    return dataclasses.replace(request, weights=weights)


class HeldTraining(StaysHere):
    """A :class:`concord.backends.interface.TrainingSession` that checks inputs and results."""

    def __init__(self, name: str, request: Request, session: Any) -> None:
        self.name, self.request, self.session = name, request, session

    def info(self) -> dict[str, Any]:
        """The session's description."""
        info: dict[str, Any] = plain(self.session.info())
        return info

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Resume; float64 state is rounded to the run's precision once."""
        target = precision(self.request.dtype)
        narrow = {
            name: target.round(array) if array.dtype == np.float64 else array for name, array in state.items()
        }
        self.session.load(narrow, step)

    def step(self, batches: Sequence[Batch], report: bool = False) -> Arrays:
        """Train one step; see :meth:`concord.backends.interface.TrainingSession.step`."""
        assert self.request.training is not None
        most = self.request.training.recipe.accumulation
        if not 1 <= len(batches) <= most:
            raise SpecError(
                f"a step has {len(batches)} batches but must have from 1 to {most} [clause=OPT-10]"
            )
        return arrays_of("step()", self.session.step([self._fit(batch) for batch in batches], report))

    def predict(self, batch: Batch) -> Array:
        """Logits (B, C), without dropout."""
        # Validation asks for labels, which a prediction does not need.
        if batch.labels is None and batch.input_ids is not None:
            batch = dataclasses.replace(batch, labels=np.zeros(len(batch.input_ids), np.int64))
        return arrays_of("predict()", {"output": self.session.predict(self._fit(batch))})["output"]

    def state(self) -> Arrays:
        """Return ``parameters.<name>`` and ``<moment>.<name>``."""
        return arrays_of("state()", self.session.state())

    def close(self) -> None:
        """Free the session, but not the worker."""
        del self.session, self.request  # with its weights

    def _fit(self, batch: Batch) -> Batch:
        validate_batch(self.request.config, batch, self.request.part, f"backend={self.name}")
        return round_inputs({}, batch, self.request.dtype)[1]
