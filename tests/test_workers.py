"""Workers: processes of their own, on this machine and others, whatever becomes of them."""

import dataclasses
import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

import conformance.campaign
from concord import backends, spec
from concord.backends.pool import RESTARTS, Pool, Supervisor
from concord.backends.wire import WorkerFailure
from concord.backends.worker import THREADS
from concord.conformance import Setup, check_jobs, conduct, record
from concord.conformance.html import page
from tests.conftest import small_config
from tests.toys.disturbed import name_of
from tests.toys.running import alive, noted, until
from tests.toys.small import request_for, run_of
from tests.toys.surroundings import (
    ROOT,
    concord,
    errors,
    marked_python,
    options,
    python,
    script,
    toy,
)

MIB = 2**20
RIGHT, UNIMPORTABLE = toy("NumpyBackend"), name_of("lacks a library", "found")


def checking(name, folder):
    """Return a short check, whose results go into a folder."""
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
    """Another environment's interpreter brings its framework, NumPy and safetensors, and no more of ours."""
    ours = {"execnet", "psutil", "rich", "typer", "pytest"}
    program = f"import sys, concord.backends.remote; print(sorted({ours} & set(sys.modules)))"
    assert python("-c", program).stdout == "[]\n"


def opened(device="cpu", **settings):
    """Return what a worker finds in its process."""
    with backends.open(toy("Revealing"), device, **settings) as worker:
        assert worker.description["pid"] == worker.pid
        return worker.description


def checked(written, /, *words, **settings):
    """Return what the worker of a check finds in its process."""
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
    found = opened(device, **settings)["environment"]
    assert expected.items() <= found.items()
    assert ("JAX_PLATFORMS" in found) == (device == "cpu")
    assert ("CUBLAS_WORKSPACE_CONFIG" in found) == ("deterministic" in settings)


def test_a_framework_is_the_installed_one_beside_folders_of_its_name(tmp_path):
    """In the folder itself, and through a link and its name on PYTHONPATH."""
    folder, link = ROOT / "backends", tmp_path / "link"
    link.symlink_to(folder)
    about = checked(tmp_path, folder=folder, PYTHONPATH=os.pathsep.join(map(str, (link, folder))))
    assert Path(about["folder"]) == folder
    assert str(folder) not in [str(Path(entry).resolve()) for entry in about["path"]]
    installed = {name: importlib.util.find_spec(name) for name in about["origins"]}
    assert about["origins"] == {name: found.origin if found else None for name, found in installed.items()}
    assert not {"torch", "tensorflow", "paddle", "jax"} & set(about["modules"])


SHADOWS = ("torch", "json", "select", "numpy", "safetensors", "logging")


def test_the_folder_where_somebody_stands_comes_last(tmp_path):
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('it stands in the place of another')\n")
    about = checked(tmp_path, folder=tmp_path, PYTHONPATH=str(ROOT), PYTHONSAFEPATH="1")  # for the parent
    assert about["path"][-1] == about["folder"] == str(tmp_path)
    assert "PYTHONSAFEPATH" not in about["environment"]


# Other interpreters, other hosts.


def test_the_given_interpreter_is_used(tmp_path):
    python = marked_python(tmp_path / "a folder" / "python", "other")
    named = f"{toy('Revealing')}={python.parent}//{python.name}"
    assert checked(tmp_path, "--python", named)["environment"]["TOY_MARKER"] == "other"
    assert "TOY_MARKER" not in opened(threads=1)["environment"]


def failure_to_open(**settings):
    """Return status and detail of a toy that does not start."""
    try:
        backends.open(toy("NumpyBackend"), **settings).close()
    except WorkerFailure as failure:
        return failure.status, failure.detail
    return pytest.fail("it started")


@pytest.mark.parametrize("program", ["/no/such/python", "/bin/echo"])
def test_an_interpreter_that_is_none_is_broken(program):
    status, detail = failure_to_open(python=program)
    assert status == "broken"
    assert detail.startswith(f"its process could not be started: {program}: ")


def test_an_interpreter_that_never_answers_is_stopped(tmp_path):
    python = script(tmp_path / "python", "exec sleep 600")
    assert failure_to_open(python=str(python), time_limit=0.5) == (
        "timed out",
        "no answer within 0.5 s; it was stopped",
    )


# Workers that fail.

