"""The standard cases as files: JSON that says what a case is, safetensors with its arrays."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from concord.spec.batch import from_arrays
from concord.spec.cases import SCENARIOS, Case, standard_cases
from concord.spec.config import from_mapping
from concord.spec.errors import SpecError
from concord.spec.files import read_arrays, read_as, read_bytes, section, write_bytes, write_text
from concord.spec.reference import Truth, reference

FORMAT = 2
"""The format of a file in which arrays are stored in part.

One that needs nothing of it has format 1, so that a reader of
format 1 goes on reading it.
"""

FOLDER = Path(__file__).parent

# Larger arrays are stored in part: a table by the rows that are not zero, anything else by every 61st of its
# numbers.
LARGE, EVERY = 2**14, 61

LARGEST_WHOLE = 2**26
"""Numbers of the largest array that is made whole: a few rows may stand for any number of them."""

# Mathematical functions may differ in the last bit between processors: this much of a tensor's scale is no
# drift.
LAST_BITS = 2.0**-40


@dataclass(frozen=True)
class Stored:
    """Which part of an array is stored: rows of its first axis, or the first of each ``every`` numbers."""

    shape: list[int]
    rows: list[int] | None = None
    every: int | None = None


@dataclass(frozen=True)
class Header:
    """What the JSON file of a case says."""

    format: Literal[1, 2]
    name: str
    variant: str
    scenario: str
    part: str
    config: dict[str, Any]
    arrays: str
    sha256: str
    stored: dict[str, Stored] = field(default_factory=dict)


def write_case(case: Case, folder: Path = FOLDER) -> None:
    """Write ``NAME.json`` and ``NAME.safetensors``.

    The arrays are ``weights/…``, ``inputs/…``, ``float64/…`` (every tap, and every gradient as
    ``gradients.…``) and
    ``float32/…``: output and loss of the model in float32, computed exactly (SPEC PRC-2, MSK-5). Large ones
    are stored in part, as ``stored`` says: by the rows named in ``rows``, where the others are zero, or by
    the first of each ``every`` numbers in row-major order.
    """
    arrays, stored = _in_part(_arrays(case))
    data = save(arrays)
    header = {
        "format": FORMAT if stored else 1,
        "name": case.name,
        "variant": case.variant,
        "scenario": case.scenario,
        "part": case.part,
        "exposes": SCENARIOS[case.scenario].exposes,
        "config": case.config.as_dict(),
        "arrays": f"{case.name}.safetensors",
        "sha256": hashlib.sha256(data).hexdigest(),
        **({"stored": {name: _said(part) for name, part in stored.items()}} if stored else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / f"{case.name}.safetensors", data)
    write_text(folder / f"{case.name}.json", json.dumps(header, indent=2) + "\n")


def _said(part: Stored) -> dict[str, Any]:
    return {key: value for key, value in asdict(part).items() if value is not None}


def read_case(path: Path) -> tuple[Case, dict[str, NDArray[Any]]]:
    """Read a case and its arrays.

    Those that are stored by their rows are whole; those by every so many numbers are flat.

    Args:
        path: of the JSON file.

    Raises:
        SpecError: if a file is missing or corrupt, or does not belong to the other.
    """
    header = read_as(path, Header)
    beside = path.parent / header.arrays
    if Path(header.arrays).name != header.arrays:
        raise SpecError(f"{path}: 'arrays' is {header.arrays!r} but must be the name of a file beside it")
    if hashlib.sha256(read_bytes(beside)).hexdigest() != header.sha256:
        raise SpecError(f"{beside}: is not the file that {path.name} was written with: its SHA-256 differs")
    arrays = _whole(read_arrays(beside), header.stored, str(path))
    weights, batch = section(arrays, "weights/"), from_arrays(section(arrays, "inputs/"))
    config = from_mapping(header.config, path.name)
    return Case(header.variant, header.scenario, header.part, config, weights, batch), arrays


def drift(folder: Path = FOLDER) -> list[str]:
    """Return how the files differ from what this code would write, one line each."""
    current = {case.name: case for case in standard_cases()}
    stored = {path.stem: path for path in sorted(folder.glob("*.json"))}
    problems = [f"{name}.json: is missing" for name in current if name not in stored]
    problems += [f"{name}.json: belongs to no standard case" for name in stored if name not in current]
    for name in current.keys() & stored.keys():
        try:
            case, arrays = read_case(stored[name])
        except SpecError as error:
            problems += error.problems
            continue
        if case.config != current[name].config:
            problems.append(f"{name}.json: 'config' differs")
        wanted = _whole(*_in_part(_arrays(current[name])), name)
        problems += [f"{name}.safetensors: {problem}" for problem in _differences(arrays, wanted)]
    return sorted(problems)


def _arrays(case: Case) -> dict[str, NDArray[Any]]:
    truth = reference(case.config, case.weights, case.batch, gradients=True, part=case.part)
    single = reference(case.config, case.weights, case.batch, part=case.part, dtype="float32")
    arrays = {
        **{f"weights/{name}": array for name, array in case.weights.items()},
        **{f"inputs/{name}": array for name, array in case.batch.arrays().items()},
        **{f"float64/{name}": array for name, array in expected(truth).items()},
        "float32/output": single.output,
        "float32/loss": single.loss,
    }
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _in_part(arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, NDArray[Any]], dict[str, Stored]]:
    """Return what is stored of each array, and of those that are stored in part their shape and which part
    it is.
    """
    part, stored = dict(arrays), {}
    for name, array in arrays.items():
        if array.size > LARGE:
            rows = np.flatnonzero(array.reshape(len(array), -1).any(1))
            few = len(rows) * EVERY < len(array)
            part[name] = array[rows] if few else array.reshape(-1)[::EVERY].copy()
            stored[name] = (
                Stored(list(array.shape), rows.tolist()) if few else Stored(list(array.shape), every=EVERY)
            )
    return part, stored


def _whole(
    part: dict[str, NDArray[Any]], stored: Mapping[str, Stored], where: str
) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file, with those whole that are stored by their rows.

    Raises:
        SpecError: if what is said to be stored of an array is not what is there.
    """
    arrays = dict(part)
    for name, said in stored.items():
        if name not in part:
            raise SpecError(f"{where}: 'stored' names {name!r}, which is no array of the file")
        if said.rows is None:
            continue
        size, (length, *_) = math.prod(said.shape), [*said.shape, 0]
        fits = part[name].shape == (len(said.rows), *said.shape[1:]) and all(
            0 <= row < length for row in said.rows
        )
        if not fits or size > LARGEST_WHOLE:
            raise SpecError(
                f"{where}: {name!r} has shape {part[name].shape} but is said to be {len(said.rows)} rows "
                f"of shape {tuple(said.shape)}"
            )
        arrays[name] = np.zeros(said.shape, part[name].dtype)
        arrays[name][said.rows] = part[name]
    return arrays


def expected(truth: Truth) -> dict[str, NDArray[Any]]:
    """Return every tensor of a truth by the name that it has in comparisons."""
    return {**truth.taps, **{f"gradients.{name}": array for name, array in truth.gradients.items()}}


def _differences(stored: dict[str, NDArray[Any]], current: dict[str, NDArray[Any]]) -> list[str]:
    problems = [f"{name!r} is missing" for name in current.keys() - stored.keys()]
    problems += [f"{name!r} is unexpected" for name in stored.keys() - current.keys()]
    # A gradient may be the difference of far larger numbers, down to one that is mathematically zero: their
    # common scale is that of the largest of them.
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
