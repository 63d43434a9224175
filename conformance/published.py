"""Tensors that the published sources themselves computed, as jobs: whether the backends reproduce them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord import CHECKOUT
from concord.conformance.campaign import Job
from concord.conformance.expectation import Expectation
from concord.conformance.golden_files.golden import GoldenFile, GoldenRun, computed, read
from concord.conformance.tolerance import expect
from concord.spec.deviations import Deviations
from concord.spec.errors import SpecError
from concord.spec.precision import precision

INCLUDED = Path(__file__).parent / "golden"
"""The selection that comes with this package."""

SHARED = Path(__file__).parents[2] / "shared" / "golden"
"""The whole collection, where it lies beside a checkout."""

DEFAULT = SHARED if CHECKOUT and SHARED.is_dir() else INCLUDED
"""What the pytest suite checks unless it is told otherwise."""

EXACT = 2.0**-10
"""Sigma of whole numbers: any other one is far beyond rounding."""


@dataclass
class Collection:
    """The golden files of a folder.

    Attributes:
        jobs: one for each run of each file.
        notes: what is not checked, and why.
    """

    jobs: list[Job] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def collect(directory: Path) -> Collection:
    """Read every golden file under a folder.

    Raises:
        SpecError: if there is none, or listing everything that is wrong with those that there are.
    """
    paths = sorted(directory.rglob("*.safetensors"))
    if not paths:
        raise SpecError(f"{directory}: holds no golden files (*.safetensors)" if directory.is_dir() else f"{directory}: no such folder")
    collection, problems = Collection(), []
    unchecked: Counter[tuple[str, str]] = Counter()
    training = []
    for path in paths:
        try:
            file = read(path)
            collection.jobs += [job_of(file, run) for run in file.runs]
        except SpecError as error:
            problems += error.problems
            continue
        if file.training:
            training.append(str(path.relative_to(directory)))
        else:
            unchecked.update(("/".join(name.split("/")[:2]), reason) for name, reason in file.unchecked.items())
    if problems:
        raise SpecError(problems)
    if training:
        collection.notes[f"not checked yet, {len(training)} training files"] = ", ".join(training)
    for (name, reason), count in sorted(unchecked.items()):
        collection.notes[f"not compared, {count} x {name}"] = reason
    return collection


def job_of(file: GoldenFile, run: GoldenRun) -> Job:
    """Return the job that reproduces one run of a golden file."""
    name = f"{file.case}:{run.label}" if len(file.runs) > 1 else file.case
    derive = partial(_derive, run, str(precision(file.dtype).storage))
    return Job(
        file.source, f"{file.source}/{name}", file.dtype, run.part, run.config, run.weights, run.batch, partial(expectation_of, file, run), derive
    )  # fmt: skip


def _derive(run: GoldenRun, storage: str, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a backend's tensors under the names that the golden file has; classes as numbers of the run's precision."""
    return {key: array.astype(storage) if array.dtype.kind == "i" else array for key, array in computed(run, tensors).items()}


def expectation_of(file: GoldenFile, run: GoldenRun, deviations: Deviations) -> Expectation:
    """Return the source's tensors, with the sigmas of the taps and gradients that they are, or are the sum of.

    Args:
        deviations: that the backend declares. Where the source's framework has others, its tensors are moved by what
            the reference says that the difference makes.
    """
    base, source = (expect(run.config, run.weights, run.batch, run.part, file.dtype, each) for each in (deviations, file.deviations))
    values, sigmas, clauses = {}, {}, {}
    for key, array in run.expected.items():
        names = key.partition(" as ")[0].split(" + ")
        if names == ["predictions"]:
            values[key], sigmas[key], clauses[key] = array.astype(np.float64), np.full(array.shape, EXACT), "HED-4"
            continue
        values[key] = array.astype(np.float64) + sum(base.values[name] - source.values[name] for name in names)
        # The source rounded as much as a backend does; the oracle does not.
        sigmas[key] = reduce(np.hypot, [each.sigmas[name] for name in names for each in (base, source)])
        clauses[key] = base.clauses[names[0]]
    order = [*base.values, *run.expected]
    in_order = sorted(values, key=lambda key: order.index(key.partition(" as ")[0].split(" + ")[0]))
    return Expectation(file.dtype, {key: values[key] for key in in_order}, sigmas, clauses)
