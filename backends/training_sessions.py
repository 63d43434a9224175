"""Training that is held open in a worker: both ends of the channel, and what a state must hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from concord.backends.interface import Backend, Request, TrainingSession, Unsupported
from concord.backends.wire import Message, batches_of_step, decode_request, encode_batches, pack, received
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.errors import SpecError
from concord.spec.files import typed
from concord.spec.parameters import parameters, shape_of
from concord.spec.precision import precision
from concord.spec.training.optimizers import state_shapes
from concord.spec.training.plan import StepPlan

Array = NDArray[np.floating]

TRAINING = "train/"
"""How the operations of training sessions begin."""

Exchange = Callable[[str, str, bytes], Message]
"""Sends operation, JSON and arrays to a worker, and returns its answer."""


def check_state(request: Request, state: Mapping[str, Array], step: int) -> None:
    """Refuse a state that training cannot go on from.

    Args:
        state: ``parameters.<name>`` of everything that is trained, and of other parameters if they are to
            change; ``<slot>.<name>`` (:func:`concord.spec.training.optimizers.slots`), which are zero where
            they are missing.
        step: how many steps have been made.

    Raises:
        SpecError: listing every missing, unexpected, misshapen, non-float or non-finite array, at once.
    """
    assert request.training is not None
    table = parameters(request.config, request.part)
    known = {f"parameters.{name}": shape_of(request.config, entry) for name, entry in table.items()}
    known |= state_shapes(request.config, request.training.recipe, request.part)
    problems = [f"'step' is {step} but must be a whole number from 0 on [clause=OPT-9]"] if step < 0 else []
    problems += [
        f"'parameters.{name}' is missing but is required [clause=WGT-1]"
        for name, entry in table.items()
        if entry.trainable and f"parameters.{name}" not in state
    ]
    for name in [*(name for name in known if name in state), *sorted(state.keys() - known.keys())]:
        array = state[name]
        if name not in known:
            problems.append(f"{name!r} is unexpected: the training keeps nothing of that name [clause=WGT-1]")
        elif array.shape != known[name]:
            problems.append(f"{name!r} has shape {array.shape} but must be {known[name]} [clause=WGT-2]")
        elif not np.issubdtype(array.dtype, np.floating):
            problems.append(
                f"{name!r} has dtype {array.dtype} but must be a floating-point type [clause=WGT-3]"
            )
        elif step == 0 and not name.startswith("parameters.") and array.any():
            problems.append(f"{name!r} is not zero but must be before the first step [clause=OPT-2]")
    if problems:
        raise SpecError(problems)


def arrays_of(method: str, found: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays that a method of a session returned, by name.

    Raises:
        TypeError: if it returned no mapping of names to arrays of numbers.
    """
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{method}() returned a {type(found).__name__} but must return a dict of arrays by name"
        )
    arrays = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise TypeError(f"{method}() returned an array by the name {name!r} but must name each by text")
        try:
            arrays[name] = np.asarray(value)
        except ValueError:  # rows of different lengths
            arrays[name] = np.asarray(None)
        if arrays[name].dtype.kind in "OSUMm":
            raise TypeError(
                f"{method}() returned {name!r} as a {type(value).__name__} but must return an array of "
                "numbers"
            )
    return arrays


class RemoteSession:
    """Training that a worker holds open (:class:`concord.backends.interface.TrainingSession`).

    Use it in a ``with`` block, or call :meth:`close`.

    Every method raises :class:`concord.backends.process.WorkerFailure` if the worker gives no answer, for it
    died, hangs or takes too much; the session is gone with the worker.

    Args:
        name: of the backend.
        request: what is trained, validated.
        exchange: with the worker.
        opened: what the worker answered when it opened the session.

    Attributes:
        info: what the session says of itself, as a run does: versions, threads, ``deviations``.
    """

    def __init__(self, name: str, request: Request, exchange: Exchange, opened: Mapping[str, Any]) -> None:
        self.request, self.where = request, f"backend={name}"
        self.info: dict[str, Any] = opened["info"]
        self._exchange, self._number = exchange, opened["session"]

    def _ask(
        self, operation: str, arrays: Mapping[str, NDArray[Any]] | None = None, **said: Any
    ) -> dict[str, NDArray[Any]]:
        return load(
            self._exchange(
                f"{TRAINING}{operation}", json.dumps({"session": self._number, **said}), pack(arrays or {})
            )[1]
        )

    def load(self, state: Mapping[str, Array], step: int) -> None:
        """Go on from a state after so many steps.

        Args:
            state: as :meth:`state` returns it. float64 is rounded to the precision of the run, once.

        Raises:
            SpecError: listing all that is wrong with it (:func:`check_state`).
        """
        check_state(self.request, state, step)
        target = precision(self.request.dtype)
        self._ask(
            "load",
            {
                name: target.round(array) if array.dtype == np.float64 else array
                for name, array in state.items()
            },
            step=step,
        )

    def step(self, batches: Sequence[Batch], report: bool = False) -> dict[str, NDArray[Any]]:
        """Make the next step.

        Args:
            batches: the batches whose gradients it accumulates.
            report: whether to return all that :data:`concord.spec.training.trajectory.Observer` gets of a
                step, not losses and norm alone.

        Raises:
            BatchError: listing what is wrong with a batch.
            Unsupported: if the backend cannot compute it.
        """
        assert self.request.training is not None
        most = self.request.training.recipe.accumulation
        if not 1 <= len(batches) <= most:
            raise SpecError(
                f"a step has {len(batches)} batches but must have from 1 to {most} [clause=OPT-10]"
            )
        return self._ask(
            "step", encode_batches([self._fit(batch) for batch in batches]), report=report, size=len(batches)
        )

    def predict(self, batch: Batch) -> Array:
        """Return the logits (B, C) of a batch, labelled or not, without dropout.

        Raises:
            BatchError: listing what is wrong with the batch.
        """
        if batch.labels is None and batch.input_ids is not None:
            batch = replace(batch, labels=np.zeros(len(batch.input_ids), np.int64))
        return self._ask("predict", encode_batches([self._fit(batch)]), size=1)["output"]

    def state(self) -> dict[str, Array]:
        """Return where training stands: ``parameters.<name>`` of all parameters, and ``<slot>.<name>``."""
        return self._ask("state")

    def plan(self, steps: Sequence[Sequence[Batch]]) -> StepPlan:
        """Return the backend's plan for these batches from the first step on; nothing is trained.

        Raises:
            SpecError: listing what of it is of another type.
        """
        fitting = [self._fit(batch) for batches in steps for batch in batches]
        sizes = json.dumps({"session": self._number, "sizes": [len(batches) for batches in steps]})
        found = received(self._exchange(f"{TRAINING}plan", sizes, pack(encode_batches(fitting)))[0])
        return typed(StepPlan, json.dumps(found))

    def close(self) -> None:
        """Let the session go; the worker lives on."""
        self._ask("close")

    def _fit(self, batch: Batch) -> Batch:
        validate_batch(self.request.config, batch, self.request.part, self.where)
        return round_inputs({}, batch, self.request.dtype)[1]

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # else the worker may be gone, and what it says of that would hide the error
            self.close()


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


def opened(name: str, request: Request, message: Message, exchange: Exchange) -> RemoteSession:
    """Have a worker open a session.

    Args:
        message: the request, encoded.
    """
    return RemoteSession(name, request, exchange, received(exchange(f"{TRAINING}open", *message)[0]))
