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

import numpy as np
from numpy.typing import NDArray

from concord.backends.bench import moved
from concord.backends.interface import WORKLOAD_KINDS
from concord.conformance.judging.estimate import estimate, least_sigma
from concord.conformance.judging.expectation import Expectation, root_mean_square
from concord.conformance.judging.judge import Judge
from concord.conformance.judging.protocol import PublishedReference
from concord.conformance.judging.verdict import Verdict
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch, from_arrays, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.files import section
from concord.spec.parameters import Weights, initialize
from concord.spec.reference import observe
from concord.spec.training.trajectory import Observer, Training, Trajectory
from concord.speed.presets import GPU_WORKLOADS, LENGTHS, SEED, Workload, workload
from concord.speed.work import flops

EXPECTED = Path(__file__).parent / "expected"

# Beyond this many operations only PROBE samples are judged: the reference computes 1e10 to 1e11 a second.
LARGE = 1e12

PROBE = 2

# Number of low-precision runs for estimating sigma.
ROUNDED = 4

# Tokens to differentiate at once in the reference, which is faster than sample by sample.
CHUNK = 512

# Maximum of those tokens times width times layers, since a backward pass keeps all layers in memory.
ROOM = 1_250_000


# Fields of workloads whose expectations are stored.
KEPT = (
    *itertools.product(("nndl", "tf1", "minilm"), WORKLOAD_KINDS, LENGTHS),
    *itertools.product(("bert-base",), ("inference",), LENGTHS),
    *itertools.product(("minilm", "bert-base"), ("inference",), LENGTHS, ("bfloat16",)),
    *GPU_WORKLOADS,
)


def judge(expected: Expectation, results: Mapping[str, Array]) -> Verdict:
    """Judge a program's ``logits`` (B, C), or losses, updates and moments of training."""
    judging = Judge(PublishedReference(lambda: expected, wider=True), results)
    return Verdict(judging.table(local=False), outputs=tuple(expected.values))


def judged_samples(work: Workload) -> int:
    """The number of samples to judge: the first two if all would take hours."""
    return min(PROBE, work.preset.batch) if flops(work) > LARGE else work.preset.batch


def program(work: Workload) -> Workload:
    """The workload to judge: in training, whose loss mixes the samples, with only the samples to judge."""
    return replace(work, preset=replace(work.preset, batch=judged_samples(work))) if work.recipe else work


def derive(work: Workload) -> Expectation:
    """Compute a program's expected results, with one sigma per tensor.

    Returns:
        ``logits`` (B, C) of the judged samples; or each training step's ``loss``, and each parameter's change
            ``updates/NAME`` and first moment ``moments/NAME``, along a few random directions.
    """
    config = work.preset.config
    batches = work.batches
    dtype = work.settings["dtype"]
    weights = round_inputs(initialize(config, SEED), batches[0], dtype)[0]
    steps = [samples(config, batch, _most(work) if work.recipe else 1) for batch in batches]

    def run(arithmetic: Arithmetic, take: Observer) -> None:
        if work.recipe:
            # A step's gradient is the mean over samples, of which a few are computed at a time to fit in
            # memory.
            recipe = work.recipe.replace(accumulation=len(steps[0]), accumulation_mean="samples")
            for name, array in _train(config, weights, Training(recipe, steps), arithmetic, dtype).items():
                take(name, array)
        else:
            logits: list[Array] = []  # all else would take gigabytes

            def keep(name: str, array: Array) -> None:
                if name == "logits":
                    logits.append(array)

            for part in steps[0][: judged_samples(work)]:
                observe(config, weights, part, arithmetic, keep, gradients=False, dtype=dtype)
            take("logits", np.concatenate(logits))

    # Frameworks differ in their order of sums, and some fuse multiply-add, so use random orders, and fuse in
    # every second run.
    runs = [Arithmetic(work.dtype, shuffle=seed or None, fused=seed % 2 == 1) for seed in range(ROUNDED)]
    values, estimated = estimate(run, dtype, truth=Arithmetic(), arithmetics=runs)
    sigmas = {name: root_mean_square(sigma) for name, sigma in estimated.items()}
    for name in section(values, "updates/"):  # the stored parameter is rounded, but not its change
        least, update = root_mean_square(least_sigma(weights[name], dtype)), f"updates/{name}"
        sigmas[update] = float(np.hypot(sigmas[update], least))
    return expectation(work, values, sigmas)


def expectation(work: Workload, values: dict[str, Array], sigmas: Mapping[str, float]) -> Expectation:
    """An expectation with one sigma per tensor."""
    full = {name: np.full(value.shape, sigmas[name]) for name, value in values.items()}
    return Expectation(work.settings["dtype"], values, full, dict.fromkeys(values, ""), chained=False)


def _most(work: Workload) -> int:
    tokens, config = work.preset.tokens, work.preset.config
    return max(1, min(CHUNK // tokens, ROOM // (tokens * config.d_model * config.num_layers)))


def samples(config: EncoderConfig, batch: Batch, most: int) -> list[Batch]:
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
    losses, means = list[float](), []
    trajectory = Averaging(config, weights, training, arithmetic, dtype=dtype)

    def take(name: str, values: Array) -> None:
        if name.startswith("losses."):
            losses.append(float(np.squeeze(values)))

    for batches in training.steps:
        losses.clear()
        trajectory.step(batches, take)
        means.append(np.dot(losses, trajectory.batch_weights(batches)))
    return {"loss": np.array(means), **moved(config, weights, trajectory.state())}


class Averaging(Trajectory):
    """Training with gradients summed over samples and rounded once."""

    def accumulated(
        self, batches: Sequence[Batch], observer: Observer
    ) -> tuple[dict[str, Array], dict[str, list[Array]]]:
        """Gradient of a step, rounded after the sum."""
        self.looked_up: dict[str, NDArray[np.int64]] = {}
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
def expected(work: Workload) -> Expectation:
    """The stored expectation of a workload, or a derived one."""
    if (path := _file(work)).is_file():
        stored = json.loads(path.read_text())
        # A result for different sizes, weights or recipe does not apply.
        if stored["key"] == work.key:
            values = {name: np.asarray(value) for name, value in stored["values"].items()}
            return expectation(work, values, stored["sigmas"])
    return derive(work)


def _file(work: Workload) -> Path:
    return EXPECTED / f"{work.task} {work.dtype}.json".replace(" ", "-")


def save(work: Workload) -> Path:
    """Derive and store the expectation of a workload."""
    expected, path = derive(work), _file(work)
    values = {name: value.tolist() for name, value in expected.values.items()}
    sigmas = {name: float(sigma.flat[0]) for name, sigma in expected.sigmas.items()}
    path.write_text(json.dumps({"key": work.key, "values": values, "sigmas": sigmas}) + "\n")
    return path


if __name__ == "__main__":
    for fields in KEPT:
        print(save(program(workload(*fields))), flush=True)
