"""The reference's results for timed programs, stored for presets.

``python -m concord.speed.truth`` regenerates ``speed/expected``; other sizes are derived on demand.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.bench import moved
from concord.backends.interface import WORKLOAD_KINDS
from concord.conformance.judging.estimate import estimate, least_sigma
from concord.conformance.judging.expectation import Expectation
from concord.conformance.judging.judge import Judge
from concord.conformance.judging.protocol import PublishedReference
from concord.conformance.judging.verdict import Verdict
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch, from_arrays, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, initialize, trainable
from concord.spec.reference import compute
from concord.spec.training.trajectory import Observer, Training, Trajectory
from concord.speed.presets import LENGTHS, SEED, Workload, workload
from concord.speed.work import flops

EXPECTED = Path(__file__).parent / "expected"

# Beyond this many operations only PROBE samples are checked: the reference computes about 1e11 a second.
LARGE = 4e12

PROBE = 2

# Number of low-precision runs for estimating sigma.
ROUNDED = 4

# Tokens to differentiate at once in the reference, which is faster than sample by sample.
CHUNK = 512

# Maximum of those tokens times width times layers, since a backward pass keeps all layers in memory.
ROOM = 1_250_000


# Preset, kind and lengths of stored results.
KEPT = (
    *itertools.product(("nndl", "tf1", "minilm"), WORKLOAD_KINDS, LENGTHS),
    *itertools.product(("bert-base",), ("inference",), LENGTHS),
)


def judge(expected: Expectation, results: Mapping[str, Array]) -> Verdict:
    """Judge a program's ``logits`` (B, C), or losses, updates and moments of training."""
    judging = Judge(PublishedReference(lambda: expected, wider=True), results)
    return Verdict(judging.table(local=False), outputs=tuple(expected.values))


def probe(work: Workload) -> Workload:
    """The workload to check: two samples if all would take hours."""
    few = replace(work, preset=replace(work.preset, batch=min(PROBE, work.preset.batch)))
    return few if flops(work) > LARGE else work


def derive(work: Workload, rules: str | None = None) -> Expectation:
    """Compute a program's expected results, with one sigma per tensor.

    Args:
        rules: the precision whose rounding is allowed, if different from the workload's.

    Returns:
        ``logits`` (B, C); or each training step's ``loss``, and each parameter's change
            ``updates/NAME`` and first moment ``moments/NAME``, along a few random directions.
    """
    config = work.preset.config
    batches = work.batches
    weights = round_inputs(initialize(config, SEED), batches[0], work.dtype)[0]
    steps = [samples(config, batch, _most(work) if work.recipe else 1) for batch in batches]

    def run(arithmetic: Arithmetic, take: Observer) -> None:
        if work.recipe:
            # A step's gradient is the mean over samples, of which a few are computed at a time to fit in
            # memory.
            recipe = work.recipe.replace(accumulation=len(steps[0]), accumulation_mean="samples")
            for name, array in _train(
                config, weights, Training(recipe, steps), arithmetic, work.dtype
            ).items():
                take(name, array)
        else:
            parts = (compute(config, weights, part, arithmetic, dtype=work.dtype) for part in steps[0])
            take("logits", np.concatenate([part.output for part in parts]))

    # Frameworks differ in their order of sums, and some fuse multiply-add, so use random orders, and fuse in
    # every second run.
    runs = [
        Arithmetic(rules or work.dtype, shuffle=seed or None, fused=seed % 2 == 1) for seed in range(ROUNDED)
    ]
    values, estimated = estimate(run, work.dtype, truth=Arithmetic(), arithmetics=runs)
    sigmas = {name: _rms(sigma) for name, sigma in estimated.items()}
    for name in values:
        if name.startswith("updates/"):  # the stored parameter is rounded, but not its change
            least = least_sigma(weights[name.removeprefix("updates/")], work.dtype)
            sigmas[name] = float(np.hypot(sigmas[name], _rms(least)))
    return expectation(work.dtype, values, sigmas)