FAILURES = {
    name_of("SIGKILL"): ("crashed", "killed by SIGKILL", "first words\nlast words"),
    name_of("exits with a code"): ("crashed", "its process ended with exit code 77", ""),
    name_of("hangs"): ("timed out", "no answer within 5 s; it was stopped", "waiting for a lock"),
    name_of("hoards"): ("out of memory", "MiB, over its limit of 600 MiB, and was stopped", "allocating"),
    name_of("raises for want of memory"): ("out of memory", "MemoryError: Unable to allocate 8.00 PiB", ""),
    name_of("raises"): ("error", "ArithmeticError: it broke", "it broke\nand has more to say"),
    name_of("raises what is odd"): ("crashed", "Odd: it cannot be told as text", ""),
    name_of("raises what cannot be shown"): (
        "error",
        r"lone \ud800 surrogate, [/red] markup, \x1b[31m colour",
        r"ArithmeticError: lone \ud800 surrogate, [/red] markup, \x1b[31m",
    ),
    toy("ReturnsNothing"): (
        "error",
        "TypeError: run() returned a NoneType but must return a Run",
        "TypeError: run()",
    ),
    toy("NoSuchClass"): ("broken", "module 'tests.toys.numpy_backend' has no 'NoSuchClass'", ""),
    UNIMPORTABLE: (
        "broken",
        "ImportError: libtoy.so.1: cannot open shared object file",
        "ImportError: libtoy.so.1",
    ),
    name_of("lacks its framework", "found"): ("missing", "No module named 'no_such_framework'", ""),
}


@pytest.fixture(scope="module")
def wreckage(tmp_path_factory):
    """One check with a backend for every way to fail, and one that is right; results by name."""
    path = tmp_path_factory.mktemp("wreckage") / "out.json"
    done = concord(
        f"check --case bert-single --dtype float32 --json {path} --time-limit 5 --memory-limit 600",
        *options("--backend", (RIGHT, *FAILURES)),
    )
    assert path.exists(), done.stderr
    return done, {result["backend"]: result for result in json.loads(path.read_text())["results"]}


@pytest.mark.xdist_group("wreckage")
@pytest.mark.parametrize("name", FAILURES)
def test_a_worker_that_fails_says_how(wreckage, name):
    done, results = wreckage
    status, detail, words = FAILURES[name]
    assert results[name]["status"] == status
    assert detail in results[name]["detail"]
    assert "\n" not in results[name]["detail"]
    assert words in results[name].get("stderr", "")
    assert len(results[name].get("stderr", "").splitlines()) <= 10
    assert f"{name} {status}: " in done.stdout
    assert words.splitlines()[-1:] == [] or f"| {words.splitlines()[-1]}" in done.stdout


@pytest.mark.xdist_group("wreckage")
def test_a_worker_that_fails_leaves_the_others_results_and_exit_code_3(wreckage):
    done, results = wreckage
    assert done.returncode == 3
    assert errors(done.stderr) == ""
    assert results[RIGHT]["status"] == "agrees"
    assert len(results) == len(FAILURES) + 1
    assert "Traceback" not in done.stdout.replace("| Traceback", "")


def conducted(names, cases, monkeypatch, notes, **settings):
    monkeypatch.setenv("TOY_NOTES", str(notes))
    return conduct(
        check_jobs(["bert"], ["float32"], cases=[f"bert-{case}" for case in cases]),
        names,
        Setup(threads=1, **settings),
    )


def statuses(report):
    return [result.status for result in report.results]


CASES = ("ragged", "peaked", "tiny", "single", "full")


@pytest.mark.parametrize(
    ("name", "settings", "expected", "started"),
    [
        # The cases come in their own order: the fourth is the batch of one.
        (name_of("SIGKILL", "alone"), {}, ["agrees"] * 3 + ["crashed", "agrees"], 2),
        (name_of("SIGKILL"), {}, ["crashed"] * 5, 1 + RESTARTS),
        (name_of("hangs"), {"time_limit": 2.0}, ["timed out"] * 5, 1),
        (UNIMPORTABLE, {}, ["broken"] * 5, 0),
    ],
)
def test_a_worker_that_died_is_started_again_unless_that_is_hopeless(
    tmp_path, monkeypatch, name, settings, expected, started
):
    began = time.monotonic()
    report = conducted([name], list(CASES), monkeypatch, tmp_path, **settings)
    assert statuses(report) == expected
    assert len(noted(tmp_path, "started")) == started
    assert report.exit_code == 3
    assert time.monotonic() - began < 60


def test_the_memory_limit_counts_what_a_worker_has_started():
    limits = {"memory_limit": 700 * MIB, "time_limit": 20.0}
    with backends.open(name_of("forks a hungry one"), threads=1, **limits) as worker:
        with pytest.raises(WorkerFailure, match="out of memory"):
            run_of(worker, request_for(small_config()))
        assert worker.size == 0


def test_a_worker_that_has_grown_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr("concord.backends.worker.MUCH", 1)
    report = conducted([toy("Grows")], list(CASES), monkeypatch, tmp_path)
    assert statuses(report) == ["agrees"] * 5
    assert 1 < len(noted(tmp_path, "started")) < 5
    (about,) = report.environments.values()
    assert about["peak_memory_bytes"] >= 0


def test_what_a_worker_writes_is_kept_to_its_end_alone(monkeypatch):
    monkeypatch.setattr("concord.backends.process.MOST_WORDS", 1 << 20)
    with backends.open(name_of("floods and raises"), threads=1) as worker:
        with pytest.raises(WorkerFailure, match="after much noise") as failed:
            run_of(worker, request_for(small_config()))
        assert failed.value.stderr.endswith("ArithmeticError: after much noise")
        assert os.fstat(worker._stderr.fileno()).st_size < 1 << 24  # of 24 MiB


