"""What a timed program has to have computed: from the oracle, for the presets once and for all.

``python -m speed.truth`` derives the expectations of the presets anew and writes them to ``speed/expected``; those of other
sizes are derived when they are needed.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.interface import LEARNING_RATE
from backends.programs import project
from spec.arithmetic import Arithmetic
from spec.batch import Batch, batch_of_lengths, from_arrays, round_inputs
from spec.config import EncoderConfig
from spec.parameters import initialize, trainable
from spec.precision import precision
from spec.reference import Truth, compute
from speed.presets import SEED, Workload, workload

EXPECTED = Path(__file__).parent / "expected"
"""Where the expectations of the presets lie."""

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
        """Return the largest error in allowances, and the tensor that has it; infinite where nothing can be compared.

        Args:
            limit: the allowance, in sigma.
        """
        found = (0.0, "")
        for name, value in self.values.items():
            actual = results.get(name)
            if actual is None or actual.shape != value.shape or not np.isfinite(actual).all():
                return float("inf"), name
            found = max(found, (float(np.max(abs(actual.astype(np.float64) - value))) / (limit * self.sigmas[name]), name))
        return found


def derive(work: Workload, shadows: int = SHADOWS) -> Expected:
    """Compute what a program has to yield, and how far rounding may lead from it."""
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
        rounded = outcome(lambda seed=seed: Arithmetic(work.dtype, shuffle=seed or None, fused=seed % 2 == 1))  # type: ignore[misc]
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
def expected(work: Workload) -> Expected:
    """Return what a program has to yield, as it was derived before, or else derived now."""
    stored = _read(_file(work))
    return derive(work, shadows=2) if stored is None or stored["key"] != work.key else _parse(stored)


def _file(work: Workload) -> Path:
    return EXPECTED / f"{work.name.replace(' ', '-')}-{work.dtype}.json"


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def _parse(stored: Mapping[str, Any]) -> Expected:
    return Expected({name: np.asarray(value) for name, value in stored["values"].items()}, stored["sigmas"])


def save(work: Workload) -> Path:
    """Derive what a program has to yield, and keep it."""
    found = derive(work)
    plain = {"key": work.key, "values": {name: value.tolist() for name, value in found.values.items()}, "sigmas": found.sigmas}
    path = _file(work)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plain) + "\n")
    return path


def main(names: Iterable[str]) -> None:
    """Derive the expectations of presets, by default of those that a machine without accelerators can run."""
    for name in list(names) or ["nndl", "tf1", "minilm", "bert-base"]:
        for kind in ("inference", "training"):
            for padding in ("full", "ragged"):
                print(save(workload(name, kind, padding)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
