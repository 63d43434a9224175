"""What a tensor is, where it is wrong: how its numbers are related to the right ones, or to others at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance.diagnosis.regions import WORDS, Region, axes_of, inputs_of
from concord.conformance.explain.question import Question
from concord.conformance.explain.reading import within
from concord.conformance.wording import distinct, multiple
from concord.spec.precision import precision, round_to_bits

Array = NDArray[np.floating]
Flags = NDArray[np.bool_]

LARGEST = 1e6
"""A larger multiple is no multiple: the right tensor is zero but for rounding."""

SMOOTH = 0.03
"""Which share of an error may be left when it is read off its neighbours' for it to be a function of one number."""


@dataclass(frozen=True)
class Relation:
    """What the wrong elements are.

    Attributes:
        kind: a word for it.
        text: in words that follow the tensor's name.
        value: what the tensor then is, where all of it is given; None where it is only known to be of a kind.
        numbers: those that were read off, by name.
    """

    kind: str
    text: str
    value: Array | None = None
    numbers: Mapping[str, float] | None = None


def relate(question: Question, region: Region) -> Relation | None:
    """Return the first relation that holds in a region to within rounding."""
    looks: tuple[Callable[[_Seen], Iterator[Relation]], ...] = (
        _of_no_numbers,
        _of_constants,
        _of_same,
        _of_moves,
        _of_multiples,
        _of_others,
        _of_limits,
        _of_mixtures,
        _of_rows_and_columns,
        _of_functions,
        _of_bits,
    )
    seen = _Seen(question, region)
    if not region.flags.any():
        return None
    found = (relation for look in looks for relation in look(seen))
    return next(
        (one for one in found if all(math.isfinite(number) for number in (one.numbers or {}).values())), None
    )


class _Seen:
    """A tensor in a region: the run's numbers and the right ones."""

    def __init__(self, question: Question, region: Region) -> None:
        self.question, self.region = question, region
        self.where = region.flags
        self.actual, self.right = question.actual, question.right.value
        self.sigma = np.broadcast_to(question.right.sigma, self.right.shape)
        self.unit = precision(question.case.dtype).unit_roundoff
        self.finite = bool(np.isfinite(self.actual[self.where]).all())

    def is_(self, value: Array, factor: float = 1.0) -> bool:
        """Return whether the tensor is a value in the region, to within rounding."""
        known = self.where & np.isfinite(self.sigma)
        if value.shape != self.actual.shape or not np.isfinite(value[known]).all():
            return False
        sigma = np.hypot(self.sigma * max(1.0, abs(factor)), self.unit * abs(value))[self.where]
        return within((self.actual - value)[self.where], sigma)

    def alike(self, one: Array, other: Array) -> bool:
        """Return whether two errors in the region are the same to within rounding."""
        return within(one - other, 2 * self.sigma[self.where])

    def fit(self, *terms: Array) -> NDArray[np.floating] | None:
        """Return the factors of the sum of terms that comes nearest, each element in its sigma."""
        scale = self.sigma[self.where]
        usable = np.isfinite(scale) & (scale > 0)
        if usable.sum() <= len(terms):
            return None
        columns = np.stack([term[self.where][usable] / scale[usable] for term in terms], -1).astype(
            np.float64
        )
        if not np.isfinite(columns).all() or np.linalg.matrix_rank(columns) < len(terms):
            return None
        found: NDArray[np.floating] = np.linalg.lstsq(
            columns, self.actual[self.where][usable] / scale[usable], rcond=None
        )[0]
        return found


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
    if not seen.finite or values.size < 2:
        return
    if not values.any():
        yield Relation("zero", "is zero", np.zeros_like(seen.actual))
    elif np.ptp(values) <= 4 * seen.unit * abs(values).max():
        constant = float(values.flat[0])
        yield Relation(
            "constant",
            f"is {constant:.6g} throughout",
            np.full_like(seen.actual, constant),
            {"constant": constant},
        )


