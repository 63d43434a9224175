"""What a tensor is, where it is wrong.

How its numbers are related to the right ones, or to others at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.context import Flags, norm_of, parameters_of
from concord.conformance.estimate import R, Z
from concord.conformance.expectation import root_mean_square
from concord.conformance.explain.computation import within
from concord.conformance.explain.question import Question
from concord.conformance.explain.regions import (
    FILLED,
    WORDS,
    Region,
    axes_of,
    everywhere,
    inputs_of,
    smallest,
)
from concord.conformance.explain.said import Description
from concord.conformance.wording import distinct, few, multiple
from concord.spec.arrays import Array
from concord.spec.precision import precision

LARGEST = 1e6
"""A larger multiple is no multiple: the right tensor is zero but for rounding."""

SMOOTH = 0.03
"""Share of an error that its neighbours' may leave over, for it to be a function of one number."""

MOST_PLACES = 512
"""Along a longer axis no place is compared with each other one."""


@dataclass(frozen=True)
class Relation:
    """What the wrong elements are.

    Attributes:
        kind: a word for it.
        text: in words that follow the tensor's name.
        value: what the tensor then is, where all of it is given; None where it is only known to be of a kind.
        numbers: those that were read off, by name.
        scale: by how much rounding is multiplied on the way to the value.
    """

    kind: str
    text: str
    value: Array | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0


def relate(question: Question, region: Region) -> Relation | None:
    """Return the first relation that holds in a region to within rounding."""
    seen = _Seen(question, region)
    looks = (_of_no_numbers, *(LOOKS if seen.finite else (_of_places, _of_multiples)))
    found = (relation for look in looks for relation in look(seen))
    return next((one for one in found if seen.holds(one)), None)


class _Seen:
    """A tensor in a region: the run's numbers and the right ones."""

    def __init__(self, question: Question, region: Region) -> None:
        self.question, self.config, self.tensor = question, question.config, question.tensor
        self.where, self.actual, self.right = region.flags, question.actual, question.right.value
        self.sigma = np.broadcast_to(question.right.sigma, self.right.shape)
        self.unit = precision(question.case.dtype).unit_roundoff
        self.finite = bool(np.isfinite(self.actual[self.where]).all())
        self.axes = axes_of(question)

    def holds(self, one: Relation) -> bool:
        """Return whether the tensor is what a relation says in the region, to within rounding."""
        if not all(map(math.isfinite, one.numbers.values())):
            return False
        if one.value is None:
            return True
        known = self.where & np.isfinite(self.sigma)
        if one.value.shape != self.actual.shape or not np.isfinite(one.value[known]).all():
            return False
        sigma = np.hypot(self.sigma * max(1.0, abs(one.scale)), self.unit * abs(one.value))[self.where]
        return within((self.actual - one.value)[self.where], sigma)

    def fit(self, term: Array, base: Array | float = 0.0) -> float | None:
        """Return the factor of a term that, with a base, comes nearest, each element in its sigma."""
        usable = self.where & np.isfinite(self.sigma) & (self.sigma > 0)
        term, left = ((array / self.sigma)[usable].astype(np.float64) for array in (term, self.actual - base))
        power = float(term @ term)
        return rounded(float(term @ left) / power) if len(term) > 1 and 0 < power < math.inf else None

    def inputs(self) -> dict[str, Array]:
        """Return what goes into the step, in the tensor's shape."""
        return {
            name: array for name, array in inputs_of(self.question).items() if array.shape == self.right.shape
        }

    def beside(self) -> dict[str, Array]:
        """Return the tensors that may have been mixed in.

        Of the step, its parameters, other layers' namesakes.
        """
        found, question, shape = self.inputs(), self.question, self.right.shape
        own, sublayer = parameters_of(self.tensor), self.tensor.rpartition(".")[0]
        for name, weight in question.case.weights.items():
            leaf = name.rpartition(".")[0]
            tails = [tail for tail in (shape[-1:], shape[-2:]) if tail and math.prod(tail) == weight.size]
            if weight.ndim == 1 and tails and (leaf == own or leaf.rpartition(".")[0] == sublayer):
                found[f"`{name}`"] = np.broadcast_to(weight.astype(np.float64).reshape(tails[0]), shape)
        if self.tensor.startswith("layers."):
            for layer in range(self.config.num_layers):
                name = f"layers.{layer}.{self.tensor.split('.', 2)[2]}"
                if name != self.tensor and np.shape(question.pinned.get(name, 0)) == shape:
                    found.setdefault(f"`{name}`", question.pinned[name])
        return {name: array for name, array in found.items() if np.isfinite(array).all()}


Look = Callable[[_Seen], Iterator[Relation]]


def _of_no_numbers(seen: _Seen) -> Iterator[Relation]:
    wrong = seen.actual[seen.where & ~np.isfinite(seen.actual)]
    if wrong.size and wrong.size >= 0.5 * seen.where.sum():
        if np.isnan(wrong).all():
            yield Relation("nan", "is no number (NaN)")
        elif (wrong > 0).all() or (wrong < 0).all():
            yield Relation("infinite", f"is {'minus ' if wrong[0] < 0 else ''}infinite")
        else:
            yield Relation("not finite", "is not finite")


