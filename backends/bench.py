"""The worker's side of a measurement."""

from __future__ import annotations

import gc
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
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
from concord.spec.config import EncoderConfig
from concord.spec.files import section
from concord.spec.parameters import Weights, initialize, trainable

# Number of random directions along which updates are reported.
VECTORS = 4

# Arrays up to this size are reported whole.
WHOLE = 16

# Steps of a turn.
MOST = 1000

# Seconds for a process to become idle after its work.
REST = 0.5


class Bench:
    """Measurement of one session or product at a time."""

    def __init__(self, measured: Measurable) -> None:
        self.measured = measured
        self.steps: Steps | None = None
        self.device = "cpu"

    def prepare(self, request: Request, weights: str | None = None) -> tuple[dict[str, Any], Arrays]:
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
        self._peak_memory(reset=True)
        started = time.perf_counter()
        session = self.steps = self.measured.session(request)
        built = time.perf_counter()
        session.compile()
        compiled = time.perf_counter()
        session.step()
        session.synchronize()
        about = {
            "build_seconds": built - started,
            "compile_seconds": compiled - built,
            "first_seconds": time.perf_counter() - compiled,
            "peak_memory_bytes": self._peak_memory(),
        }
        results = {name: np.asarray(array) for name, array in session.results().items()}
        rest()
        return about, self._trained(session, request, results) if request.training else results

    def _trained(self, session: Session, request: Request, results: Mapping[str, NDArray[Any]]) -> Arrays:
        if not hasattr(session, "state"):
            raise Unsupported(
                f"{self.measured.name} cannot be measured in training: its session has no method 'state'"
            )
        assert request.training is not None
        losses = [results.get("loss", np.nan)]
        for (batch,) in request.training.steps[1:]:
            session.feed(batch)
            session.step()
            session.synchronize()
            losses.append(session.results().get("loss", np.nan))
        # All measured steps use the first batch.
        session.feed(request.batch)
        return {"loss": np.array(losses)} | moved(request.config, request.weights, session.state())

    def product(self, sizes: Sequence[int], dtype: str, device: str, precision: str) -> float:
        """Prepare a product of random matrices (M, K) and (K, N), and return the first one's seconds."""
        self.release()
        if not hasattr(self.measured, "product"):
            raise Unsupported(f"{self.measured.name} cannot be measured: it has no method 'product'")
        m, k, n = sizes
        generator = np.random.default_rng(sizes)
        left, right = (generator.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
        self.device = device
        steps = self.steps = self.measured.product(left, right, dtype, device, precision)
        started = time.perf_counter()
        steps.step()
        steps.synchronize()
        seconds = time.perf_counter() - started
        rest()
        return seconds

    def repeat(self, seconds: float, count: int = MOST) -> dict[str, Any]:
        """Run at least one step, until time or count is up; return each step's seconds."""
        assert self.steps is not None, "nothing is prepared"
        self._peak_memory(reset=True)
        before, started = time.process_time(), time.perf_counter()
        durations = (self._on_cpu if self.device == "cpu" else self._on_device)(self.steps, count, seconds)
        busy = (time.process_time() - before) / (time.perf_counter() - started)
        rest()
        return {"seconds": durations, "peak_memory_bytes": self._peak_memory(), "busy_cores": busy}

    def _on_cpu(self, steps: Steps, count: int, seconds: float) -> list[float]:
        durations: list[float] = []
        while not durations or (len(durations) < count and sum(durations) < seconds):
            durations.append(mean_seconds(steps, 1))
        return durations

    def _on_device(self, steps: Steps, count: int, seconds: float) -> list[float]:
        # Start steps without waiting, as in real use. The device's clock times each step; without events,
        # return the mean.
        count = max(1, min(count, int(seconds / max(mean_seconds(steps, 1), 1e-6))))
        new_event = getattr(self.measured, "event", lambda: None)
        events: list[Any] = [new_event() for _ in range(count + 1)]
        if None in events:
            return [mean_seconds(steps, count)]
        steps.synchronize()
        events[0].record()
        for event in events[1:]:
            steps.step()
            event.record()
        steps.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    def _peak_memory(self, reset: bool = False) -> int | None:
        if self.device == "cpu":
            return peak_memory(reset)
        return (
            self.measured.peak_memory(self.device, reset) if hasattr(self.measured, "peak_memory") else None
        )

    def release(self) -> None:
        """Free the session."""
        self.steps = None
        gc.collect()


def mean_seconds(steps: Steps, count: int) -> float:
    """Mean seconds of consecutive steps by the host's clock."""
    steps.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        steps.step()
    steps.synchronize()
    return (time.perf_counter() - started) / count


def moved(
    config: EncoderConfig, before: Weights, state: Mapping[str, Array]
) -> dict[str, NDArray[np.float64]]:
    """Project parameter changes and first moments of a training's state.

    Returns:
        ``updates/<name>`` and ``moments/<name>``.
    """
    # A few values represent millions. Gradient errors appear proportionally in first moments; errors of
    # second moments appear in the changes.
    after = section(state, "parameters.")
    changes = {
        f"updates/{name}": project(name, np.subtract(after[name], before[name], dtype=np.float64))
        for name in trainable(config)
        if name in after
    }
    moments = section(state, "first_moment.").items()
    return changes | {f"moments/{name}": project(name, array) for name, array in moments}


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


def rest() -> None:
    """Wait until all other threads of this process are idle, or for half a second."""
    # Thread pools spin for a while before they sleep, which would slow down the next measurement:
    # PaddlePaddle's MKL keeps a core busy for 0.2 s after each step (decision 0012).
    end, resting, own = time.perf_counter() + REST, 0, f"{threading.get_native_id()}"
    while resting < 2 and time.perf_counter() < end:  # twice: a thread may just be waiting for another
        time.sleep(0.005)
        others = (task for task in Path("/proc/self/task").glob("*/stat") if task.parent.name != own)
        resting = resting + 1 if not any(map(_runs, others)) else 0


def _runs(task: Path) -> bool:
    try:
        return task.read_text().rpartition(")")[2].split()[0] == "R"
    except (OSError, IndexError):
        return False


def peak_memory(reset: bool = False) -> int | None:
    """Peak resident bytes of this process since the last reset, if available."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
