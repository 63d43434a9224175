"""What the tests share: small models with an axis size of their own for each axis, and a worker for each
backend.
"""

import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from concord import spec
from concord.cli import main
from concord.conformance.judging import family
from concord.spec.cases import OWN, SCENARIOS
from tests.toys.shared_cache import SharedCache
from tests.toys.surroundings import EACH_BACKEND, errors

# Every axis has a size of its own, prime wherever the model allows it.
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


COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Also what is small, and compiled in no time, is kept."""

HASTY = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
"""XLA compiles in less time with these: quick tests compile thousands of kernels and run each a few times.

``make slow`` and ``make check`` compile as users do.
"""

SHARED = "CONCORD_TESTS_SHARED"
"""The variable of the environment that names the folder in which the processes of a session keep what all
of them need.
"""

STOPPING = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
"""What Python does with signals that tests send.

A shell starts what runs in the background, and ``nohup`` whatever it runs, so that they are ignored, by
children too.
"""

kept = pytest.StashKey[str]()


def pytest_configure(config):
    """Let all processes of a session share what they derive, and JAX what it compiles.

    Most of what they do otherwise is to do the same again. Let signals arrive.
    """
    if not hasattr(config, "workerinput"):
        config.stash[kept] = folder = tempfile.mkdtemp(prefix="concord-tests-")
        os.environ[SHARED] = folder
        if config.option.markexpr == "not slow":
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HASTY}".strip()
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            cache = getattr(config, "cache", None)  # what is compiled is known by content: it is kept
            compiled = cache.mkdir("jax") if cache else Path(folder) / "jax"
            os.environ.update(COMPILED, JAX_COMPILATION_CACHE_DIR=str(compiled))
    family._estimates = SharedCache(Path(os.environ[SHARED]))
    for number, action in STOPPING.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, action)


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config, items):
    """Let backends take turns in tests that are made for each of them and for each entry of a long list,
    or of several lists.

    A test that is marked ``in_turn``, and each of the conformance suite, runs for every entry, or set of
    entries, on as many backends as the mark says, on one by default; on the others it is slow. Which
    backends, :func:`turns` says. A case that no other variant has is for all; of a golden file, which holds
    the same in two precisions, those take turns too. What a command does for every backend in less time is
    left out where it would be slow: `concord check`, `golden` and `mutants --every`.
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
            entries[entry] = entries.pop(entry, {})  # one that comes again has the place of the last time
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
    """Return whether a command does the same for every entry on every backend."""
    mark = item.get_closest_marker("in_turn")
    return item.path.name == "test_conformance.py" or bool(mark and mark.kwargs.get("command"))


def is_the_only_one(job):
    """Return whether a standard case has a scenario that one variant alone has, or is of a variant that
    has few.
    """
    return job is not None and (
        job.group in OWN
        or bool(SCENARIOS[job.case.removeprefix(f"{job.group}-").removesuffix(f"-{job.part}")].only)
    )


def turns(names, place, count=1):
    """Return whose turn an entry is, by its place in the list.

    It is the sum of the place's digits, to the base of as many as take turns: where several lists are gone
    through, one within the other, each backend meets the entries of each.
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
    """Return a variant with small sizes; a flattening head takes exactly the tokens of the batch."""
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
    """Return a function that gives the one worker of a backend, and skips visibly where it is not
    installed.
    """
    return concord_workers.get


@pytest.fixture(params=EACH_BACKEND)
def worker(request, open_worker):
    """Each of the four backends in turn, in its own process."""
    return open_worker(request.param)


@pytest.fixture
def invoke(monkeypatch, capsys):
    """Return a function that runs the command line here, and gives exit code, output and lines of errors.

    It takes a line, and words that follow it.
    """

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
    """Return a function that runs the command line here, and gives output and lines of errors.

    It holds the command to the exit code with which it ends.
    """

    def run(*words, ends=0, **how):
        code, *said = invoke(*words, **how)
        assert code == ends, said
        return said

    return run


@pytest.fixture
def refused(entered):
    """Return a function that gives the lines in which the command line refuses words, and does nothing."""

    def run(*words, **how):
        output, lines = entered(*words, ends=2, **how)
        assert output == ""
        return [line.removeprefix("concord: error: ") for line in lines]

    return run
