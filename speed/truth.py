"""What a timed program has to have computed: from the oracle, for the presets once and for all.

``python -m concord.speed.truth`` derives the expectations of the presets anew and writes them to ``speed/expected``; those of other
sizes are derived when they are needed.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.bench import project
from concord.backends.interface import LEARNING_RATE, WORKLOAD_KINDS
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch, batch_of_lengths, from_arrays, round_inputs
from concord.spec.config import EncoderConfig
from concord.spec.parameters import initialize, trainable
from concord.spec.precision import PRECISIONS, precision
from concord.spec.reference import Truth, compute
from concord.speed.presets import LENGTHS, PRESETS, SEED, Workload, workload
from concord.speed.work import flops

EXPECTED = Path(__file__).parent / "expected"
"""Where the expectations of the presets lie."""

LARGE = 4e12
"""Operations beyond which a workload is checked by :data:`PROBE` samples: the oracle computes some 1e11 in a second."""

PROBE = 2
"""Samples by which a large workload is checked."""

SHADOWS = 4
"""Rounded runs that say how far a correct one may lie off: sums in orders drawn at random, every second one as fused kernels round."""

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Expected:
    """What a program has to yield.

    Attributes:
        values: ``logits`` (B, C), or ``loss`` and for each trained parameter ``updates/NAME``: its change by one step,
            along a few random directions.
        sigmas: for each, the root mean square error of rounded runs.
    """

    values: dict[str, Array]
    sigmas: dict[str, float]

    def worst(self, results: Mapping[str, Array], limit: float) -> tuple[float, str]:
        """Return the largest error in tolerances, and the tensor that has it; infinite where nothing can be compared.

        Args:
            limit: the tolerance, in sigma.
        """
        found = (0.0, "")
        for name, value in self.values.items():
            actual = results.get(name)
            if actual is None or actual.shape != value.shape or not np.isfinite(actual).all():
                return float("inf"), name
            found = max(found, (float(np.max(abs(actual.astype(np.float64) - value))) / (limit * self.sigmas[name]), name))
        return found


def probe(work: Workload) -> Workload:
    """Return the workload whose results are checked: the same model on a few samples, where the oracle would take hours for all."""
    few = replace(work, preset=replace(work.preset, batch=min(PROBE, work.preset.batch)))
    return few if flops(work) > LARGE else work


def derive(work: Workload, shadows: int = SHADOWS, rules: str | None = None) -> Expected:
    """Compute what a program has to yield, and how far rounding may lead from it.

    Args:
        rules: the precision or mode whose rounding is allowed for, where it is not that of the workload.
    """
    config, target = work.preset.config, precision(work.dtype)
    weights, batch = round_inputs(initialize(config, SEED), batch_of_lengths(config, work.lengths, work.preset.tokens, SEED), work.dtype)
    batches = samples(config, batch)

    def outcome(arithmetic: Callable[[], Arithmetic]) -> dict[str, Array]:
        truths = (compute(config, weights, part, arithmetic(), work.kind == "training", "model", work.dtype) for part in batches)
        if work.kind == "inference":
            return {"logits": np.concatenate([truth.output for truth in truths])}
        return _mean([_step(config, truth) for truth in truths])

    values = outcome(Arithmetic)
    squares = dict.fromkeys(values, 0.0)
    for seed in range(shadows):
        rounded = outcome(lambda seed=seed: Arithmetic(rules or work.dtype, shuffle=seed or None, fused=seed % 2 == 1))  # type: ignore[misc]
        for name, value in values.items():
            squares[name] += float(np.mean(np.square(rounded[name] - value))) / shadows
    sigmas = {}
    for name, value in values.items():
        stored = weights[name.removeprefix("updates/")] if name.startswith("updates/") else value
        least = target.unit_roundoff / np.sqrt(3) * float(np.sqrt(np.mean(np.square(stored, dtype=np.float64))))  # the result itself is rounded
        sigmas[name] = float(np.hypot(np.sqrt(squares[name]), least)) + target.smallest_normal
    return Expected(values, sigmas)


def samples(config: EncoderConfig, batch: Batch) -> list[Batch]:
    """Return a batch sample by sample, where a sample knows nothing of the others: the whole may not fit in memory."""
    if config.mask_assignment != "per_sample" or config.ignore_label is not None or config.l2_weight:
        return [batch]
    arrays = batch.arrays()
    return [from_arrays({name: array[i : i + 1] for name, array in arrays.items()}) for i in range(len(arrays["input_ids"]))]


def _step(config: EncoderConfig, truth: Truth) -> dict[str, Array]:
    """Return what one training step is reported by."""
    moved = {f"updates/{name}": project(name, -LEARNING_RATE * truth.gradients[name]) for name in trainable(config)}
    return {"loss": np.asarray(truth.loss), **moved}


def _mean(steps: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the step of a batch from those of its samples: the loss is their mean, and so is all that is linear in its gradient."""
    return {name: np.asarray(sum(np.asarray(step[name], np.float64) for step in steps) / len(steps)) for name in steps[0]}


@functools.cache  # every backend is asked for the same in every mode
def expected(work: Workload, rules: str | None = None) -> Expected:
    """Return what a program has to yield, as it was derived before, or else derived now.

    Args:
        rules: as in :func:`derive`.
    """
    stored = None if rules else _read(_file(work))
    return derive(work, rules=rules) if stored is None or stored["key"] != work.key else _parse(stored)


def _file(work: Workload) -> Path:
    return EXPECTED / f"{work.preset.name.replace(' ', '-')}-{work.kind}-{work.padding}-{work.dtype}.json"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _parse(stored: Mapping[str, Any]) -> Expected:
    return Expected({name: np.asarray(value) for name, value in stored["values"].items()}, stored["sigmas"])


def save(work: Workload) -> Path:
    """Derive what a program has to yield, and keep it."""
    work = probe(work)
    found = derive(work)
    plain = {"key": work.key, "values": {name: value.tolist() for name, value in found.values.items()}, "sigmas": found.sigmas}
    path = _file(work)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plain) + "\n")
    return path


def main(names: Sequence[str]) -> None:
    """Derive the expectations of presets, by default of those that a machine without accelerators can run.

    Args:
        names: of presets, kinds, lengths and precisions; all of those of which none is named, and of precisions float32.
    """
    usual = (("nndl", "tf1", "minilm", "bert-base"), WORKLOAD_KINDS, LENGTHS, ("float32",))
    known = (PRESETS, WORKLOAD_KINDS, LENGTHS, tuple(PRECISIONS))
    chosen = [[name for name in names if name in every] or most for every, most in zip(known, usual, strict=True)]
    for what in itertools.product(*chosen):
        print(save(workload(*what)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
