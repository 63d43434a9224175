"""What to hunt through, and how a case follows from the seed and its number."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, configuration

from concord.conformance.fields import Count, Number
from concord.conformance.fuzz.cases import FuzzCase
from concord.conformance.fuzz.strategies import SHAPES, fuzz_cases, pool
from concord.spec.tensors import PARTS

CHUNK = 50
"""How many cases a task of Dask runs; and after how many a backend that died too often is started again."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to hunt through.

    Attributes:
        names: of backends.
        seed: of the run, not negative.
        cases: how many; None: until ``until``.
        dtypes, parts: what cases choose from.
        shapes: how many tuples of sizes the cases share.
        chunk: how many cases are given out at a time (:data:`CHUNK`).
        gradients: whether they are asked for and judged too.
        until: when to stop, in seconds since the epoch.
    """

    names: tuple[str, ...]
    seed: Count = 0
    cases: Count | None = 100
    dtypes: tuple[str, ...] = ("float32",)
    parts: tuple[str, ...] = tuple(PARTS)
    shapes: Count = SHAPES
    chunk: Count = CHUNK
    gradients: bool = True
    until: Number | None = None

    @property
    def indices(self) -> Iterable[int]:
        """The numbers of the cases."""
        return itertools.count() if self.cases is None else range(self.cases)

    @property
    def chunks(self) -> Iterator[tuple[int, Iterable[int]]]:
        """Numbers of chunks, and the numbers of the cases of each."""
        indices = iter(self.indices)
        return enumerate(iter(lambda: list(itertools.islice(indices, self.chunk)), []))

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return self.until is not None and time.time() >= self.until


def sample(plan: Plan, indices: Iterable[int]) -> list[FuzzCase]:
    """Return the cases of a run with these numbers, without running them."""
    with files_elsewhere():
        return [drawn(plan, index) for index in indices]


def drawn(plan: Plan, index: int) -> FuzzCase:
    """Return the case of a number, without running it: hypothesis draws the same each time.

    Hypothesis draws the smallest case first, and then most cases from earlier ones, with a value or two
    exchanged. So each case has a run of its own, in which it is the second: cases are independent of each
    other, and each follows from the seed and its number alone.
    """
    chosen = hypothesis.settings(
        max_examples=2,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    seed = int(np.random.SeedSequence([plan.seed, index]).generate_state(1, np.uint64)[0])
    given = hypothesis.given(fuzz_cases(plan.dtypes, plan.parts, pool(plan.seed, plan.shapes)))
    cases: list[FuzzCase] = []

    def keep(case: FuzzCase) -> None:
        cases.append(case)

    hypothesis.seed(seed)(chosen(given(keep)))()
    return dataclasses.replace(cases[-1], gradients=cases[-1].gradients and plan.gradients)


@contextmanager
def files_elsewhere() -> Iterator[None]:
    """Keep hypothesis from leaving a folder where somebody happens to stand."""
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)