def _of_moves(seen: _Seen) -> Iterator[Relation]:
    """Yield the right tensor with places changed along one axis, or two axes exchanged."""
    axes = axes_of(seen.question) or tuple(f"axis {i}" for i in range(seen.right.ndim))
    for place, axis in enumerate(axes):
        word, size = WORDS.get(axis, axis), seen.right.shape[place]
        if size < 2:
            continue
        for shift, said in ((1, "before"), (-1, "after")):
            yield from _moved(
                seen,
                np.roll(seen.right, shift, place),
                "shifted",
                f"is that of the {word} {said}: shifted by one along the {word} axis",
            )
        yield from _moved(
            seen, np.flip(seen.right, place), "reversed", f"is in reverse order along the {word} axis"
        )
        if size % 2 == 0 and size > 2:
            order = np.arange(size).reshape(-1, 2)[:, ::-1].reshape(-1)
            yield from _moved(
                seen,
                np.take(seen.right, order, place),
                "swapped",
                f"has each even {word} swapped with the odd one after it",
            )
        for index in range(min(size, 64)):
            yield from _moved(
                seen,
                np.broadcast_to(np.take(seen.right, [index], place), seen.right.shape),
                "repeated",
                f"is that of {word} {index} for every {word}",
            )
        yield from _permuted(seen, place, word)
    for one in range(seen.right.ndim):
        for other in range(one):
            if seen.right.shape[one] == seen.right.shape[other] > 1:
                text = f"has its {WORDS.get(axes[other], axes[other])} and {WORDS.get(axes[one], axes[one])} axes exchanged"
                yield from _moved(seen, seen.right.swapaxes(one, other), "transposed", text)


def _moved(seen: _Seen, value: Array, kind: str, text: str) -> Iterator[Relation]:
    if seen.is_(value):
        yield Relation(kind, text, value)


def _permuted(seen: _Seen, place: int, word: str) -> Iterator[Relation]:
    """Yield the right tensor with slices along an axis in an order that nobody foresaw."""
    size = seen.right.shape[place]
    actual, right = (np.moveaxis(x, place, 0).reshape(size, -1) for x in (seen.actual, seen.right))
    if (
        not 2 <= size <= 512
        or actual.shape[1] < 3
        or not (np.isfinite(actual).all() and np.isfinite(right).all())
    ):
        return
    lengths = np.square(actual).sum(1)[:, None] + np.square(right).sum(1) - 2 * actual @ right.T
    source = lengths.argmin(1)
    if (source != np.arange(size)).any():
        moved = [int(i) for i in np.flatnonzero(source != np.arange(size))]
        shown = ", ".join(f"{i} from {source[i]}" for i in moved[:4]) + (", …" if len(moved) > 4 else "")
        yield from _moved(
            seen,
            np.take(seen.right, source, place),
            "permuted",
            f"has each {word} taken from another one: {shown}",
        )


def _of_multiples(seen: _Seen) -> Iterator[Relation]:
    factors = seen.fit(seen.right)
    if (
        factors is None and seen.where.sum() == 1 and seen.right[seen.where]
    ):  # one number is a multiple of any: a known one says something
        factors = seen.actual[seen.where] / seen.right[seen.where]
        factors = factors if "," in named(float(factors[0]), seen.question) else None
    if (
        factors is not None
        and abs(factors[0]) < LARGEST
        and seen.is_(factors[0] * seen.right, float(factors[0]))
    ):
        factor = float(factors[0])
        if factor == 1:
            return
        text = (
            "has the wrong sign"
            if abs(factor + 1) < 1e-6
            else f"is multiplied by {named(factor, seen.question)}"
        )
        yield Relation("multiple", text, factor * seen.right, {"factor": factor})


def named(factor: float, question: Question) -> str:
    """Return a number, with what it may be."""
    config, batch = question.config, next(iter(question.case.batch.arrays().values())).shape
    known = {
        "sqrt(K)": math.sqrt(config.head_dim),
        "sqrt(D)": math.sqrt(config.d_model),
        "sqrt(2)": math.sqrt(2),
        "K": config.head_dim,
        "D": config.d_model,
    }
    known |= {
        "H": config.num_heads,
        "the number of samples": batch[0],
        "sqrt(H)": math.sqrt(config.num_heads),
    }
    if len(batch) > 1:
        known |= {"the number of tokens": batch[1], "samples times tokens": batch[0] * batch[1]}
    if batch[0] > 1:
        known["B / (B - 1)"] = batch[0] / (batch[0] - 1)
    for name, value in known.items():
        for text, number in ((name, value), (f"1 / {name}", 1 / value)):
            if value != 1 and abs(abs(factor) / number - 1) < 1e-5:
                return f"{multiple(factor)}, {'-' if factor < 0 else ''}{text}"
    return multiple(factor)


