"""Fixtures of the tests: small models, one worker for each backend, and the command line."""

import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

# Two processes of tests on two cores slow each other down if each uses both. PyTorch and NumPy read this when
# they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from concord import spec
from concord.cli import main
from concord.conformance import plugin
from concord.conformance.judging import family
from concord.spec.cases import OWN, SCENARIOS
from tests.toys.shared_cache import SharedCache
from tests.toys.surroundings import EACH_BACKEND, errors, toy

# Each axis has a size of its own, prime wherever the model allows it.
SIZES = {
    "vocab_size": 23,
    "max_positions": 13,
    "d_model": 10,
    "num_heads": 2,
    "d_ff": 17,
    "num_layers": 2,
    "num_classes": 3,
}
TOKENS = 11


# JAX also caches small kernels and those that compile quickly.
COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

# XLA compiles faster with these flags. Quick tests compile thousands of kernels and run each a few times.
# `make slow` and `make check` compile as users do: with these flags, copies of one tensor may differ
# (backends/jax/README.md).
HASTY = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"

# The environment variable with the folder that the processes of a test session share.
SHARED = "CONCORD_TESTS_SHARED"

# Python's defaults for the signals that tests send. Shells and `nohup` have background processes ignore them,
# and children inherit that.
STOPPING = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}

kept = pytest.StashKey[str]()


class Suite(plugin.Suite):
    """The suite at less cost, in the quick tests."""

    def runner(self, name):
        # A framework takes seconds to start, so the worker that changes its runs on request does all. PyTorch
        # has two: the adapter as it is refuses such changes.
        return super().runner(toy(name, "built_in") if name in ("jax", "paddle", "tf") else name)

    def conform(self, test, backend, job):
        # For sizes that no other case has, JAX would compile every operation: four times as long.
        usual, golden = self.settings.execution, "concord_golden" in test.callspec.params
        execution = "compiled" if golden and backend == "jax" else usual
        self.runner(backend).settings = replace(self.settings, execution=execution)
        super().conform(test, backend, job)


def pytest_configure(config):
    """Share results and compiled kernels among a session's processes, and let signals arrive."""
    if not hasattr(config, "workerinput"):
        config.stash[kept] = folder = tempfile.mkdtemp(prefix="concord-tests-")
        os.environ[SHARED] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile Concord anew
        if config.option.markexpr == "not slow":
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HASTY}".strip()
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            cache = getattr(config, "cache", None)  # compiled kernels are keyed by content, so they are kept
            compiled = cache.mkdir("jax") if cache else Path(folder) / "jax"
            os.environ.update(COMPILED, JAX_COMPILATION_CACHE_DIR=str(compiled))
    if config.option.markexpr == "not slow":
        plugin.Suite = Suite
    family._estimates = SharedCache(Path(os.environ[SHARED]))
    for number, action in STOPPING.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # Thousands of tests stay, so looking for garbage among them again and again takes seconds.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    """Let backends take turns in tests that run for each backend and each entry of one or more lists.

    Tests marked ``in_turn`` and the conformance suite run every entry on as many backends as the mark says,
    by default one; on the others, they are slow. Standard cases that only one variant has run on every
    backend, and the two precisions of golden files take turns. Slow tests are left out if a command does the
    same in less time.
    """
    functions = {}
    for item in items:
        mark = item.get_closest_marker("in_turn")
        if mark or item.path.name == "test_conformance.py":
            function, (backend,) = item.nodeid.partition("[")[0], item.get_closest_marker("xdist_group").args
            golden = item.callspec.params.get("concord_golden")
            seat, entry = (
                backend,
                tuple((name, id(value)) for name, value in item.callspec.params.items() if value != backend),
            )
            if golden:
                seat, entry = f"{backend} {golden.dtype}", (golden.group, golden.case)
            entries = functions.setdefault(function, {})
            entries[entry] = entries.pop(entry, {})  # a repeated entry takes its last place
            entries[entry].setdefault(seat, []).append(item)
    for entries in functions.values():
        for place, seats in enumerate(entries.values()):
            mark = next(iter(seats.values()))[0].get_closest_marker("in_turn")
            for seat in seats.keys() - turns(sorted(seats), place, *(mark.args if mark else ())):
                for item in seats[seat]:
                    if not is_the_only_one(item.callspec.params.get("concord_standard")):
                        item.add_marker("slow")
    left_out = {item for item in items if item.get_closest_marker("slow") and has_command(item)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]


def has_command(item):
    mark = item.get_closest_marker("in_turn")
    return item.path.name == "test_conformance.py" or bool(mark and mark.kwargs.get("command"))


def is_the_only_one(job):
    # A case of a scenario that only one variant has, or of a variant with few cases.
    return job is not None and (
        job.group in OWN
        or bool(SCENARIOS[job.case.removeprefix(f"{job.group}-").removesuffix(f"-{job.part}")].only)
    )


def turns(names, place, count=1):
    """The backends whose turn an entry is, by its place in the list.

    It adds up the digits of the place, with the number of backends as the base. So each backend meets every
    entry of each list, even if lists are nested.
    """
    first = 0
    while place:
        place, digit = divmod(place, len(names)) if len(names) > 1 else (0, 0)
        first += digit
    return {names[(first + further) % len(names)] for further in range(count)}


def pytest_unconfigure(config):
    if kept in config.stash:
        shutil.rmtree(config.stash[kept], ignore_errors=True)


def small_config(name="nndl-paddle-api", **fields):
    """A small variant; a flattening head fits the batch's tokens."""
    room = {"max_positions": TOKENS} if spec.variant(name).pooling == "flatten" else {}
    return spec.variant(name, **{**SIZES, **room, **fields})


@pytest.fixture
def small():
    return small_config


@pytest.fixture(params=spec.variants())
def variant_config(request):
    return small_config(request.param)


@pytest.fixture(scope="session")
def open_worker(concord_workers):
    """Returns the only worker of a backend, or skips."""
    return concord_workers.get


@pytest.fixture(params=EACH_BACKEND)
def worker(request, open_worker):
    return open_worker(request.param)


@pytest.fixture(params=EACH_BACKEND)
def altered(request, open_worker):
    """The worker of a backend that changes its runs on request."""
    return open_worker(toy(request.param, "built_in"))


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Runs a command line in this process; returns exit code, output and error lines."""

    def run(line="", *words, columns=200):
        monkeypatch.setattr(sys, "argv", ["concord", *shlex.split(line), *map(str, words)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, errors(printed.err).splitlines()

    return run


@pytest.fixture
def entered(invoke):
    """The same without the exit code, which has to be `ends`."""

    def run(*words, ends=0, **how):
        code, *output = invoke(*words, **how)
        assert code == ends, output
        return output

    return run


@pytest.fixture
def refused(entered):
    """Returns the error lines of a command line that is refused without output."""

    def run(*words, **how):
        output, lines = entered(*words, ends=2, **how)
        assert output == ""
        return [line.removeprefix("concord: error: ") for line in lines]

    return run
