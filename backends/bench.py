"""The worker's side of a measurement."""

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

# Number of random directions along which updates are reported.
VECTORS = 4

# Arrays up to this size are reported whole.
WHOLE = 16

MOMENT = "first_moment."
Answer = tuple[dict[str, Any], Arrays]
"""JSON data, and named arrays."""


class Bench:
    """Measurement of one session or product at a time."""

    def __init__(self, measured: Measurable) -> None:
        self.measured = measured
        self.steps: Steps | None = None
        self.device = "cpu"

    def prepare(self, request: Request, weights: str | None = None) -> Answer:
        """Build a model and run it once.

        Args:
            weights: a weight file, or None for random weights.

        Returns:
            Seconds for building, compiling and the first step; logits, or losses and :func:`moved`.
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
        # All measured steps use the first batch.
        session.feed(request.batch)
        after = session.state()
        changes = (
            (name, np.subtract(after[f"parameters.{name}"], request.weights[name], dtype=np.float64))
            for name in trainable(request.config)
            if f"parameters.{name}" in after
        )
        return {"loss": np.array(losses)} | moved(changes, after.items())

    def product(self, sizes: Sequence[int], dtype: str, device: str, precision: str) -> Answer:
        """Prepare a product of random matrices (M, K) and (K, N)."""
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
        """Run at least one step, until time or count is up; return each step's seconds."""
        assert self.steps is not None, "nothing is prepared"
        self._reset_peak_memory()
        durations = (self._on_cpu if self.device == "cpu" else self._on_device)(self.steps, count, seconds)
        return {"seconds": durations, "peak_memory_bytes": self._peak_memory()}, {}

    def _on_cpu(self, steps: Steps, count: int, seconds: float) -> list[float]:
        durations: list[float] = []
        while not durations or (len(durations) < count and sum(durations) < seconds):
            durations.append(mean_seconds(steps, 1))
        return durations

    def _on_device(self, steps: Steps, count: int, seconds: float) -> list[float]:
        # Start steps without waiting, as in real use. The device's clock times each step; without events,
        # return the mean.
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
        """Free the session."""
        self.steps = None
        gc.collect()
        return {}, {}


def mean_seconds(steps: Steps, count: int) -> float:
    """Mean seconds of consecutive steps by the host's clock."""
    steps.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        steps.step()
    steps.synchronize()
    return (time.perf_counter() - started) / count


def seconds_by_events(steps: Steps, events: Sequence[Any]) -> list[float]:
    """Seconds of consecutive steps between device events (one more than steps)."""
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
    """Project parameter changes and first moments.

    Args:
        kept: optimizer state by ``<moment>.<name>``.

    Returns:
        ``updates/<name>`` and ``moments/<name>``.
    """
    # A few values represent millions. Gradient errors appear proportionally in first moments; errors of
    # second moments appear in the changes.
    projections = {f"updates/{name}": project(name, array) for name, array in changes}
    return projections | {
        f"moments/{name.removeprefix(MOMENT)}": project(name.removeprefix(MOMENT), array)
        for name, array in kept
        if name.startswith(MOMENT)
    }


def project(name: str, change: Array) -> NDArray[np.float64]:
    """Sums with random signs, seeded by name, divided by the root of the size."""
    # A few random signs may completely miss a change of a few values.
    if change.size <= WHOLE:
        return change.reshape(-1).astype(np.float64)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    signs = generator.integers(0, 2, (VECTORS, change.size), dtype=np.int8)
    flat = change.reshape(-1).astype(np.float64, copy=False)
    total = flat.sum()
    # Twice the positive terms minus the total, which avoids a float64 array of signs.
    sums = [2 * flat[signed.view(bool)].sum() - total for signed in signs]
    projected: NDArray[np.float64] = np.array(sums) / np.sqrt(change.size)
    return projected


def reset_peak_memory() -> None:
    """Reset this process's peak resident size, if possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int | None:
    """Peak resident bytes since the last reset, if available."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
