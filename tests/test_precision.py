import io

import numpy as np
import pytest
from rich.console import Console

from concord import backends
from concord.backends.interface import Unsupported, refuse_tf32, refusing_nondeterminism
from concord.backends.wire import WorkerFailure
from concord.conformance import Setup, check_jobs, conduct
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.run import environment, record
from concord.conformance.run.environment import Installed
from concord.conformance.run.report import show
from concord.output_files import page
from concord.spec.arithmetic import Arithmetic
from concord.spec.montecarlo import MonteCarlo
from concord.spec.precision import precision
from tests.test_page import said
from tests.toys.small import request_for, run_case
from tests.toys.surroundings import EACH_BACKEND, toy


def checked(*names, cases=("bert-single",), dtypes=("float32",), **settings):
    return conduct(
        check_jobs(["bert"], dtypes, cases=cases), names, Setup(asked=names, threads=1, **settings)
    )


def said_of(report):
    # In the terminal, and on the page of the record after a round trip.
    text, document = io.StringIO(), record.make_record(report, "check")
    show(report, Console(width=200, file=text), "title")
    record.parsed(record.text(document).encode())
    return text.getvalue(), said(page(document))


# The four backends.


@pytest.fixture(scope="module")
def deterministic_jax(open_worker):
    open_worker("jax")  # or skip
    with backends.open(toy("jax", "built_in"), threads=1, deterministic=True) as worker:
        yield worker


@pytest.fixture(params=EACH_BACKEND)
def watched(request, open_worker, monkeypatch):
    # Only JAX is deterministic in a process alone that was started for it.
    if request.param == "jax":
        return request.getfixturevalue("deterministic_jax")
    worker = open_worker(toy(request.param, "built_in"))
    monkeypatch.setattr(worker, "deterministic", True)
    return worker


def small_run(worker, small, implementation="explicit", **settings):
    request = request_for(small("bert"), "dot_product")
    return run_case(worker, request, implementation=implementation, **settings)


@pytest.mark.clause("PRC-3")
def test_backends_set_what_is_asked_and_say_so(watched, small):
    defaults = watched.description["precision_defaults"]
    switches = {name: value for name, value in defaults.items() if name != "products"}
    assert watched.description["precision_switches"] == switches
    assert set(defaults["products"]) == {"cpu", "cuda"}
    devices = {device.partition(":")[0] for device in watched.description["devices"]}
    assert watched.description["dtypes"].keys() == devices
    assert set(defaults["products"].values()) <= {"float32", "tf32"}
    by_mode = {}
    for mode in ("strict", "default", "strict"):
        run = small_run(watched, small, precision=mode)
        assert (run.info["precision"], run.info["deterministic"]) == (mode, True)
        assert by_mode.setdefault(mode, run.info["precision_switches"]) == run.info["precision_switches"]
    for name, value in by_mode["default"].items():
        assert value == switches[name] or "determinis" in name, name
    for name, value in by_mode["strict"].items():
        if "determinis" in name:
            assert value is True, name
        elif "tf32" in name or "precision" in name:
            assert value not in (True, "high", "tensorfloat32"), name


@pytest.mark.clause("PRC-3")
def test_backends_refuse_tf32_on_a_device_that_has_none(watched, small):
    with pytest.raises(Unsupported, match="has no TF32 products on cpu: only tensor cores"):
        small_run(watched, small, precision="tf32")
    # TF32 concerns float32 products only.
    assert small_run(watched, small, precision="tf32", dtype="float64").info["precision"] == "tf32"


@pytest.mark.clause("PRC-3")
def test_a_switch_that_something_else_resets_is_an_error_that_names_it(watched, small):
    with pytest.raises(
        WorkerFailure,
        match=r"Overruled: \w+ did not compute as requested: after the run \w+ is .* but was set to",
    ) as failure:
        small_run(watched, small, "reset::explicit")
    assert "\n" not in failure.value.detail
    assert small_run(watched, small).info["precision"] == "strict"  # the next run has its own settings


@pytest.mark.xdist_group("jax")
def test_jax_refuses_determinism_in_a_process_that_was_started_without(open_worker, small, monkeypatch):
    monkeypatch.setattr(open_worker("jax"), "deterministic", True)
    with pytest.raises(Unsupported, match="--xla_gpu_deterministic_ops=true in XLA_FLAGS; this one was not"):
        small_run(open_worker("jax"), small, "explicit")


# Requests, and the environment of a worker.


def test_tf32_is_refused_where_the_environment_switches_it_off(monkeypatch, small):
    request = request_for(small("bert"), precision="tf32", device="cuda:1")
    refuse_tf32("torch", request, able=True)
    with pytest.raises(Unsupported, match=r"has no TF32 products on cuda:1: .* compute capability 8\.0"):
        refuse_tf32("torch", request, able=False)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with pytest.raises(Unsupported, match="NVIDIA_TF32_OVERRIDE=0"):
        refuse_tf32("torch", request, able=True)


def test_a_kernel_that_is_not_deterministic_is_unsupported_only_where_that_was_asked(small):
    def fail(deterministic, words):
        with refusing_nondeterminism("torch", request_for(small("bert"), deterministic=deterministic)):
            raise RuntimeError(words)

    words = "scatter_add does not have a deterministic implementation"
    with pytest.raises(Unsupported, match=f"^torch has no deterministic kernel for this run: {words}$"):
        fail(True, f"{words}\nmore")
    with pytest.raises(RuntimeError, match=words):
        fail(False, words)