def _of_constants(seen: _Seen) -> Iterator[Relation]:
    values = seen.actual[seen.where]
    if values.size > 1 and np.ptp(values) <= 4 * seen.unit * abs(values).max():
        constant = float(values.flat[0])
        kind, text = ("constant", f"is {constant:.6g} throughout") if constant else ("zero", "is zero")
        yield Relation(kind, text, np.full_like(seen.actual, constant), {"constant": constant})


def _of_same(seen: _Seen) -> Iterator[Relation]:
    yield from (Relation("other", f"is {name}", array) for name, array in seen.beside().items())


def _of_places(seen: _Seen) -> Iterator[Relation]:
    """Yield that places along an axis were taken from others, or that two axes are exchanged."""
    right, every = seen.right, np.arange
    for place, axis in enumerate(seen.axes):
        word, size = WORDS.get(axis, axis), right.shape[place]
        if not 2 <= size <= MOST_PLACES:
            continue
        source = _sources(seen, place)
        before, after = (f"of the {word} {way} (shifted by one along the {word} axis)" for way in WAYS)
        orders = {
            ("shifted", before): np.roll(every(size), 1),
            ("shifted", after): np.roll(every(size), -1),
            ("reversed", f"in reverse order along the {word} axis"): every(size)[::-1],
            ("repeated", f"of {word} {source[0]} for every {word}"): np.full(size, source[0]),
        }
        moved = [f"{i} from {j}" for i, j in enumerate(source) if i != j]
        if moved and right.size > 2 * size:
            orders["permuted", f"with each {word} taken from another one: {few(moved)}"] = source
        for (kind, text), order in orders.items():
            yield Relation(kind, f"is the right one {text}", np.take(right, order, place))
    for one, other in combinations(range(right.ndim), 2):
        if right.shape[one] == right.shape[other] > 1:
            first, second = (WORDS.get(seen.axes[place], seen.axes[place]) for place in (one, other))
            text = f"is the right one with its {first} and {second} axes exchanged"
            yield Relation("transposed", text, right.swapaxes(one, other))


WAYS = ("before", "after")


def _sources(seen: _Seen, place: int) -> NDArray[np.integer]:
    """Return for each place along an axis which place of the right tensor comes nearest to it."""
    size = seen.right.shape[place]
    where, actual, right = (
        np.moveaxis(array, place, 0).reshape(size, -1) for array in (seen.where, seen.actual, seen.right)
    )
    apart = where @ np.square(right).T - 2 * np.where(where, actual, 0.0) @ right.T
    return np.asarray(np.where(where.any(1), apart.argmin(1), np.arange(size)))


def _of_multiples(seen: _Seen) -> Iterator[Relation]:
    factor = seen.fit(seen.right)
    if factor is None and seen.where.sum() == 1 and seen.right[seen.where]:
        # One number is a multiple of any: only a known factor says something.
        factor = float((seen.actual[seen.where] / seen.right[seen.where])[0])
        factor = factor if "," in named(factor, seen.question) else None
    if factor is not None and abs(factor) < LARGEST and factor != 1:
        text = f"is multiplied by {named(factor, seen.question)}"
        text = "has the wrong sign" if factor == -1 else text
        yield Relation("multiple", text, factor * seen.right, {"factor": factor}, factor)


def rounded(factor: float) -> float:
    """Return a factor with four decimals, where it is that to within what rounding leaves of it."""
    short = round(factor, 4)
    return short if abs(factor - short) < 1e-6 * abs(short) else factor


def named(factor: float, question: Question) -> str:
    """Return a number, with what it may be."""
    config, (samples, *rest) = question.config, next(iter(question.case.batch.arrays().values())).shape
    known: dict[str, float] = {
        "sqrt(K)": math.sqrt(config.head_dim),
        "sqrt(D)": math.sqrt(config.d_model),
        "sqrt(2)": math.sqrt(2),
        "K": config.head_dim,
        "D": config.d_model,
        "H": config.num_heads,
        "the number of samples": samples,
        "sqrt(H)": math.sqrt(config.num_heads),
    }
    if rest:
        known |= {"the number of tokens": rest[0], "samples times tokens": samples * rest[0]}
    if samples > 1:
        known["B / (B - 1)"] = samples / (samples - 1)
    for name, value in known.items():
        for text, number in ((name, value), (f"1 / {name}", 1 / value)):
            if value != 1 and abs(abs(factor) / number - 1) < 1e-5:
                return f"{multiple(factor)}, {'-' if factor < 0 else ''}{text}"
    return multiple(factor)