def expectation(dtype: str, values: dict[str, Array], sigmas: Mapping[str, float]) -> Expectation:
    """An expectation with one sigma per tensor."""
    full = {name: np.full(value.shape, sigmas[name]) for name, value in values.items()}
    return Expectation(dtype, values, full, dict.fromkeys(values, ""), chained=False)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def _most(work: Workload) -> int:
    tokens, config = work.preset.tokens, work.preset.config
    return max(1, min(CHUNK // tokens, ROOM // (tokens * config.d_model * config.num_layers)))


def samples(config: EncoderConfig, batch: Batch, most: int = 1) -> list[Batch]:
    """Split a batch of independent samples into parts of at most ``most``."""
    if config.mask_assignment != "per_sample" or config.ignore_label is not None or config.l2_weight:
        return [batch]
    arrays = batch.arrays()
    return [
        from_arrays({name: array[i : i + most] for name, array in arrays.items()})
        for i in range(0, len(arrays["input_ids"]), most)
    ]


def _train(
    config: EncoderConfig, weights: Weights, training: Training, arithmetic: Arithmetic, dtype: str
) -> dict[str, Array]:
    losses: list[list[float]] = [[] for _ in training.steps]
    trajectory = Averaging(config, weights, training, arithmetic, dtype=dtype)

    def take(name: str, values: Array) -> None:
        if name.startswith("losses."):
            losses[trajectory.steps].append(float(np.squeeze(values)))

    for batches in training.steps:
        trajectory.step(batches, take)
    state = trajectory.state()
    changes = (
        (name, np.subtract(state[f"parameters.{name}"], weights[name], dtype=np.float64))
        for name in trainable(config)
    )
    means = [
        np.dot(loss, trajectory.batch_weights(batches))
        for loss, batches in zip(losses, training.steps, strict=True)
    ]
    return {"loss": np.array(means), **moved(changes, state.items())}


class Averaging(Trajectory):
    """Training with gradients summed over samples and rounded once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.looked_up: dict[str, NDArray[np.int64]] = {}

    def accumulated(
        self, batches: Sequence[Batch], observer: Observer
    ) -> tuple[dict[str, Array], dict[str, list[Array]]]:
        """Gradient of a step, rounded after the sum."""
        total, slices = super().accumulated(batches, observer)
        return {name: self.a.settle(values) for name, values in total.items()}, slices

    def whole(self, name: str, values: Array, rows: NDArray[np.int64]) -> Array:
        """Return only looked-up rows of a table's gradient, and store their indices."""
        # BERT's table has 30,522 rows, and a sample looks up a few of them.
        self.looked_up[name] = rows
        return values

    def added(
        self,
        total: Mapping[str, Array],
        piece: Mapping[str, Array],
        weight: float,  # noqa: ARG002 - each is already scaled
    ) -> dict[str, Array]:
        """Add the gradients of one more sample, in place."""
        gradients = dict(total) or {name: np.zeros(self.parameters[name].shape) for name in piece}
        for name, values in piece.items():
            gradients[name][self.looked_up.get(name, slice(None)) if values.ndim else ()] += values
        return gradients


@functools.cache  # shared by every backend and mode
def expected(work: Workload, rules: str | None = None) -> Expectation:
    """The stored expectation of a workload, or a derived one."""
    if not rules and _file(work).is_file():
        stored = json.loads(_file(work).read_text())
        # A result for different sizes, weights or recipe does not apply.
        if stored["key"] == work.key:
            values = {name: np.asarray(value) for name, value in stored["values"].items()}
            return expectation(work.dtype, values, stored["sigmas"])
    return derive(work, rules)


def _file(work: Workload) -> Path:
    return EXPECTED / f"{work.preset.name.replace(' ', '-')}-{work.kind}-{work.padding}-{work.dtype}.json"


def save(work: Workload) -> Path:
    """Derive and store the expectation of a workload."""
    expected, path = derive(work), _file(work)
    values = {name: value.tolist() for name, value in expected.values.items()}
    sigmas = {name: float(sigma.flat[0]) for name, sigma in expected.sigmas.items()}
    path.write_text(json.dumps({"key": work.key, "values": values, "sigmas": sigmas}) + "\n")
    return path


if __name__ == "__main__":
    for names in KEPT:
        print(save(workload(*names)), flush=True)
