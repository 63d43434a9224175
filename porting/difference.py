"""The difference between two tensors, and its likely cause.

Checks run in order, from the most common mistakes to unexplained differences. A is the first tensor, B the
second, both in canonical layout, with bfloat16 as float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.porting.file_tensors import digest
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision
from concord.spec.sources.layouts import contiguous
from concord.spec.sources.source_tables import POSITIONS
from concord.spec.text import first_of

Array = NDArray[Any]

# Rows. RoBERTa shifts positions by 2; a leading row for padding shifts a table by 1.
FARTHEST = 8

LOWER = ("bfloat16", "float16", "float32")  # a bfloat16 value is also a float32 value

# Units in the last place that count as rounding: from a different product, or a round trip through a
# precision.
LAST_DIGITS = 8

# If more than this share of the rows differ, the tensor differs as a whole.
FEW_ROWS = 0.25

# Fewer numbers may have a common factor by chance. The bias (-x, x) of two trained classes always has one.
FEWEST_SCALED = 4

# Kind of a difference in the dtype alone.
SAME = "same values"

# Maximum values to compare at once: embeddings have tens of millions, and float64 copies would fill the
# memory.
WHOLE = 2**22


@dataclass(frozen=True)
class TensorDifference:
    """The difference between a tensor of B and that of A."""

    kind: str
    words: str
    cause: str = ""  # empty if unknown
    name: str = ""  # canonical name; for other tensors, the name in A's file
    other: str = ""  # the parameter of A with the same bits

    @property
    def reason(self) -> tuple[str, str, str]:
        """Key for grouping tensors in a report."""
        return self.kind, self.cause, self.other

    @property
    def sentence(self) -> str:
        """The difference and its likely cause, in words."""
        return f"{self.words}; likely: {self.cause}" if self.cause else self.words


@dataclass(frozen=True)
class _Both:
    first: Array
    second: Array
    name: str
    config: EncoderConfig

    @property
    def sides(self) -> tuple[tuple[Array, Array, str], ...]:
        return (self.second, self.first, "B"), (self.first, self.second, "A")


# Kind, words and cause. If the words end in a colon, sizes of the difference are added.
Finding = tuple[str, str, str]

Look = Callable[[_Both], Iterator[Finding]]


def classify(first: Array, second: Array, name: str, config: EncoderConfig) -> TensorDifference:
    """Classify the difference between tensors whose bits or dtypes differ."""
    pair = _Both(first, second, name, config)
    with np.errstate(all="ignore"):
        if first.shape != second.shape:
            looks: tuple[Look, ...] = (_transposed, _longer)
            last = ("another shape", f"has shape {first.shape} in A and {second.shape} in B", "")
        elif _equal(first, second):
            looks, last = (), (SAME, "the same values in a different dtype", "")
        else:
            looks = LOOKS if first.dtype.kind == second.dtype.kind == "f" else ()
            last = ("different", "different:", "")
        kind, words, cause = next((finding for look in looks for finding in look(pair)), last)
        words += f" {_sizes(pair)}" if words.endswith(":") else ""
    return TensorDifference(kind, words, cause, name)


def _not_finite(pair: _Both) -> Iterator[Finding]:
    for array, other, label in pair.sides:
        places = np.argwhere(~np.isfinite(array) & np.isfinite(other))
        # Equally many non-finite values have only moved; if all values of one tensor are non-finite,
        # _constant applies.
        if not 0 < np.isfinite(array).sum() < np.isfinite(other).sum():
            continue
        place = tuple(places[0].tolist())
        value, other_value = array[place], float(other[place])
        more = f"; {len(places) - 1} more not finite" if len(places) > 1 else ""
        yield (
            "not finite",
            f"{label} is {value} at {place}, where the other is {other_value:g}{more}:",
            f"{other_value:g} is out of the range of {array.dtype}"
            if np.isinf(value) and abs(other_value) > np.finfo(array.dtype).max
            else "",
        )


def _transposed(pair: _Both) -> Iterator[Finding]:
    if pair.first.ndim == 2 and _equal(pair.first.T, pair.second):
        square = (
            "; its shape does not show this, because it is square" if len(set(pair.first.shape)) == 1 else ""
        )
        cause = f"a kernel of (out, in) was taken for one of (in, out), or the other way round{square}"
        yield "transposed", "transposed", cause


def _longer(pair: _Both) -> Iterator[Finding]:
    (shorter, _, _), (longer, _, label) = sorted(pair.sides, key=lambda side: side[0].shape[:1])
    if shorter.ndim == 0 or shorter.shape[1:] != longer.shape[1:]:
        return
    rows, more = len(shorter), len(longer) - len(shorter)
    if rows and _equal(longer[:rows], shorter):
        padded = "the table was padded to a round number of rows, or tokens were added"
        cause = padded if "token" in pair.name else "the table was truncated or extended"
        yield (
            "rows missing",
            f"{label} has {more} more row{'s' * (more > 1)}; the other rows are the same",
            cause,
        )
    for shift in range(1, min(FARTHEST, rows - 1, more) + 1):
        if _equal(longer[shift : shift + rows], shorter):
            yield _of_shift(pair.name, "+" if label == "A" else "-", shift)


def _head_axis(name: str) -> int | None:
    _, inside, rest = name.rpartition("attention.")
    place, _, leaf = rest.partition(".")
    if not inside or place not in ("query", "key", "value", "output"):
        return None
    if place == "output":
        return 0 if leaf == "weight" else None
    return 1 if leaf == "weight" else 0


def _shifted(pair: _Both) -> Iterator[Finding]:
    first, second = pair.first, pair.second
    for shift in range(1, min(FARTHEST, len(first) - 2) + 1) if first.ndim == 2 else ():
        for sign, above, below in (("-", first, second), ("+", second, first)):
            if _equal(above[:-shift], below[shift:]):
                yield _of_shift(pair.name, sign, shift)


def _of_shift(name: str, sign: str, shift: int) -> Finding:
    cause = "one of them has additional rows before the first, such as one for padding"
    if name == POSITIONS:
        cause = f"positions counted from {shift} in one and from 0 in the other"
        # As in RoBERTa, from pad_id + 1 (SPEC POS-6).
        if shift == 2:
            cause = "positions counted from the padding id: the first token has position 2"
    return "rows shifted", f"rows are shifted by {shift}: row i of B is row i {sign} {shift} of A", cause


PERMUTED: dict[int, tuple[str, ...]] = {1: ("elements",), 2: ("rows", "columns")}  # by rank

# Permuting the feed-forward's hidden units has no effect if these three tensors are permuted alike.
HIDDEN = (
    ("feed_forward.inner.weight", "columns"),
    ("feed_forward.inner.bias", "elements"),
    ("feed_forward.outer.weight", "rows"),
)


def _reordered(pair: _Both) -> Iterator[Finding]:
    shape, heads, of_heads = pair.first.shape, pair.config.num_heads, _head_axis(pair.name)
    ways = [] if of_heads is None or shape[of_heads] % heads else [("heads", of_heads, heads)]
    ways += [(unit, axis, shape[axis]) for axis, unit in enumerate(PERMUTED.get(len(shape), ()))]
    for unit, axis, count in ways if pair.first.dtype == pair.second.dtype else ():
        arrays = (contiguous(np.moveaxis(array, axis, 0)) for array in (pair.first, pair.second))
        digests_a, digests_b = ([digest(part) for part in array.reshape(count, -1)] for array in arrays)
        if sorted(digests_a) == sorted(digests_b):
            positions = [place for place in range(count) if digests_a[place] != digests_b[place]]
            places = first_of([*map(str, positions)], 5)
            words = f"{len(positions)} {unit} are in a different order, at positions {places}"
            cause = _of_order(pair.name, unit)
            if axis == of_heads and unit != "heads" and _in_turns(digests_a, digests_b, heads):
                cause = "the width was split as (head_dim, heads) instead of (heads, head_dim)"
            yield f"{unit} permuted", words, cause


def _in_turns(first: Sequence[str], second: Sequence[str], heads: int) -> bool:
    return any(
        [part for place in range(heads) for part in a[place::heads]] == [*b]
        for a, b in ((first, second), (second, first))
    )


ALIKE = "the model's results are unchanged if all of the layer's tensors were reordered alike"


def _of_order(name: str, unit: str) -> str:
    if unit == "heads":
        return f"heads were reordered: {ALIKE}"
    if "token" in name and unit == "rows":
        return "the vocabulary was reordered"
    if name.startswith("classifier") and unit != "rows":
        return "the classes were reordered"
    if any(name.endswith(end) and unit == along for end, along in HIDDEN):
        return f"hidden units were reordered: {ALIKE}"
    return "they were sorted or remapped"


def _listed(places: Iterable[object]) -> str:
    return ", ".join(map(str, [*places][:5]))


def _rounded(pair: _Both) -> Iterator[Finding]:
    for name in LOWER:
        for low, high, label in pair.sides:
            if _equal(precision(name).round(high), low) and np.isfinite(low).all():
                cause = f"the file was saved in, or went through, {name}"
                yield "rounded", f"{label} is rounded to {name}:", cause


def _constant(pair: _Both) -> Iterator[Finding]:
    for array, _, label in pair.sides:
        if array.size > 1 and _equal(array, np.full_like(array, array.flat[0])):
            number = float(array.flat[0])
            cause = (
                "it was never loaded: a new model starts with these values"
                if number in (0.0, 1.0)
                else "it was filled, not loaded"
            )
            yield "all the same", f"all values of {label} are {number:g}", cause


def _scaled(pair: _Both) -> Iterator[Finding]:
    products = squares = 0.0
    for first, second in _strips(pair.first, pair.second):
        a, b = (array.astype(np.float64).reshape(-1) for array in (first, second))
        products, squares = products + float(a @ b), squares + float(a @ a)
    ratio = products / squares if squares else 0.0
    few = np.count_nonzero(pair.first) < FEWEST_SCALED
    # A factor this close to 1 is rounding, which the next check names.
    if not few and ratio and abs(ratio - 1) > 1e-6 and _near(pair, ratio):
        yield "scaled", f"B is A times {ratio:.9g}", _of_scale(ratio, pair.config)


def _of_scale(ratio: float, config: EncoderConfig) -> str:
    causes = {-1.0: "its sign is reversed"}
    for dimension, number, scaled in (
        ("d_model", config.d_model, "embeddings"),
        ("head_dim", config.head_dim, "scores"),
    ):
        words = f"sqrt({dimension}): the scale of {scaled} was folded into the weight"
        causes |= {number**0.5: f"the factor is {words}", number**-0.5: f"the factor is 1 / {words}"}
    return next((cause for factor, cause in causes.items() if math.isclose(ratio, factor, rel_tol=1e-5)), "")


def _rounding(pair: _Both) -> Iterator[Finding]:
    if _near(pair):
        cause = "it was recomputed, or converted to another precision and back"
        yield "rounding", "the same except for the last digits:", cause


def _rows(pair: _Both) -> Iterator[Finding]:
    rows = np.flatnonzero(~_alike(pair.first, pair.second).all(1)) if pair.first.ndim == 2 else ()
    if 0 < len(rows) <= FEW_ROWS * len(pair.first):
        differ = "1 row differs," if len(rows) == 1 else f"{len(rows)} rows differ, the first"
        words = f"{differ} at {_listed(rows)}:"
        zeroed = [label for array, _, label in pair.sides if not array[rows].any()]
        padding = zeroed and [*rows] == [pair.config.pad_id]
        yield "some rows", words, f"the padding row is zeroed in {zeroed[0]}" if padding else ""


# For tensors of equal shape; the first finding wins. NaN hides every other difference, so it comes first.
# Exact checks precede approximate ones, since a tensor rounded to float32 also differs only in its last
# digits.
LOOKS: tuple[Look, ...] = (
    _not_finite,
    _transposed,
    _shifted,
    _reordered,
    _rounded,
    _constant,
    _scaled,
    _rounding,
    _rows,
)


def _equal(first: Array, second: Array) -> bool:
    return first.shape == second.shape and all(_alike(a, b).all() for a, b in _strips(first, second))


def _alike(first: Array, second: Array) -> NDArray[np.bool_]:
    if first.dtype == second.dtype:
        # Compare bits instead of values: NaN then equals itself, and -0.0 differs from 0.0.
        bits = f"u{first.dtype.itemsize}"
        return np.asarray(first.view(bits) == second.view(bits))
    return np.asarray((first == second) | ((first != first) & (second != second)))


def _strips(first: Array, second: Array) -> Iterator[tuple[Array, Array]]:
    first, second = np.atleast_1d(first, second)
    # Strips of rows, so that a comparison can stop at the first difference.
    step = max(1, WHOLE // max(first[:1].size, 1))
    for begin in range(0, len(first), step):
        yield first[begin : begin + step], second[begin : begin + step]


def _near(pair: _Both, factor: float = 1.0) -> bool:
    digits = max(precision(array.dtype.name).unit_roundoff for array in (pair.first, pair.second))
    for first, second in _strips(pair.first, pair.second):
        a, b = first.astype(np.float64) * factor, second.astype(np.float64)
        size = np.maximum(abs(a), abs(b))
        close = abs(a - b) <= LAST_DIGITS * digits * size
        if not np.where(np.isfinite(size), close, (a == b) | _alike(first, second)).all():
            return False
    return True


def _sizes(pair: _Both) -> str:
    count, odd, largest, squares, total = 0, 0, 0.0, 0.0, 0.0
    for first, second in _strips(pair.first, pair.second):
        differ, a, b = ~_alike(first, second), first.astype(np.float64), second.astype(np.float64)
        finite = np.isfinite(a) & np.isfinite(b)
        gaps = abs(b - a)[finite]
        count += int(np.count_nonzero(differ))
        odd += int(np.count_nonzero(differ & ~finite))
        largest = max(largest, float(np.max(gaps, initial=0.0)))
        squares += float(gaps @ gaps)
        total += float(a[finite] @ a[finite])
    relative = math.sqrt(squares / total) if total else math.inf if squares else 0.0
    words = f"{count} of {pair.first.size} values differ"
    words += f", by at most {largest:.3g}" if largest else ""
    if largest and math.isfinite(relative):
        words += f" (root mean square of the difference: {relative:.2g} of A's)"
    words += f"; of these {odd} {'is' if odd == 1 else 'are'} not finite" if odd else ""
    return words
