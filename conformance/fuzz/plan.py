"""Plans of a hunt, whose cases are drawn from the seed and their numbers.

No draw has 100 values or more, since Hypothesis mixes constants from loaded modules into wider ranges, and
cases would depend on imports.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, configuration
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from concord.conformance.fuzz.random_cases import ATTENTION_PARTS, KEY_MASKS, PADDINGS, FuzzCase
from concord.conformance.record_fields import Count, Number
from concord.spec.config import CHOICES, EncoderConfig
from concord.spec.parameters import PROFILES
from concord.spec.tensors import PARTS, POOLED

# Default number of sizes.
SHAPES = 12

# Cases per Dask task, after which a backend that crashed too often is restarted.
CHUNK = 50


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cases to run."""

    names: tuple[str, ...]
    seed: Count = 0  # not negative
    cases: Count | None = 100  # None: run until `until`
    dtypes: tuple[str, ...] = ("float32",)
    parts: tuple[str, ...] = tuple(PARTS)
    shapes: Count = SHAPES  # number of sizes that the cases share
    chunk: Count = CHUNK  # cases per chunk
    until: Number | None = None  # end time, in seconds since the epoch

    @property
    def indices(self) -> Iterable[int]:
        """Numbers of the cases."""
        return itertools.count() if self.cases is None else range(self.cases)

    @property
    def chunks(self) -> Iterator[tuple[int, Iterable[int]]]:
        """Numbered chunks of case numbers."""
        indices = iter(self.indices)
        return enumerate(iter(lambda: list(itertools.islice(indices, self.chunk)), []))

    @property
    def late(self) -> bool:
        """Whether time is up."""
        return self.until is not None and time.time() >= self.until


def sample(plan: Plan, indices: Iterable[int]) -> list[FuzzCase]:
    """Draw cases without running them."""
    with files_elsewhere():
        return [drawn(plan, index) for index in indices]