# The rules by which a run is judged.


TF32, BOTH = "MultipliesInTf32", ("float64", "float32")

JUDGED = [
    (TF32, {"precision": "tf32", "dtypes": BOTH}, ["agrees", "agrees"], ""),
    (TF32, {"precision": "default", "dtypes": BOTH}, ["agrees", "diverges"], ""),
    # A backend that does not know the setting cannot claim it.
    (
        "NumpyBackend",
        {"precision": "tf32"},
        ["unsupported"],
        "does not confirm that its run had precision = 'tf32': its info has no 'precision'",
    ),
    ("NumpyBackend", {"deterministic": True}, ["unsupported"], "its info has no 'deterministic'"),
    (
        "SaysAnotherPrecision",
        {},
        ["error"],
        "its run reports precision = 'default' but 'strict' was requested [clause=PRC-3]",
    ),
]


@pytest.mark.parametrize(("name", "settings", "expected", "words"), JUDGED)
def test_a_run_is_judged_by_the_rules_of_the_precision_that_it_says(name, settings, expected, words):
    results = checked(toy(name), **settings).results
    assert [result.status for result in results] == expected
    assert results[0].detail.endswith(words)


# Truncated factors.


@pytest.mark.clause("PRC-1")
def test_factors_are_cut_off_towards_zero_in_11_bits():
    target = precision("tf32")
    values = np.array(
        [1 + 2.0**-10 - 2.0**-23, -(1 + 2.0**-10 - 2.0**-23), 1 + 2.0**-10, np.inf, 0.0], np.float32
    )
    assert target.round_factor(values, cut=True).tolist() == [1.0, -1.0, 1 + 2.0**-10, np.inf, 0.0]
    assert target.round_factor(values).tolist() == [1 + 2.0**-10, -1 - 2.0**-10, 1 + 2.0**-10, np.inf, 0.0]
    assert precision("float32").round_factor(values, cut=True) is values


def test_a_long_product_of_equal_signs_may_be_cut_off_as_well_as_rounded():
    # Truncation errs in one direction. In a long sum of equal signs that adds up to far more than rounding
    # does.
    generator = np.random.default_rng(0)
    a, b = (
        generator.uniform(0.5, 2, shape).astype(np.float32).astype(np.float64)
        for shape in ((5, 2048), (2048, 7))
    )

    def product(arithmetic):
        return arithmetic.einsum("ij,jk->ik", arithmetic.leaf(a), arithmetic.leaf(b)).value

    truth, samples = a @ b, product(MonteCarlo("tf32", 16))
    sigma = np.sqrt(np.mean((samples - truth) ** 2, axis=0))
    judged = [
        judge_tensor(product(Arithmetic("tf32", cut=cut)), truth, sigma, "tf32") for cut in (False, True)
    ]
    assert [judgement.status for judgement in judged] == ["agrees", "agrees"]
    assert judged[1].rms > 8 * judged[0].rms  # so the samples have to show the bias
    rounded = np.sqrt(np.mean((samples[::2] - truth) ** 2, axis=0))
    assert judge_tensor(product(Arithmetic("tf32", cut=True)), truth, rounded, "tf32").status == "diverges"


# Why a run diverges.


def test_what_agrees_under_strict_is_attributed_to_the_precision():
    report = checked(toy("MultipliesInTf32"), precision="default")
    line = (
        "diverges only in default precision (factors=tf32), and agrees in strict: the precision "
        "is the cause, not the port"
    )
    assert [result.attribution for result in report.results] == [line]
    assert all(line in text for text in said_of(report))
    switches = report.environments[toy("MultipliesInTf32")]["precision_switches"]
    assert switches == {"factors": "tf32", "reductions": "full"}


def test_what_does_not_agree_under_strict_is_not_attributed():
    report = checked(toy("WrongInEveryPrecision"), precision="default", cases=("bert-ragged",))
    assert [(result.status, result.attribution) for result in report.results] == [("diverges", "")]


# Repeated runs.


def test_repeated_runs_that_differ_are_nondeterministic():
    report = checked(toy("AddsNoise"), cases=("bert-ragged",), repeat=3)
    (result,) = report.results
    assert (result.status, report.exit_code, result.times) == ("nondeterministic", 1, 3)
    words = "3 runs of 1 job: differ in 2 tensors of 1 job, first"
    assert all(words in text for text in said_of(report))


# Settings as doctor reports them.


def ready(name, cuda, *devices):
    return Installed(
        name,
        "ready",
        {"devices": ["cpu", *devices], "precision_defaults": {"products": {"cpu": "float32", "cuda": cuda}}},
        [],
    )


def test_doctor_warns_of_defaults_that_differ_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(environment.here, "gpus", lambda: ["NVIDIA H100"])
    conclusions = environment.conclusions(
        [
            ready("torch", "float32", "cuda:0"),
            ready("tf", "tf32"),
            ready("jax", "tf32"),
            Installed("paddle", "absent", {}, []),
        ],
        Setup(device="cuda"),
    )
    assert len(conclusions) == 1
    assert conclusions[0].startswith(
        "on cuda, float32 products differ by default (torch in float32; tf, jax in tf32), "
    )
    assert "--precision strict" in conclusions[0]
    assert (
        environment.conclusions([ready("tf", "tf32", "cuda:0"), ready("jax", "tf32")], Setup(device="cuda"))
        == []
    )
