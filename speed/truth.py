"""What a timed program has to have computed: from the oracle, for the presets once and for all.

``python -m concord.speed.truth`` derives the expectations of the presets anew, in some minutes, and writes
them to ``speed/expected``; those of other sizes are derived when they are needed.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from concord.backends.bench import moved
from concord.backends.interface import WORKLOAD_KINDS
from concord.conformance.estimate import estimate, least_sigma
from concord.conformance.expectation import Expectation
from concord.conformance.judging import Judge
from concord.conformance.reference import PublishedReference
from concord.conformance.verdict import Verdict
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, initialize, trainable
from concord.spec.reference import compute
from concord.spec.training.trajectory import Observer, Training, Trajectory
from concord.speed.presets import LENGTHS, SEED, Workload, workload
from concord.speed.work import flops

EXPECTED = Path(__file__).parent / "expected"
"""Where the expectations of the presets lie."""

LARGE = {"inference": 4e12, "training": 1e11}
"""Operations beyond which :data:`PROBE` samples are checked.

The oracle computes some 1e11 in a second, and differentiation keeps all activations in float64.
"""

PROBE = 2
"""Samples by which a large workload is checked."""

ROUNDED = 4
"""Low-precision runs that sigma is taken from."""

KEPT = (
    *itertools.product(("nndl", "tf1", "minilm"), WORKLOAD_KINDS, LENGTHS),
    *itertools.product(("bert-base",), ("inference",), LENGTHS),
)
"""Preset, kind and lengths of the expectations in :data:`EXPECTED`."""


def judge(expected: Expectation, results: Mapping[str, Array]) -> Verdict:
    """Judge what a program yields: ``logits`` (B, C), or what a few steps of training are reported by."""
    judging = Judge(PublishedReference(lambda: expected, wider=True), results)
    return Verdict(judging.table(local=False), outputs=tuple(expected.values))


def probe(work: Workload) -> Workload:
    """Return the workload that is checked: a few samples, where the oracle would take hours for all."""
    few = replace(work, preset=replace(work.preset, batch=min(PROBE, work.preset.batch)))
    return few if flops(work) > LARGE[work.kind] else work


def derive(work: Workload, rules: str | None = None) -> Expectation:
    """Compute what a program has to yield, and how far rounding may lead from it.

    Args:
        rules: the precision or mode whose rounding is allowed for, where it is not that of the workload.

    Returns:
        ``logits`` (B, C), or of a few steps of training the ``loss`` of each and, for each trained parameter,
        ``updates/NAME``, its change by them all, and ``moments/NAME``, its first moment after them, along a
        few random directions. Sigma is one for a tensor: the root mean square error of rounded runs.
    """
    config, batches = work.preset.config, work.batches
    weights = round_inputs(initialize(config, SEED), batches[0], work.dtype)[0]

    def run(arithmetic: Arithmetic, take: Observer) -> None:
        if work.recipe:
            training = Training(work.recipe, [[batch] for batch in batches])
            for name, array in _train(config, weights, training, arithmetic, work.dtype).items():
                take(name, array)
        else:
            take("logits", compute(config, weights, batches[0], arithmetic, dtype=work.dtype).output)

    # Sums in orders drawn at random, every second one fused.
    runs = [
        Arithmetic(rules or work.dtype, shuffle=seed or None, fused=seed % 2 == 1) for seed in range(ROUNDED)
    ]
    values, found = estimate(run, work.dtype, truth=Arithmetic(), arithmetics=runs)
    sigmas = {name: _rms(sigma) for name, sigma in found.items()}
    for name in values:
        if name.startswith("updates/"):  # what is stored is rounded, and not its change
            least = least_sigma(weights[name.removeprefix("updates/")], work.dtype)
            sigmas[name] = float(np.hypot(sigmas[name], _rms(least)))
    return expectation(work.dtype, values, sigmas)


def expectation(dtype: str, values: dict[str, Array], sigmas: Mapping[str, float]) -> Expectation:
    """Return what is expected, with one sigma for all elements of a tensor."""
    full = {name: np.full(value.shape, sigmas[name]) for name, value in values.items()}
    return Expectation(dtype, values, full, dict.fromkeys(values, ""), chained=False)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


def _train(
    config: EncoderConfig, weights: Weights, training: Training, arithmetic: Arithmetic, dtype: str
) -> dict[str, Array]:
    trajectory = Trajectory(config, weights, training, arithmetic, dtype=dtype)
    losses: list[float] = []

    def take(name: str, values: Array) -> None:
        if name.startswith("losses."):
            losses.append(float(np.squeeze(values)))

    for batches in training.steps:
        trajectory.step(batches, take)
    state = trajectory.state()
    changes = (
        (name, np.subtract(state[f"parameters.{name}"], weights[name], dtype=np.float64))
        for name in trainable(config)
    )
    return {"loss": np.array(losses), **moved(changes, state.items())}


@functools.cache  # every backend is asked for the same in every mode
def expected(work: Workload, rules: str | None = None) -> Expectation:
    """Return what a program has to yield, as it was derived before, or else derived now.

    Args:
        rules: as in :func:`derive`.
    """
    if not rules and _file(work).is_file():
        stored = json.loads(_file(work).read_text())
        if stored["key"] == work.key:
            values = {name: np.asarray(value) for name, value in stored["values"].items()}
            return expectation(work.dtype, values, stored["sigmas"])
    return derive(work, rules)


def _file(work: Workload) -> Path:
    return EXPECTED / f"{work.preset.name.replace(' ', '-')}-{work.kind}-{work.padding}-{work.dtype}.json"


def save(work: Workload) -> Path:
    """Derive what a program has to yield, and keep it."""
    expected, path = derive(work), _file(work)
    values = {name: value.tolist() for name, value in expected.values.items()}
    sigmas = {name: float(sigma.flat[0]) for name, sigma in expected.sigmas.items()}
    path.write_text(json.dumps({"key": work.key, "values": values, "sigmas": sigmas}) + "\n")
    return path


if __name__ == "__main__":
    for names in KEPT:
        print(save(workload(*names)), flush=True)