def _beside(seen: _Seen) -> dict[str, Array]:
    """Return the tensors that may have been mixed in: of the step, its parameters, other layers' taps of the same name."""
    question = seen.question
    found = {name: array for name, array in inputs_of(question).items() if array.shape == seen.right.shape}
    from concord.conformance.explain.linear import parameters_of

    own = parameters_of(question.tensor)
    for name, weight in question.case.weights.items():
        near = (
            name in (f"{own}.bias", f"{own}.weight")
            or name.rpartition(".")[0].rpartition(".")[0] == question.tensor.rpartition(".")[0]
        )
        tails = [
            tail
            for tail in (seen.right.shape[-1:], seen.right.shape[-2:])
            if math.prod(tail) == weight.size and tail
        ]
        if near and weight.ndim == 1 and tails:
            found[f"`{name}`"] = np.broadcast_to(
                weight.astype(np.float64).reshape(tails[0]), seen.right.shape
            )
    layer, inside = question.tensor.split(".")[:2], question.tensor.split(".", 2)[2:]
    if layer[0] == "layers":
        for other in range(question.config.num_layers):
            name = f"layers.{other}.{inside[0]}"
            if (
                name != question.tensor
                and name in question.forced
                and question.forced[name].shape == seen.right.shape
            ):
                found.setdefault(f"`{name}`", question.forced[name])
    return {name: array for name, array in found.items() if np.isfinite(array).all()}


