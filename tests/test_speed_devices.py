"""Speed on a GPU, which is made up here: its clock, its memory, its precision."""

import importlib.util
import itertools

import pytest

from concord import backends
from concord.backends.bench import Bench
from concord.commands.speed import Models, Modes
from concord.conformance.campaign import Setup
from concord.speed import Workload, truth, workload
from concord.speed.team import rules_of
from tests.test_speed import RIGHT, WRONG, measured, plan_of, small, small_preset
from tests.toys.devices import SECONDS, WithADevice
from tests.toys.surroundings import toy


def test_on_a_device_no_step_waits_for_the_last_and_the_clock_and_memory_are_the_devices():
    bench, work = Bench(WithADevice()), small()
    asked = {
        **work.request(),
        "weights": None,
        "implementation": "explicit",
        "execution": "eager",
        "precision": "strict",
    }
    bench.prepare(**{**asked, "device": "cuda:1"})
    steps = bench.steps
    steps.said.clear()
    answer, _ = bench.repeat(1000, 4 * SECONDS)
    assert answer == {"seconds": [SECONDS] * 4, "peak_memory_bytes": WithADevice.held}
    assert steps.said == [
        "step",
        "synchronize",
        *["step"] * 4,
        "synchronize",
    ]  # one to see how long it takes, then all in a row
    bench.prepare(**{**asked, "device": "cpu"})
    assert bench.repeat(2, 60.0)[0]["seconds"] != [SECONDS] * 2


@pytest.mark.parametrize(
    ("name", "by_events"),
    [
        ("torch", True),
        *(
            pytest.param(*of_one, marks=pytest.mark.slow)
            for of_one in (("tf", False), ("paddle", True), ("jax", False))
        ),
    ],
)
def test_steps_are_timed_by_events_where_a_framework_has_them(name, by_events):
    if importlib.util.find_spec({"tf": "tensorflow"}.get(name, name)) is None:
        pytest.skip(f"{name} is not installed")
    with backends.open(toy(f"{name.title()}Clock", "devices"), "cpu") as worker:
        found = worker.description
    assert found["said"] == ["synchronize", "step", "step", "step", "synchronize"]
    assert found["seconds"] == [1e-3] * 3 if by_events else len(found["seconds"]) == 1


def test_a_gpu_gets_large_models_in_two_precisions():
    works = Models().workloads(Models().presets("cuda"), "cuda", ragged=False)
    chosen = Modes().modes(False, "cuda")
    assert {(work.preset.name, work.kind, work.dtype) for work in works} == set(
        itertools.product(("bert-base", "bert-large"), ("inference", "training"), ("float32", "bfloat16"))
    )
    assert len({work.name for work in works}) == len(works)
    assert {mode.execution for mode in chosen} == {"eager", "compiled"}


def test_a_large_workload_is_checked_by_a_few_samples(monkeypatch):
    assert truth.probe(workload("bert-base")) == workload("bert-base")
    few = truth.probe(workload("bert-large"))
    assert (few.preset.batch, few.preset.tokens, few.preset.config) == (
        truth.PROBE,
        512,
        workload("bert-large").preset.config,
    )
    monkeypatch.setattr(truth, "LARGE", 0.0)
    right, wrong = measured(plan_of(RIGHT, WRONG))["entries"]
    assert (right["status"], right["checked_samples"], wrong["status"]) == (
        "measured",
        truth.PROBE,
        "withheld",
    )
    assert right["turns"]


@pytest.mark.parametrize(
    ("precision", "dtype", "device", "rules"),
    [
        ("strict", "float32", "cuda", None),
        ("tf32", "float32", "cuda", "tf32"),
        ("tf32", "bfloat16", "cuda", None),
        ("default", "float32", "cuda", "tf32"),
        ("default", "float32", "cpu", None),
    ],
)
def test_results_are_judged_by_the_arithmetic_that_was_asked_for(precision, dtype, device, rules):
    about = {"precision_defaults": {"products": {"cpu": "float32", "cuda": "tf32"}}}
    settings = Setup(precision=precision, device=device)
    assert rules_of(Workload(small_preset(), dtype=dtype), settings, about) == rules
