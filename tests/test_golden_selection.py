"""The golden files that come with the repository.

What they hold, and that the reference reproduces every golden file.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from concord.backends.interface import Run
from concord.conformance.golden_files import DEFAULT, INCLUDED, SHARED, collect, expectation_of, read
from concord.conformance.judging import judge
from concord.spec.arithmetic import Arithmetic
from concord.spec.deviations import NONE
from concord.spec.precision import precision
from concord.spec.reference import reference
from tests.toys.surroundings import sample_of

JOBS, _ = collect(DEFAULT)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the whole collection does not lie beside this checkout")
def test_selection_is_what_the_collection_holds():
    for path in INCLUDED.rglob("*.safetensors"):
        if path.parent.name.endswith("-hugging-face"):  # written by docs/golden/hugging_face.py
            continue
        assert path.read_bytes() == (SHARED / path.relative_to(INCLUDED)).read_bytes(), path


@pytest.mark.parametrize(
    "job",
    sample_of(
        [job for job in JOBS if not job.training], lambda place, _: (place + place // 2) % 2 == 0
    ),  # of a file's two precisions one, in turn
    ids=lambda job: job.name,
)
def test_reference_reproduces_the_source(job):
    truth = reference(job.config, job.weights, job.batch, gradients=True, part=job.part, dtype=job.dtype)
    held = precision(job.dtype).round
    taps, gradients = (
        {name: held(array) for name, array in named.items()} for named in (truth.taps, truth.gradients)
    )
    run = Run(held(truth.output), held(truth.loss), taps, gradients, "reference", job.dtype)
    verdict = judge(job.config, job.weights, job.batch, run, job.part, job.expectation)
    assert verdict.passed, verdict.first_divergence


@pytest.mark.skipif(not SHARED.is_dir(), reason="the whole collection does not lie beside this checkout")
@pytest.mark.parametrize(
    "path", sorted(SHARED.glob("*/train_*.safetensors")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_reference_trains_as_the_source_did(path):
    (job,) = read(path).jobs
    problem, published = job.expectation.args
    steps = 3  # a share of the twenty, which take long
    problem = replace(problem, training=replace(problem.training, steps=problem.training.steps[:steps]))
    expected = {name: array for name, array in published.items() if int(name.split(".")[1]) < steps}
    assert {name.split(".")[2] for name in expected} >= {"losses", "parameters"}
    reported = {}
    replace(problem, uncertain={}).trajectory(Arithmetic()).run(reported.__setitem__)
    held = {name: precision(job.dtype).round(array) for name, array in reported.items()}
    run = Run(
        np.zeros(1), np.zeros(1), backend="reference", dtype=job.dtype, requested=("steps",), steps=held
    )
    run.info["deviations"] = [
        {"name": name, "value": value, "reason": "the source's"} for name, value in problem.deviations.items()
    ]
    expectation = partial(expectation_of, problem, expected)
    verdict = judge(job.config, job.weights, job.batch, run, job.part, expectation)
    assert verdict.passed, verdict.first_divergence


def test_every_gradient_of_a_file_is_compared():
    for job in JOBS:
        if "ignore" in job.case or job.training:
            continue
        expected = [name for name in job.expectation(NONE).values if name.startswith("gradients.")]
        assert expected, job.name