def _of_same(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor is another one."""
    for name, array in _beside(seen).items():
        if seen.is_(array):
            yield Relation("other", f"is {name}", array)


def _of_others(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor is the right one with a constant or a multiple of another one added."""
    if not seen.finite or seen.where.sum() < 2:
        return
    beside = _beside(seen)
    ones = np.ones_like(seen.right)
    for name, array in {"constant": ones, **beside}.items():
        error = seen.actual - seen.right
        power = float(np.square(array[seen.where] / seen.sigma[seen.where]).sum())
        factor = (
            float((error * array / np.square(seen.sigma))[seen.where].sum()) / power if power > 0 else 0.0
        )
        if power > 0 and factor and seen.is_(seen.right + factor * array):
            short = round(factor, 4)
            factor = short if abs(factor - short) < 1e-5 * abs(short) else factor
            if name == "constant":
                yield Relation(
                    "offset",
                    f"is {abs(factor):.6g} too {'large' if factor > 0 else 'small'}",
                    seen.right + factor,
                    {"offset": factor},
                )
            else:
                how = {1.0: f"has {name} added once more", -1.0: f"lacks {name}"}.get(
                    factor, f"has {multiple(factor)} times {name} added"
                )
                yield Relation("added", how, seen.right + factor * array, {"factor": factor})


def _of_limits(seen: _Seen) -> Iterator[Relation]:
    actual, right = seen.actual, seen.right
    if not (seen.finite and np.isfinite(right[seen.where]).all()):
        return
    for kind, limit in (("at most", actual[seen.where].max()), ("at least", actual[seen.where].min())):
        value = np.minimum(right, limit) if kind == "at most" else np.maximum(right, limit)
        if (value != right)[seen.where].sum() >= 3 and seen.is_(value):
            yield Relation("limit", f"saturates: it is {kind} {limit:.6g}", value, {"limit": float(limit)})


def _of_mixtures(seen: _Seen) -> Iterator[Relation]:
    """Yield sums of the step's inputs with other factors."""
    terms = {
        name: array for name, array in inputs_of(seen.question).items() if array.shape == seen.right.shape
    }
    if not seen.finite or not 2 <= len(terms) <= 4 or seen.where.sum() < 20:
        return
    factors = seen.fit(*terms.values())
    if factors is None:
        return
    value = sum(factor * array for factor, array in zip(factors, terms.values(), strict=True))
    if seen.is_(np.asarray(value)):
        said = " + ".join(
            f"{multiple(factor, digits=5)} × {name}"
            for factor, name in zip(factors, terms, strict=True)
            if abs(factor) > 1e-5
        )
        yield Relation("mixture", f"is {said}", np.asarray(value))


def _of_rows_and_columns(seen: _Seen) -> Iterator[Relation]:
    """Yield that each row, or each column, is multiplied by a factor of its own or has a constant of its own added."""
    if seen.right.ndim < 2 or not seen.finite or seen.right.shape[-1] < 4:
        return
    rows = tuple(range(seen.right.ndim - 1))
    for base, said in _bases(seen):
        gained, made = seen.right - base, seen.actual - base
        for axes, word in (((-1,), "row"), (rows, "column")):
            count = math.prod(seen.right.shape[axis] for axis in axes)
            if count < 4:
                continue
            weight = np.where(seen.where, 1.0, 0.0)
            power = (weight * np.square(gained)).sum(axes, keepdims=True)
            factor = (weight * gained * made).sum(axes, keepdims=True) / np.where(power > 0, power, 1)
            if seen.is_(base + factor * gained, float(abs(factor).max())):
                used = factor[np.broadcast_to(seen.where.any(axes, keepdims=True), factor.shape)]
                if word == "row" and (read := _of_deviation(seen, used)):
                    yield Relation("deviation", f"{said}{read}", base + factor * gained)
                least, most = distinct(float(used.min()), float(used.max()), digits=4)
                own = (
                    f"has each {word} multiplied by a factor of its own, from {least} to {most}"
                    if least != most
                    else f"is multiplied by {least}"
                )
                yield Relation(f"{word} factors", f"{said}{own}", base + factor * gained)
    error = seen.actual - seen.right
    for axes, word in (((-1,), "row"), (rows, "column")):
        if math.prod(seen.right.shape[axis] for axis in axes) < 4:
            continue
        offset = np.where(seen.where, error, 0).sum(axes, keepdims=True) / np.maximum(
            seen.where.sum(axes, keepdims=True), 1
        )
        if seen.is_(seen.right + offset):
            yield Relation(
                f"{word} offsets", f"has a constant of its own added to each {word}", seen.right + offset
            )


def _of_deviation(seen: _Seen, factors: Array) -> str:
    """Say what the deviation of a norm must have been, if the factors of its rows show it: another factor, or another epsilon."""
    if np.ptp(factors) <= 1e-5 * abs(factors).max():
        return f"is multiplied by {multiple(factors.mean(), digits=7)}"
    config, name = seen.question.config, seen.question.tensor
    source = seen.question.exact.inputs.get(name)
    if "norm" not in name or source is None or not seen.where.all():
        return ""
    x = source.value
    variance = np.square(x - x.mean(-1, keepdims=True)).sum(-1) / (
        config.d_model - (config.norm_variance == "unbiased")
    )
    usual = (
        np.sqrt(variance + config.norm_epsilon)
        if config.norm_epsilon_placement == "inside"
        else np.sqrt(variance) + config.norm_epsilon
    )
    deviation = usual / factors.reshape(variance.shape)
    for words, left in (
        ("inside the root", np.square(deviation) - variance),
        ("outside the root", deviation - np.sqrt(variance)),
    ):
        if left.size > 1 and left.mean() > 0 and np.ptp(left) <= 1e-3 * left.mean():
            return f"has the deviation of an epsilon of {distinct(float(left.mean()), config.norm_epsilon, digits=4)[0]} {words}"
    return ""


def _bases(seen: _Seen) -> Iterator[tuple[Array, str]]:
    """Yield what is not multiplied: nothing, and the offset of a norm or the bias of a linear layer."""
    yield np.zeros_like(seen.right), ""
    from concord.conformance.explain.norms import owner

    name = f"{owner(seen.question.config.norm_sharing, seen.question.tensor)}.bias"
    bias = seen.question.case.weights.get(name)
    if bias is not None and bias.shape == seen.right.shape[-1:]:
        yield np.broadcast_to(bias.astype(np.float64), seen.right.shape), f"(less `{name}`) "


def _of_functions(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor is a function of one number for each element, if not the right one."""
    sources = {"its right value": seen.right}
    if seen.question.tensor.endswith((".activation", "pooler.output")):  # elsewhere a step mixes elements
        sources |= {
            name: array for name, array in inputs_of(seen.question).items() if array.shape == seen.right.shape
        }
    if not seen.finite or seen.where.sum() < 30:
        return
    error = (seen.actual - seen.right)[seen.where]
    for name, array in sources.items():
        x, first, back = np.unique(array[seen.where], return_index=True, return_inverse=True)
        y = error[first]
        if len(x) < 30 or not seen.alike(error, y[back]):
            continue
        guess = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        if np.quantile(abs(y[1:-1] - guess), 0.8) <= SMOOTH * np.sqrt(np.mean(np.square(y))):
            yield Relation("function", f"is another function of {name}, element by element")
            return


def _of_bits(seen: _Seen) -> Iterator[Relation]:
    """Yield that the tensor has fewer bits than the precision."""
    if not seen.finite:
        return
    values = seen.actual[seen.where]
    for bits in (8, 11, 16):
        if 2.0**-bits > 2 * seen.unit and (round_to_bits(values, bits) == values).all() and values.size > 3:
            yield Relation("bits", f"has no more than {bits} significant bits", None, {"bits": bits})
            return
