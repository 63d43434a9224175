"""Tensors that the published sources themselves computed, as jobs: whether the backends reproduce them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord import CHECKOUT
from concord.conformance.campaign import Job
from concord.conformance.expectation import Expectation
from concord.conformance.golden_files import GoldenFile, GoldenRun, GoldenTraining, read
from concord.conformance.lockstep.envelope import of_training
from concord.conformance.tolerance import expect
from concord.spec import errors
from concord.spec.deviations import Deviations
from concord.spec.errors import SpecError
from concord.spec.files import find
from concord.spec.precision import precision
from concord.spec.reference import predict

INCLUDED = Path(__file__).parent / "golden"
"""The selection that comes with this package."""

SHARED = Path(__file__).parents[2] / "shared" / "golden"
"""The whole collection, where it lies beside a checkout."""

DEFAULT = SHARED if CHECKOUT and SHARED.is_dir() else INCLUDED
"""The folder that the pytest suite checks by default."""

EXACT = 2.0**-10
"""Sigma of whole numbers: any other one is far beyond rounding."""


def collect(directory: Path) -> tuple[list[Job], dict[str, str]]:
    """Read every golden file under a folder.

    Returns:
        A job for each run of each file; what is not checked, and why.

    Raises:
        SpecError: if there is none, or listing everything that is wrong with those that there are.
    """
    paths = find(directory, "*.safetensors")
    if not paths:
        raise SpecError(f"{directory}: holds no golden files (*.safetensors)")
    jobs: list[Job] = []
    unchecked: Counter[tuple[str, str]] = Counter()
    for file in errors.collect(*(partial(read, path) for path in paths)):
        jobs += [job_of(file, run) for run in file.runs]
        jobs += [training_job(file, file.training)] if file.training else []
        unchecked.update(("/".join(name.split("/")[:2]), reason) for name, reason in file.unchecked.items())
    return jobs, {
        f"not compared, {count} x {name}": reason for (name, reason), count in sorted(unchecked.items())
    }


def job_of(file: GoldenFile, run: GoldenRun) -> Job:
    """Return the job that reproduces one run of a golden file."""
    name = f"{file.case}:{run.label}" if len(file.runs) > 1 else file.case
    derive = partial(computed, run, str(precision(file.dtype).storage))
    return Job(
        file.source,
        f"{file.source}/{name}",
        file.dtype,
        run.part,
        run.config,
        run.weights,
        run.batch,
        partial(expectation_of, file, run),
        derive,
    )


def training_job(file: GoldenFile, golden: GoldenTraining) -> Job:
    """Return the job that makes the training run of a golden file again."""
    problem = golden.problem
    return Job(
        file.source,
        f"{file.source}/{file.case}{':clipping' if file.runs else ''}",
        file.dtype,
        problem.part,
        problem.config,
        problem.weights,
        problem.training.steps[0][0],
        partial(expectation_of_training, golden),
        training=problem.training,
    )


def expectation_of_training(golden: GoldenTraining, deviations: Deviations) -> Expectation:
    """Return what the source reported, as :func:`expectation_of` does.

    What it did not report is expected of the reference.
    """
    base = of_training(replace(golden.problem, deviations=deviations, uncertain={}))
    source = of_training(golden.problem)
    values, sigmas = dict(base.values), dict(base.sigmas)
    for key, array in golden.expected.items():
        values[key] = array.astype(base.values[key].dtype) + (base.values[key] - source.values[key])
        sigmas[key] = np.hypot(base.sigmas[key], source.sigmas[key])
    return replace(base, values=values, sigmas=sigmas)


def _names(key: str) -> list[str]:
    """Return the tensors that one of :attr:`GoldenRun.expected` is, or is the sum of."""
    return key.partition(" as ")[0].split(" + ")


def computed(run: GoldenRun, storage: str, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what a backend or the reference computed, under the names of ``run.expected``.

    Args:
        storage: the type that classes have, as those of the run's precision.
        tensors: taps by name, and gradients as ``gradients.<name>``.

    What cannot be had from ``tensors`` is left out.
    """
    found: dict[str, NDArray[Any]] = {}
    for key in run.expected:
        names = _names(key)
        if names == ["predictions"]:
            if "logits" in tensors:
                found[key] = predict(run.config, tensors["logits"]).astype(storage)
        elif all(name in tensors for name in names):
            found[key] = np.asarray(reduce(np.add, [tensors[name] for name in names]))
    return found


def expectation_of(file: GoldenFile, run: GoldenRun, deviations: Deviations) -> Expectation:
    """Return the source's tensors, with the sigmas of the taps and gradients that they are, or are the sum
    of.

    Args:
        deviations: that the backend declares. Where the source's framework has others, its tensors are moved
            by what the reference says that the difference makes.
    """
    base, source = (
        expect(run.config, run.weights, run.batch, run.part, file.dtype, each)
        for each in (deviations, file.deviations)
    )
    values, sigmas, clauses = {}, {}, {}
    for key, array in run.expected.items():
        names = _names(key)
        if names == ["predictions"]:
            values[key], sigmas[key], clauses[key] = (
                array.astype(np.float64),
                np.full(array.shape, EXACT),
                "HED-4",
            )
            continue
        values[key] = array.astype(np.float64) + sum(
            base.values[name] - source.values[name] for name in names
        )
        # The source rounded as much as a backend does; the oracle does not.
        sigmas[key] = reduce(np.hypot, [each.sigmas[name] for name in names for each in (base, source)])
        clauses[key] = base.clauses[names[0]]
    order = [*base.values, *run.expected]
    in_order = sorted(values, key=lambda key: order.index(_names(key)[0]))
    return Expectation(file.dtype, {key: values[key] for key in in_order}, sigmas, clauses)