def test_weights_reach_a_backend_in_the_order_of_the_specification():
    request = request_for(small_config())
    shuffled = dataclasses.replace(
        request, weights=dict(sorted(request.weights.items(), key=lambda pair: pair[0][::-1]))
    )
    assert list(shuffled.weights) != list(request.weights)
    with backends.open(toy("SaysTheOrder"), threads=1) as worker:
        assert [run_of(worker, one).info["order"] for one in (request, shuffled, request)] == [
            list(spec.parameters(request.config))
        ] * 3


def test_no_worker_process_outlives_its_parents_interest(small):
    with backends.open(toy("NumpyBackend"), threads=1) as worker:
        process = psutil.Process(worker.pid)
        run_of(worker, request_for(small()))
    assert not process.is_running()
    worker.close()


def test_an_answer_that_cannot_be_read_is_an_error_of_that_backend(tmp_path, monkeypatch):
    if importlib.util.find_spec("ml_dtypes") is None:
        pytest.skip("ml_dtypes is not installed")
    report = conducted(
        [toy("ReturnsBfloat16"), toy("DeclaresNonsense"), toy("NumpyBackend")],
        ["single"],
        monkeypatch,
        tmp_path,
    )
    assert statuses(report) == ["error", "error", "agrees"]
    assert report.results[0].detail == "its answer cannot be read: KeyError: 'BF16'"
    assert (
        report.results[1].detail
        == "its answer cannot be read: 'not_exposed' is 'layers.*' but must be a list of strings"
    )


def test_a_fault_while_judging_is_concord_s_and_all_other_results_are_kept(monkeypatch):
    def judge(config, weights, batch, *more):
        if len(batch.required("labels")) == 1:
            raise AssertionError("of the judge\nin two lines")
        return right(config, weights, batch, *more)

    right = conformance.campaign.judge
    monkeypatch.setattr("concord.conformance.campaign.judge", judge)
    report = conduct(
        check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-single", "bert-full"]),
        [toy("NumpyBackend")],
        Setup(threads=1),
    )
    assert sorted(statuses(report)) == ["agrees", "agrees", "not judged"]
    (unjudged,) = [result for result in report.results if result.status == "not judged"]
    assert (unjudged.case, unjudged.detail) == (
        "bert-single",
        "a bug in Concord while judging: AssertionError: of the judge",
    )
    assert "Traceback" in unjudged.stderr
    assert "in judge" in unjudged.stderr
    assert report.exit_code == 3
    made = record.made(report, "check")
    record.parsed(record.text(made).encode())
    assert "could not be judged, by a fault of Concord, in 1 of 3 runs" in page(made)


# One worker to a supervisor, started again or given up, and all of them ended at once.


def opening(name, **settings):
    return lambda opened: backends.open(name, threads=1, opened=opened, **settings)


def test_a_worker_that_died_unseen_is_followed_by_another(small):
    supervisor = Supervisor(opening(toy("NumpyBackend")))
    first = supervisor.get()
    psutil.Process(first.pid).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerFailure, match=r"^crashed"):
        run_of(first, request_for(small()))  # not through the supervisor, as tests do
    assert supervisor.get() is not first
    assert run_of(supervisor.get(), request_for(small())).output.shape == (3, 3)
    supervisor.end()
    with pytest.raises(WorkerFailure, match="crashed: its work was ended"):
        supervisor.get()


@pytest.mark.parametrize("how", ["a task raises", "Ctrl-C", "halted"])
def test_all_workers_end_together(how, tmp_path, monkeypatch, small):
    monkeypatch.setenv("TOY_NOTES", str(tmp_path))
    request = request_for(small())
    pids = []

    def both_hang():
        return len(noted(tmp_path, "hanging")) == 2

    def task(supervisor):
        if supervisor is None:
            assert until(both_hang)
            if how == "Ctrl-C":
                os.kill(os.getpid(), signal.SIGINT)
            elif how == "a task raises":
                raise LookupError("the task's")
            return "third"
        try:
            run_of(supervisor.get(), request)
        except WorkerFailure as failure:
            return failure.status
        return "it ran"

    with Pool(3, halted=lambda: how == "halted" and both_hang()) as pool:
        supervisors = [
            pool.supervise(opening(name_of("hangs")), started=lambda worker: pids.append(worker.pid or 0))
            for _ in range(2)
        ]
        if how == "halted":
            assert pool.map(task, [*supervisors, None]) == ["crashed", "crashed", "third"]
        else:
            with pytest.raises(LookupError if how == "a task raises" else KeyboardInterrupt):
                pool.map(task, [*supervisors, None])
        assert pool.stopped
        assert len(pids) == 2
        assert until(lambda: not any(map(alive, pids)), 10.0)
