import importlib.util
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from concord import backends, spec
from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.backends.worker import THREADS
from concord.spec.batch import round_inputs
from concord.spec.files import section
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training
from tests.conftest import small_config
from tests.test_wire import arrays_of, assert_same_bits
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import ROOT, concord, marked_python, python, refusal, script, toy

MIB = 2**20


def checking(name, folder):
    return f"check --backend {name} --case bert-single --dtype float32 --json {folder / 'out.json'}"


# The parent and its frameworks.


def test_the_parent_imports_no_framework_not_even_in_a_check():
    program = f"""
import sys
import concord.cli
from concord import spec, backends, conformance
sys.argv = ["concord", "check", "--backend", {toy("NumpyBackend")!r}, "--case", "bert-single"]
try:
    concord.cli.main()
except SystemExit as end:
    assert end.code == 0, end.code
frameworks = {{"torch", "tensorflow", "keras", "paddle", "jax", "jaxlib", "flax"}}
assert not frameworks & {{name.partition(".")[0] for name in sys.modules}}, sorted(sys.modules)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "2 agree" in done.stdout


def test_worker_process_needs_no_psutil():
    # An interpreter of another environment has its framework, NumPy and safetensors, and nothing else that we
    # need.
    ours = {"execnet", "psutil", "rich", "typer", "pytest"}
    program = f"import sys, concord.backends.remote; print(sorted({ours} & set(sys.modules)))"
    assert python("-c", program).stdout == "[]\n"


def opened(device="cpu", **settings):
    with backends.open(toy("Revealing"), device, **settings) as worker:
        assert worker.description["pid"] == worker.pid
        return worker.description


def checked(written, /, *words, **settings):
    done = concord(checking(toy("Revealing"), written), *words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((written / "out.json").read_text())["environments"][toy("Revealing")]


XLA = "--xla_cpu_enable_fast_math=false"


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        (
            "cpu",
            {"threads": 3},
            {**dict.fromkeys(THREADS, "3"), "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        ),
        (
            "cuda:0",
            {"threads": 1},
            {
                "CUDA_VISIBLE_DEVICES": "7",
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            },
        ),
        (
            "cpu",
            {"threads": 1, "deterministic": True},
            {
                "XLA_FLAGS": f"{XLA} --xla_gpu_deterministic_ops=true",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            },
        ),
    ],
)
def test_a_worker_has_what_is_asked_whatever_the_parent_has(monkeypatch, device, settings, expected):
    for name in (*THREADS, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "7")
    for name in ("JAX_PLATFORMS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", XLA)
    environment = opened(device, **settings)["environment"]
    assert expected.items() <= environment.items()
    assert ("JAX_PLATFORMS" in environment) == (device == "cpu")
    assert ("CUBLAS_WORKSPACE_CONFIG" in environment) == ("deterministic" in settings)


SHADOWS = ("torch", "json", "select", "numpy", "safetensors", "logging")


def test_a_framework_is_the_installed_one_wherever_somebody_stands(tmp_path):
    # The current folder has modules with the names of libraries, and the path leads to folders of a
    # framework's name, also through a link.
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('it stands in the place of another')\n")
    folder, link = ROOT / "backends", tmp_path / "link"
    link.symlink_to(folder)
    about = checked(
        tmp_path,
        folder=tmp_path,
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, link, folder))),
        PYTHONSAFEPATH="1",
    )  # for the parent
    assert about["path"][-1] == about["folder"] == str(tmp_path)
    assert str(folder) not in [str(Path(entry).resolve()) for entry in about["path"]]
    assert "PYTHONSAFEPATH" not in about["environment"]
    installed = {name: importlib.util.find_spec(name) for name in about["origins"]}
    assert about["origins"] == {
        name: module_spec.origin if module_spec else None for name, module_spec in installed.items()
    }
    assert not {"torch", "tensorflow", "paddle", "jax"} & set(about["modules"])


# Other interpreters, other hosts.


def test_the_given_interpreter_is_used(tmp_path):
    python = marked_python(tmp_path / "a folder" / "python", "other")
    named = f"{toy('Revealing')}={python.parent}//{python.name}"
    assert checked(tmp_path, "--python", named)["environment"]["TOY_MARKER"] == "other"


@pytest.mark.parametrize(
    ("program", "status", "words"),
    [
        ("/no/such/python", "broken", "its process could not be started: /no/such/python: "),
        ("/bin/echo", "crashed", "its process ended with exit code 0"),
        ("sleeping", "timed out", "no answer within 0.5 s; it was stopped"),
    ],
)
def test_an_interpreter_that_is_none_is_told(tmp_path, program, status, words):
    script(tmp_path / "sleeping", "exec sleep 600")
    limit = 0.5 if program == "sleeping" else None
    with pytest.raises(WorkerFailure) as failed:
        backends.open(toy("NumpyBackend"), python=str(tmp_path / program), time_limit=limit)
    assert failed.value.status == status
    assert failed.value.detail.startswith(words)


def test_time_in_which_a_worker_waits_for_a_core_does_not_count(tmp_path, monkeypatch):
    waits = iter([0, 10**18, 0])
    monkeypatch.setattr("concord.backends.machine.waited", lambda pid: Counter(thread=next(waits)))
    with pytest.raises(WorkerFailure, match="timed out"):
        backends.open(
            toy("NumpyBackend"), python=str(script(tmp_path / "sleeping", "exec sleep 600")), time_limit=0.1
        )
    assert not [*waits]


def test_a_run_had_weights_in_the_order_of_the_specification_and_says_who_made_it():
    request = request_for(small_config(), dtype="bfloat16")
    shuffled = replace(request, weights=dict(reversed(request.weights.items())))
    with backends.open(toy("SaysTheOrder"), threads=1) as worker:
        for variant in (request, shuffled):
            run = run_of(worker, variant)
            assert run.info["order"] == list(spec.parameters(request.config))
    assert (run.backend, run.dtype, run.requested) == (worker.name, "bfloat16", ("taps", "gradients"))
    assert (list(run.taps), run.loss.shape) == (list(spec.taps(request.config)), ())
    assert run.info["peak_memory_bytes"] > MIB


def awkward(config, dtype):
    # Numbers that are lost most easily: -0, subnormals, and the largest.
    target = spec.precision(dtype)
    least = target.smallest_normal * (2 * target.unit_roundoff)
    numbers = [-0.0, least, -3 * least, target.largest, -target.largest, 1 + 2 * target.unit_roundoff]
    weights = spec.initialize(config)
    for array in weights.values():
        array.reshape(-1)[: len(numbers)] = numbers[: array.size]
    return weights


# Refusals.


@pytest.mark.clause("INP-1", "WGT-1")
def test_bad_input_is_refused_and_the_worker_lives_on(open_worker, small):
    worker, request = open_worker("torch"), request_for(small("vanilla-encoder"))
    ids, weights = request.batch.input_ids.copy(), {**request.weights}
    ids[2, 4] = 23
    del weights["layers.1.feed_forward.inner.bias"]
    for change, message in (
        (
            {"batch": replace(request.batch, input_ids=ids)},
            "'input_ids' is 23 at (2, 4) but must",
        ),
        ({"weights": weights}, "'layers.1.feed_forward.inner.bias' is missing but is required"),
    ):
        (line,) = refusal(run_of, worker, replace(request, **change))
        assert message in line
        assert "backend=torch" in line
    assert run_of(worker, request).output.shape == (3, 3)


# The four frameworks.


@pytest.mark.in_turn
@pytest.mark.clause("WGT-4")
def test_weights_that_go_into_a_model_come_back_bit_for_bit(worker, variant_config):
    request = request_for(variant_config, training=Training(Recipe(algorithm="sgd", learning_rate=0.0), ()))
    for dtype in spec.PRECISIONS:
        weights = awkward(variant_config, dtype)
        try:
            with worker.train(replace(request, weights=weights, dtype=dtype)) as session:
                state = session.state()
        except Unsupported:
            assert (worker.name.rpartition(":")[2], dtype) in (("paddle", "bfloat16"), ("paddle", "float16"))
            continue
        assert_same_bits(section(state, "parameters."), round_inputs(weights, request.batch, dtype)[0])


@pytest.mark.clause("DRP-1")
def test_a_run_repeated_is_the_same_bit_for_bit(worker, small):
    request = request_for(small("vanilla-encoder"))
    first, second = (arrays_of(run_of(worker, request)) for _ in range(2))
    assert_same_bits(second, first)


def test_a_device_that_is_not_there_is_unsupported(worker, small, monkeypatch):
    monkeypatch.setattr(worker, "device", "cuda:7")
    with pytest.raises(Unsupported, match=r"(?i)cuda|gpu"):
        run_of(worker, request_for(small()))