def _of_others(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor is the right one with a constant, or a multiple of another one, added."""
    for name, array in {"": np.ones_like(seen.right), **seen.beside()}.items():
        factor = seen.fit(array, seen.right)
        if not factor:
            continue
        exactly = seen.right + factor * array
        if not name:
            text = f"is {abs(factor):.6g} too {'large' if factor > 0 else 'small'}"
            yield Relation("offset", text, exactly, {"offset": factor})
        else:
            text = {1.0: f"has {name} added once more", -1.0: f"lacks {name}"}.get(
                factor, f"has {multiple(factor)} times {name} added"
            )
            yield Relation("added", text, exactly, {"factor": factor})


def _of_rows_and_columns(seen: _Seen) -> Iterator[Relation]:
    """Yield that each row, or column, has a factor of its own, or a constant of its own added."""
    right, where = seen.right, seen.where
    if right.ndim < 2 or right.shape[-1] < 4:
        return
    along = {"row": (-1,), "column": tuple(range(right.ndim - 1))}
    along = {word: axes for word, axes in along.items() if math.prod(right.shape[axis] for axis in axes) >= 4}
    bases = [(np.zeros_like(right), "")]
    name = f"{norm_of(seen.config.norm_sharing, seen.tensor)}.bias"
    bias = seen.question.case.weights.get(name)
    if bias is not None and bias.shape == right.shape[-1:]:
        bases.append((np.broadcast_to(bias.astype(np.float64), right.shape), f"(less `{name}`) "))
    for base, said in bases:
        meant, made = np.where(where, right - base, 0.0), np.where(where, seen.actual - base, 0.0)
        for word, axes in along.items():
            power = np.square(meant).sum(axes, keepdims=True)
            factor = (meant * made).sum(axes, keepdims=True) / np.where(power > 0, power, 1)
            used = factor[np.broadcast_to(where.any(axes, keepdims=True), factor.shape)]
            value, scale = base + factor * (right - base), float(abs(factor).max())
            least, most = distinct(float(used.min()), float(used.max()), digits=4)
            own = f"has each {word} multiplied by a factor of its own, from {least} to {most}"
            own = own if least != most else f"is multiplied by {least}"
            yield Relation(f"{word} factors", f"{said}{own}", value, scale=scale)
    error = np.where(where, seen.actual - right, 0.0)
    for word, axes in along.items():
        added = error.sum(axes, keepdims=True) / np.maximum(where.sum(axes, keepdims=True), 1)
        yield Relation(f"{word} offsets", f"has a constant of its own added to each {word}", right + added)


def _of_functions(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor is a function of one number for each element, if not the right one."""
    sources = {"its right value": seen.right}
    if seen.tensor.endswith((".activation", "pooler.output")):  # elsewhere a step mixes elements
        sources |= seen.inputs()
    error = (seen.actual - seen.right)[seen.where]
    for name, array in sources.items():
        x, first, back = np.unique(array[seen.where], return_index=True, return_inverse=True)
        y = error[first]
        if len(x) < 30 or not within(error - y[back], 2 * seen.sigma[seen.where]):
            continue
        guess = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        if np.quantile(abs(y[1:-1] - guess), 0.8) <= SMOOTH * root_mean_square(y):
            yield Relation("function", f"is another function of {name}, element by element")
            return


LOOKS: tuple[Look, ...] = (
    _of_constants,
    _of_same,
    _of_places,
    _of_multiples,
    _of_others,
    _of_rows_and_columns,
    _of_functions,
)
"""What a tensor of numbers may be, in the order in which it is said."""


# What is said.


def wrong_elements(question: Question) -> Flags:
    """Return which elements are wrong; if none is by itself, those that err more than chance lets many."""
    actual, right, sigma = question.actual, question.right.value, question.right.sigma
    infinite = np.isfinite(actual) != np.isfinite(right)
    scores = np.where(np.isfinite(sigma), abs(actual - right) / sigma, 0.0)
    for limit in (Z, R):
        wrong = infinite | (np.nan_to_num(scores, nan=np.inf) > limit) & np.isfinite(right)
        if wrong.any():
            return np.asarray(wrong)
    return np.asarray(infinite)


def describe(question: Question) -> tuple[Description | None, Region]:
    """Return what is seen of the tensor in question, if anything is wrong with it by itself, and where."""
    with np.errstate(all="ignore"):
        wrong = wrong_elements(question)
        if not wrong.any():
            return None, everywhere(wrong.shape)
        region = smallest(question, wrong)
        filled = float((wrong & region.flags).sum() / region.flags.sum())
        found = relate(question, region)
        if found is None and region.text and filled < FILLED:
            found = relate(question, everywhere(wrong.shape))
            region = everywhere(wrong.shape) if found else region
        exact = bool(found and found.value is not None and _gives(question, region))
        if not exact and filled < FILLED / 2 and not found:
            region = everywhere(wrong.shape)
        shares = abs(question.actual - question.right.value)[wrong] / abs(question.right.value[wrong])
    seen = Description(
        question.tensor,
        region.text,
        region.kind,
        region.places,
        found.text if found else "",
        found.kind if found else "",
        (found.numbers or {}) if found else {},
        int(wrong.sum()),
        wrong.size,
        float(np.median(np.nan_to_num(shares, nan=np.inf, posinf=np.inf))),
        exact,
    )
    return seen, region


def _gives(question: Question, region: Region) -> bool:
    """Return whether the tensor is right but in a region, and is there what is said."""
    right, sigma = question.right.value, np.broadcast_to(question.right.sigma, question.actual.shape)
    left = np.where(region.flags, 0.0, question.actual - right)
    return within(left, sigma)
