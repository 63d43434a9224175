"""The worker's side of a measurement.

A session is opened from a few numbers, stepped, and timed where it runs.
"""

from __future__ import annotations

import contextlib
import gc
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from concord.backends.interface import Measurable, Request, Session, Steps, Unsupported
from concord.backends.wire import in_order
from concord.spec.arrays import Array, Arrays
from concord.spec.batch import round_inputs
from concord.spec.parameters import initialize, trainable

VECTORS = 4
"""Random directions along which an update is reported."""

WHOLE = 16
"""Numbers up to which it is reported as it is."""

MOMENT = "first_moment."
"""How what an optimizer keeps of gradients is called."""


Answer = tuple[dict[str, Any], Arrays]
"""What is said, and arrays by name."""


class Bench:
    """The one session, or bare product, that a worker holds at a time."""

    def __init__(self, measured: Measurable) -> None:
        self.measured = measured
        self.steps: Steps | None = None
        self.device = "cpu"

    def prepare(self, request: Request, weights: str | None = None) -> Answer:
        """Build a model and run it once.

        Args:
            request: all but the weights.
            weights: a file with them; None: drawn.

        Returns:
            Seconds (building, compiling ahead, first step), and what was computed: logits, or of the steps
            of training the losses, and what parameters and first moments have come to (:func:`moved`).
        """
        self.release()
        if not hasattr(self.measured, "session"):
            raise Unsupported(f"{self.measured.name} cannot be measured: it has no method 'session'")
        config = request.config
        canonical = in_order(load_file(weights), config) if weights else initialize(config)
        request = replace(request, weights=round_inputs(canonical, request.batch, request.dtype)[0])
        request.validate(where=f"backend={self.measured.name}")
        self.device = request.device
        self._reset_peak_memory()
        started = time.perf_counter()
        session = self.steps = self.measured.session(request)
        seconds, results = self._begin(time.perf_counter() - started)
        return seconds, self._trained(session, request, results) if request.training else results

    def _trained(self, session: Session, request: Request, results: Mapping[str, NDArray[Any]]) -> Arrays:
        """Make the other steps of training, and return what has come of all.

        The session is left with the first step's inputs.
        """
        if not hasattr(session, "state"):
            raise Unsupported(
                f"{self.measured.name} cannot be measured in training: its session has no method 'state'"
            )
        assert request.training is not None
        losses = [results.get("loss", np.asarray(np.nan))]
        for (batch,) in request.training.steps[1:]:
            session.feed(batch)
            session.step()
            session.synchronize()
            losses.append(session.results().get("loss", np.asarray(np.nan)))
        session.feed(request.batch)
        after = session.state()
        changes = (
            (name, np.subtract(after[f"parameters.{name}"], request.weights[name], dtype=np.float64))
            for name in trainable(request.config)
            if f"parameters.{name}" in after
        )
        return {"loss": np.array(losses)} | moved(changes, after.items())

    def product(self, sizes: Sequence[int], dtype: str, device: str, precision: str) -> Answer:
        """Make ready a product of two random matrices, (M, K) and (K, N).

        Args:
            sizes: M, K and N.
        """
        self.release()
        if not hasattr(self.measured, "product"):
            raise Unsupported(f"{self.measured.name} cannot be measured: it has no method 'product'")
        m, k, n = sizes
        generator = np.random.default_rng(sizes)
        left, right = (generator.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
        started = time.perf_counter()
        self.device = device
        self.steps = self.measured.product(left, right, dtype, device, precision)
        return self._begin(time.perf_counter() - started)[0], {}

    def _begin(self, build_seconds: float) -> Answer:
        assert self.steps is not None
        started = time.perf_counter()
        self.steps.compile()
        compiled = time.perf_counter()
        self.steps.step()
        self.steps.synchronize()
        ended = time.perf_counter()
        peak = self._peak_memory()
        results = {name: np.asarray(array) for name, array in self.steps.results().items()}
        seconds = {
            "build_seconds": build_seconds,
            "compile_seconds": compiled - started,
            "first_seconds": ended - compiled,
            "peak_memory_bytes": peak,
        }
        return seconds, results

    def repeat(self, count: int, seconds: float) -> Answer:
        """Run steps, at least one, until time is over or so many are done; return how long each took."""
        assert self.steps is not None, "nothing is prepared"
        self._reset_peak_memory()
        taken = (self._on_cpu if self.device == "cpu" else self._on_device)(self.steps, count, seconds)
        return {"seconds": taken, "peak_memory_bytes": self._peak_memory()}, {}

    def _on_cpu(self, steps: Steps, count: int, seconds: float) -> list[float]:
        """Time steps one by one."""
        taken: list[float] = []
        while not taken or (len(taken) < count and sum(taken) < seconds):
            taken.append(mean_seconds(steps, 1))
        return taken

    def _on_device(self, steps: Steps, count: int, seconds: float) -> list[float]:
        """Time steps of which none waits for the last, as many as should take that long.

        Each by the clock of the device, or the mean of all where the framework does not give that away.
        """
        single = mean_seconds(steps, 1)
        count = max(1, min(count, int(seconds / max(single, 1e-6))))
        events = (
            [self.measured.event() for _ in range(count + 1)] if hasattr(self.measured, "event") else [None]
        )
        return [mean_seconds(steps, count)] if None in events else seconds_by_events(steps, events)

    def _peak_memory(self) -> int | None:
        if self.device == "cpu":
            return peak_memory()
        return self.measured.peak_memory(self.device) if hasattr(self.measured, "peak_memory") else None

    def _reset_peak_memory(self) -> None:
        if self.device == "cpu":
            reset_peak_memory()
        elif hasattr(self.measured, "peak_memory"):
            self.measured.peak_memory(self.device, reset=True)

    def release(self) -> Answer:
        """Let the session go."""
        self.steps = None
        gc.collect()
        return {}, {}


def mean_seconds(steps: Steps, count: int) -> float:
    """Return the mean seconds of steps that are started one after another, by the clock of the host."""
    steps.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        steps.step()
    steps.synchronize()
    return (time.perf_counter() - started) / count


def seconds_by_events(steps: Steps, events: Sequence[Any]) -> list[float]:
    """Return the seconds of steps that are started one after another, one fewer than events of the device."""
    steps.synchronize()
    events[0].record()
    for event in events[1:]:
        steps.step()
        event.record()
    steps.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def moved(
    changes: Iterable[tuple[str, NDArray[Any]]], kept: Iterable[tuple[str, NDArray[Any]]]
) -> dict[str, NDArray[np.float64]]:
    """Return what steps of training are reported by, each array along a few directions.

    (:func:`project`): a few numbers for millions.

    Args:
        changes: of parameters, by name.
        kept: what the optimizer keeps, among others, as ``<moment>.<name>``. The first moments are reported,
            which have a gradient's errors in proportion; the second ones show in the changes.

    Returns:
        ``updates/<name>`` and ``moments/<name>``.
    """
    projections = {f"updates/{name}": project(name, array) for name, array in changes}
    return projections | {
        f"moments/{name.removeprefix(MOMENT)}": project(name.removeprefix(MOMENT), array)
        for name, array in kept
        if name.startswith(MOMENT)
    }


def project(name: str, change: Array) -> NDArray[np.float64]:
    """Return the sums of an array's elements under random signs.

    Which follow from the name, in units of their root number.

    A small array is returned whole: a few signs may miss a change of a few numbers altogether.
    """
    if change.size <= WHOLE:
        return change.reshape(-1).astype(np.float64)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    signs = generator.integers(0, 2, (VECTORS, change.size), dtype=np.int8)
    flat = change.reshape(-1).astype(np.float64, copy=False)
    total = flat.sum()
    # Sums of signed terms, without an array of signs in float64: twice those that keep their sign, less all.
    sums = [2 * flat[signed.view(bool)].sum() - total for signed in signs]
    projected: NDArray[np.float64] = np.array(sums) / np.sqrt(change.size)
    return projected


def reset_peak_memory() -> None:
    """Have the kernel forget this process's largest resident size, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Return the largest resident size since the last reset, in bytes; None where the kernel does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
