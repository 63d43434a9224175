"""What the tests share: small models with an axis size of their own for each axis, and a worker for each backend."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from concord import backends, spec
from concord.backends.pool import Seat
from concord.backends.worker import Worker, WorkerFailure

# Every axis has a size of its own, prime wherever the model allows it.
SIZES = {"vocab_size": 23, "max_positions": 13, "d_model": 10, "num_heads": 2, "d_ff": 17, "num_layers": 2, "num_classes": 3}
TOKENS, BATCH = 11, 7


COMPILED = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
"""Also what is small, and compiled in no time, is kept."""

kept = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Let all JAX processes of a session share what they compile: most of what they do otherwise is to compile the same again."""
    if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.stash[kept] = tempfile.mkdtemp(prefix="concord-jax-")
        os.environ.update(COMPILED, JAX_COMPILATION_CACHE_DIR=config.stash[kept])


def pytest_unconfigure(config: pytest.Config) -> None:
    if kept in config.stash:
        shutil.rmtree(config.stash[kept], ignore_errors=True)


def small_config(name: str = "nndl-paddle-api", **fields: object) -> spec.EncoderConfig:
    """Return a variant with small sizes; a flattening head takes exactly the tokens of the batch."""
    room = {"max_positions": TOKENS} if spec.variant(name).pooling == "flatten" else {}
    return spec.variant(name, **{**SIZES, **room, **fields})


@pytest.fixture
def small() -> Callable[..., spec.EncoderConfig]:
    return small_config


@pytest.fixture(params=spec.variants())
def variant_config(request: pytest.FixtureRequest) -> spec.EncoderConfig:
    return small_config(request.param)


@pytest.fixture(scope="session")
def open_worker() -> Iterator[Callable[[str], Worker]]:
    """Return a function that gives the one worker of a backend, and skips visibly where it is not installed."""
    seats: dict[str, Seat] = {}

    def worker_of(name: str) -> Worker:
        seat = seats.setdefault(name, Seat(partial(open_backend, name), restarts=None))
        try:
            return seat.get()
        except WorkerFailure as failure:
            if failure.status != "absent":
                raise
            pytest.skip(f"{name} is not installed: {failure.detail}")

    yield worker_of
    for seat in seats.values():
        seat.end()


def open_backend(name: str, opened: Callable[[Worker], None]) -> Worker:
    return backends.open(name, threads=1, opened=opened)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in sorted(backends.BUILT_IN)])
def worker(request: pytest.FixtureRequest, open_worker: Callable[[str], Worker]) -> Worker:
    """Each of the four backends in turn, in its own process."""
    return open_worker(request.param)
