"""Files of the standard cases: JSON descriptions and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from concord.spec.arrays import Arrays
from concord.spec.cases import SCENARIOS, Case, standard_cases
from concord.spec.errors import collecting
from concord.spec.files import read_arrays, read_json, sha256_of, write_bytes, write_text
from concord.spec.reference import Truth, reference

FORMAT = 2

FOLDER = Path(__file__).parent

# Larger arrays are stored partially: tables by nonzero rows, others by every 61st value (decision 0015).
LARGE, EVERY = 2**14, 61

# exp and tanh may differ in the last bit between processors: differences up to this share of a tensor's scale
# do not count as drift.
LAST_BITS = 2.0**-40


def contents(case: Case) -> tuple[dict[str, Any], Arrays]:
    """A case's JSON description, without the arrays' digest, and its arrays.

    The arrays are ``weights/…``, ``inputs/…``, ``float64/…`` (taps and ``gradients.…``) and ``float32/…``
    (exact output and loss of the float32 model, SPEC PRC-2, MSK-5). ``stored`` lists the arrays that
    are shortened: to ``rows``, or to each ``every``-th value.
    """
    truth = reference(case.config, case.weights, case.batch, gradients=True, part=case.part)
    single = reference(case.config, case.weights, case.batch, part=case.part, dtype="float32")
    full = {
        **{f"weights/{name}": array for name, array in case.weights.items()},
        **{f"inputs/{name}": array for name, array in case.batch.arrays().items()},
        **{f"float64/{name}": array for name, array in expected(truth).items()},
        "float32/output": single.output,
        "float32/loss": single.loss,
    }
    arrays, stored = {name: np.asarray(array, order="C") for name, array in full.items()}, dict[str, Any]()
    for name, array in arrays.items():
        if array.size > LARGE:
            rows = np.flatnonzero(array.reshape(len(array), -1).any(1))
            few = len(rows) * EVERY < len(array)
            arrays[name] = array[rows] if few else array.reshape(-1)[::EVERY].copy()
            part = {"rows": rows.tolist()} if few else {"every": EVERY}
            stored[name] = {"shape": list(array.shape), **part}
    description = {
        "format": FORMAT,
        "name": case.name,
        "variant": case.variant,
        "scenario": case.scenario,
        "part": case.part,
        "exposes": SCENARIOS[case.scenario].exposes,
        "config": case.config.as_dict(),
        "arrays": f"{case.name}.safetensors",
        **({"stored": stored} if stored else {}),
    }
    return description, arrays


def write_case(case: Case, folder: Path = FOLDER) -> None:
    """Write ``NAME.json`` and ``NAME.safetensors``."""
    description, arrays = contents(case)
    arrays_path = folder / description["arrays"]
    write_bytes(arrays_path, save(arrays))
    write_text(
        folder / f"{case.name}.json",
        json.dumps({**description, "sha256": sha256_of(arrays_path)}, indent=2) + "\n",
    )


def drift(folder: Path = FOLDER) -> list[str]:
    """Differences between the files and the current code's output."""
    current = {case.name: case for case in standard_cases()}
    stored = {path.stem: path for path in folder.glob("*.json")}
    problems = [f"{name}.json is missing" for name in current if name not in stored]
    problems += [f"{name}.json belongs to no standard case" for name in stored if name not in current]
    for name in current.keys() & stored.keys():
        arrays_path = stored[name].with_suffix(".safetensors")
        with collecting(problems):
            description, arrays = read_json(stored[name]), read_arrays(arrays_path)
            current_description, reference_arrays = contents(current[name])
            current_description["sha256"] = sha256_of(arrays_path)
            problems += [
                f"{name}.json: {key!r} differs"
                for key in current_description
                if description.get(key) != current_description[key]
            ]
            problems += [
                f"{arrays_path.name}: {problem}" for problem in _differences(arrays, reference_arrays)
            ]
    return sorted(problems)


def expected(truth: Truth) -> Arrays:
    """Taps and gradients by their names in comparisons."""
    return {**truth.taps, **{f"gradients.{name}": array for name, array in truth.gradients.items()}}


def _differences(stored: Arrays, current: Arrays) -> list[str]:
    problems = [f"{name!r} is missing" for name in current.keys() - stored.keys()]
    problems += [f"{name!r} is unexpected" for name in stored.keys() - current.keys()]
    # A gradient may be a difference of far larger values, or zero up to rounding, so all gradients share the
    # scale of the largest.
    steepest = max(
        (np.max(abs(array)) for name, array in current.items() if "/gradients." in name), default=0.0
    )
    for name in current.keys() & stored.keys():
        old, new = stored[name], current[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            problems.append(f"{name!r} is {old.dtype} {old.shape} but must be {new.dtype} {new.shape}")
            continue
        scale = steepest if "/gradients." in name else np.max(abs(new), initial=0.0)
        distance = (
            np.max(abs(old - new), initial=0.0)
            if new.dtype.kind == "f"
            else float(not np.array_equal(old, new))
        )
        if distance > LAST_BITS * scale:
            problems.append(f"{name!r} differs by {distance:.3g}")
    return problems