def drawn(plan: Plan, index: int) -> FuzzCase:
    """Draw a case reproducibly from its number."""
    # Hypothesis draws the smallest case first, and derives most later cases from earlier ones by changing a
    # value or two. Each case is therefore the second one of a separate Hypothesis run, and depends only on
    # the seed and its number.
    settings = hypothesis.settings(
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
    test = hypothesis.given(fuzz_cases(plan.dtypes, plan.parts, pool(plan.seed, plan.shapes)))
    cases: list[FuzzCase] = []

    def keep(case: FuzzCase) -> None:
        cases.append(case)

    hypothesis.seed(seed)(settings(test(keep)))()
    return cases[-1]


@contextmanager
def files_elsewhere() -> Iterator[None]:
    """Keep Hypothesis from writing to the working directory."""
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            configuration.set_hypothesis_home_dir(None)


# Draws.

# Mask constants of published sources; other negative values are also drawn.
MASK_VALUES = (-1e9, -1e4, -(2.0**32) + 1, float(np.finfo(np.float32).min))

SCALES = (1.0, *(quarter / 4 for quarter in range(1, 13) if quarter != 4))
OFFSETS = (0.0, 0.0, 0.0, 0.0, 1.0, 8.0, 64.0, 512.0)
BASES = (10000.0, 10000.0, 2.0, 100.0, 1e6)
L2_WEIGHTS = (0.0, 0.0, 0.01, 1.0)
LENGTH_EPSILONS = (1e-12, 1e-6, 1.0)
MOSTLY_MODEL = ("model", "model", "model", "model", "pooled", "encoder", "stack", "attention", "dot_product")
# With 100 rows or more, the padding row is one of the first or the last, because no draw has 100 values.
ROWS = 8

# Weight of small sizes relative to large ones, which take a few seconds.
SMALL = 4

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case."""

    batch: int
    tokens: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_classes: int
    vocab_size: int
    # Including room for positions that start at 1.
    max_positions: int
    num_segments: int

    @property
    def volume(self) -> int:
        """Elements per activation, the sort key."""
        return self.batch * self.tokens * self.num_heads * self.head_dim

    @property
    def large(self) -> bool:
        """Whether it belongs to :data:`LARGE`."""
        return self.num_heads > 4 or self.tokens > 37 or self.vocab_size > 61

    @property
    def apart(self) -> bool:
        """Whether all axes differ in size where possible."""
        # Swapped axes of equal size would go unnoticed.
        width = self.num_heads * self.head_dim
        sizes = [self.batch, self.tokens, width, self.d_ff, self.vocab_size, self.max_positions]
        sizes += [self.head_dim] if self.num_heads > 1 else []
        return len(set(sizes)) == len(sizes)


# Sizes in every pool of five or more: usual ones, one token and head, one head of width 1, width 64, and one
# longer text.
FIXED = (
    Sizes(3, 5, 2, 7, 11, 3, 19, 13, 2),
    Sizes(1, 1, 1, 3, 2, 2, 5, 4, 1),
    Sizes(2, 3, 1, 1, 5, 2, 7, 4, 0),
    Sizes(2, 11, 4, 16, 67, 5, 31, 13, 3),
    Sizes(1, 37, 3, 5, 23, 1, 53, 41, 0),
)

# Sizes at which kernels branch, each kind large in one way; every pool of nine or more contains one of each.
LARGE = {
    "heads": {
        "batch": (1, 2, 3),
        "num_heads": (5, 6, 7, 8, 11, 12, 13, 16),
        "head_dim": (1, 2, 3),
        "tokens": (3, 5, 7, 11),
    },
    "texts": {
        "num_heads": (1, 2),
        "head_dim": (1, 2, 3),
        "tokens": (67, 130, 131, 257, 263, 300),
        "batch": (1,),
    },
    "tables": {
        "num_heads": (1, 2),
        "head_dim": (1, 2, 3),
        "vocab_size": (257, 40_009, 66_001, 70_001),
        "tokens": (13, 17, 19),
        "batch": (1, 2),
    },
}


@functools.cache
def pool(seed: int, count: int) -> tuple[Sizes, ...]:
    """Sizes shared by all cases, smallest first."""
    # JAX compiles each primitive for each new shape, which takes seconds per tuple: with individual sizes,
    # most time would be spent on compilation. The random stream is separate from those of the cases.
    generator = np.random.default_rng([seed, 0x512E5])
    result = list(FIXED[:count])
    kinds = [*LARGE.values()] if count >= 9 else []
    while len(result) < count:
        candidate = _random_sizes(generator, kinds[-1] if kinds else {})
        if candidate.apart and candidate not in result:
            result.append(candidate)
            kinds = kinds[:-1]
    return tuple(sorted(result, key=lambda sizes: (sizes.large, sizes.volume)))


def _random_sizes(generator: np.random.Generator, kind: Mapping[str, Sequence[int]]) -> Sizes:
    usual: dict[str, Sequence[int]] = {
        "batch": (1, 2, 3, 4, 5, 7),
        "tokens": _PRIMES[:7],
        "num_heads": (1, 2, 3, 4),
        "head_dim": (1, 2, 3, 4, 5, 7, 8),
        "d_ff": _PRIMES,
        "num_classes": (1, 2, 3, 4, 5),
        "vocab_size": _PRIMES[1:],
        "num_segments": (0, 1, 2, 3),
    }
    sizes = {axis: int(generator.choice(values)) for axis, values in {**usual, **kind}.items()}
    room = [prime for prime in _PRIMES if prime > sizes["tokens"]] or [sizes["tokens"] + 1]
    return Sizes(**sizes, max_positions=int(generator.choice(room)))


@st.composite
def fuzz_cases(
    draw: DrawFn, dtypes: Sequence[str], parts: Sequence[str], shared: Sequence[Sizes]
) -> FuzzCase:
    """Draw a case."""
    # Hypothesis draws the smallest case first, and departs from it at the first draw, where this is harmless.
    weights_seed = draw(_seeds())
    # Small sizes come first, for the smallest case, and repeatedly.
    weighed = [sizes for sizes in shared for _ in range(1 if sizes.large else SMALL)]
    sizes = draw(st.sampled_from(weighed))
    part = draw(st.sampled_from([part for part in MOSTLY_MODEL if part in parts]))
    config = draw(configurations(sizes, part))
    fewer = draw(st.booleans())
    attends = part in ATTENTION_PARTS
    return FuzzCase(
        config=config,
        part=part,
        dtype=draw(st.sampled_from(list(dtypes))),
        batch=sizes.batch,
        tokens=sizes.tokens,
        queries=(sizes.tokens // 2 + 1 if fewer else sizes.tokens + 2) if attends else sizes.tokens,
        weights_seed=weights_seed,
        inputs_seed=draw(_seeds()),
        profile=draw(st.sampled_from(list(PROFILES))),
        scale=draw(st.sampled_from(SCALES)),
        offset=draw(st.sampled_from(OFFSETS)),
        padding=draw(st.sampled_from(PADDINGS)),
        key_mask=draw(st.sampled_from(KEY_MASKS)) if attends else "none",
        query_mask=draw(st.booleans()) if attends else False,
    )


def _seeds() -> SearchStrategy[int]:
    return st.tuples(*[st.integers(0, 99)] * 3).map(
        lambda digits: (digits[0] * 100 + digits[1]) * 100 + digits[2]
    )


@st.composite
def configurations(draw: DrawFn, sizes: Sizes, part: str) -> EncoderConfig:
    """Draw a valid configuration of given sizes."""

    def pick(field: str) -> str:
        return draw(st.sampled_from(CHOICES[field]))

    width, flat = sizes.num_heads * sizes.head_dim, pick("pooling")
    # The flattening head takes exactly max_positions tokens (INP-5), without room for positions from 1
    # (INP-2).
    filled = flat == "flatten" and part in POOLED
    heads = pick("head_computation")
    padding = "counted" if filled else pick("position_of_padding")
    # The rows after the padding row must have room for the tokens (INP-2).
    free = sizes.max_positions - sizes.tokens if padding == "pad_row" else sizes.vocab_size
    pad = draw(_row_number(min(free, sizes.vocab_size)))
    start = (
        pad + 1
        if padding == "pad_row"
        else 1
        if padding == "zero_row"
        else 0
        if filled
        else draw(st.sampled_from((0, 1)))
    )
    configuration = functools.partial(
        EncoderConfig,
        vocab_size=sizes.vocab_size,
        max_positions=sizes.tokens if filled else sizes.max_positions,
        num_segments=sizes.num_segments,
        d_model=width,
        num_heads=sizes.num_heads,
        d_ff=sizes.d_ff,
        num_layers=draw(st.integers(1, 3)),
        num_classes=sizes.num_classes,
        pad_id=pad,
        position_start=start,
        position_of_padding=padding,
        embedding_scale=pick("embedding_scale"),
        embedding_norm=draw(st.booleans()),
        mask_fill=pick("mask_fill"),
        mask_value=draw(_mask_values()),
        mask_assignment=pick("mask_assignment") if heads == "batched" else "per_sample",
        query_mask=pick("query_mask"),
        qkv_bias=draw(st.booleans()),
        qkv_activation=pick("qkv_activation"),
        score_scale=pick("score_scale"),
        head_computation=heads,
        output_projection=draw(st.booleans()),
        norm_placement=pick("norm_placement"),
        norm_epsilon=10.0 ** (-3 - draw(st.integers(0, 90)) / 10),
        norm_epsilon_placement=pick("norm_epsilon_placement"),
        norm_variance=pick("norm_variance") if width > 1 else "biased",
        norm_sharing=pick("norm_sharing"),
        final_norm=draw(st.booleans()),
        activation=pick("activation"),
        pooling=flat,
        pooler=pick("pooler") if flat != "flatten" else "none",
        length_epsilon=draw(st.none() | st.sampled_from(LENGTH_EPSILONS)),
        l2_weight=draw(st.sampled_from(L2_WEIGHTS)),
        segment_padding_row=draw(_row(sizes.num_segments)),
        ignore_label=draw(_row(sizes.num_classes)) if sizes.num_classes > 1 else None,
    )
    row, positions = draw(_row(sizes.vocab_size)), dict[str, Any]()
    forward = "stored" if row is None else pick("token_padding_forward")
    kind = pick("positions")
    if kind == "learned":
        positions["position_padding_row"] = draw(_row(configuration.keywords["max_positions"]))
    else:
        positions["position_layout"] = pick("position_layout") if width % 2 == 0 else "interleaved"
        positions["position_exponent"] = pick("position_exponent")
        positions["position_base"] = draw(st.sampled_from(BASES))
    return configuration(token_padding_row=row, token_padding_forward=forward, positions=kind, **positions)


def _mask_values() -> SearchStrategy[float]:
    return st.sampled_from(MASK_VALUES) | st.integers(0, 99).map(lambda tenths: -(10.0 ** (tenths / 10)))


def _row_number(rows: int) -> SearchStrategy[int]:
    return st.integers(0, rows - 1) if rows < 100 else st.sampled_from([*range(ROWS - 1), rows - 1])


def _row(rows: int) -> SearchStrategy[int | None]:
    return st.none() | _row_number(rows) if rows else st.none()
