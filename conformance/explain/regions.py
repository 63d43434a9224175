"""Where a tensor is wrong: the plainest condition that holds of all wrong elements and hardly any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.context import Flags
from concord.conformance.explain import breakdown
from concord.conformance.explain.question import Question
from concord.conformance.padding import padded_rows, seen_keys
from concord.conformance.wording import few, limit_between
from concord.spec.arrays import Array

FILLED = 0.9
"""Which share of a region has to be wrong for the region to be said: some errors are small by chance."""

WORDS = {
    "batch": "sample",
    "tokens": "token",
    "heads": "head",
    "head_dim": "column of the head",
    "d_model": "column",
    "d_ff": "column",
    "features": "column",
    "classes": "class",
    "vocab": "id",
    "positions": "position",
    "segments": "segment",
    "in": "row",
    "out": "column",
}

PLURALS = {
    "class": "classes",
    "query": "queries",
    "column of the head": "columns of the head",
}


@dataclass(frozen=True)
class Region:
    """A set of elements.

    Attributes:
        text: in words that follow "only"; empty for everywhere.
        flags: which elements, in the tensor's shape.
        places: axis name to the places along it, where the region is made of those.
        kind: of the condition: ``"everywhere"``, ``"places"``, ``"padding"``, ``"ids"``, ``"value"``,
            ``"distance"`` or ``"empty rows"``.
        cost: how much has to be said.
    """

    text: str
    flags: Flags
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kind: str = "everywhere"
    cost: float = 0.0


def everywhere(shape: tuple[int, ...]) -> Region:
    """Return all elements."""
    return Region("", np.ones(shape, bool))


def axes_of(question: Question) -> tuple[str, ...]:
    """Return the names of the axes of the tensor in question; of a linear weight's gradient, in and out."""
    parameter, rank = question.parameter or "", question.actual.ndim
    if rank == 2 and parameter.endswith(".weight") and not parameter.startswith("embeddings."):
        return ("in", "out")
    return breakdown.axes_of(question.case, question.tensor, rank)


def smallest(question: Question, wrong: Flags) -> Region:
    """Return the plainest region that holds all wrong elements, and whose elements are nearly all wrong."""
    axes, candidates = axes_of(question), [everywhere(wrong.shape)]
    if wrong.mean() < FILLED:
        width = question.config.head_dim if "attention" in question.tensor else 0
        candidates += [
            _narrowed(condition, axes, wrong, width)
            for condition in _conditions(question, axes, wrong)
            if not (wrong & ~condition.flags).any() and not (condition.text and condition.flags.all())
        ]
    return max(candidates, key=lambda region: _worth(region, wrong))


def _worth(region: Region, wrong: Flags) -> tuple[float, float]:
    """Return how good a region is.

    How much of it is wrong, to within what chance does, and then how little is said.
    """
    filled = float((wrong & region.flags).sum() / region.flags.sum())
    return (round(min(filled, FILLED + 0.05) * 20), -region.cost)


def _narrowed(condition: Region, axes: tuple[str, ...], wrong: Flags, width: int) -> Region:
    """Return what of a region lies in the places along each axis where something is wrong.

    Args:
        width: columns of a head, where columns are those of heads; else 0.
    """
    flags, said, places, cost = condition.flags.copy(), [condition.text], {}, condition.cost
    for place, axis in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != place)
        touched, possible = np.asarray(wrong.any(others)), np.asarray(flags.any(others))
        if (touched == possible).all():
            continue
        places[axis] = tuple(int(i) for i in np.flatnonzero(touched))
        flags = flags & touched.reshape([-1 if i == place else 1 for i in range(wrong.ndim)])
        word = WORDS.get(axis, axis)
        if axis in ("d_model", "out") and width:
            heads, some = (np.asarray(flags.reshape(-1, width).any(1)) for flags in (touched, possible))
            if (heads.repeat(width) == touched).all() and 2 * touched.sum() <= touched.size:
                word, touched, possible = "head", heads, some
        words, price = _listed(word, np.flatnonzero(touched), np.flatnonzero(possible), len(touched))
        said.append(words)
        cost += price
    return Region(", ".join(filter(None, said)), flags, places, condition.kind, cost)


def _listed(
    word: str, places: NDArray[np.integer], possible: NDArray[np.integer], size: int
) -> tuple[str, float]:
    """Return places along an axis in words, and how much has to be said."""
    first, last = int(places[0]), int(places[-1])
    plural = PLURALS.get(word, f"{word}s")
    if len(places) == 1:
        end = {0: "first", size - 1: "last"}.get(first)
        return f"{word} {first}" + (f" (the {end} {word})" if end and size > 2 else ""), 1.0
    if len(places) == ((first <= possible) & (possible <= last)).sum():
        if last == possible[-1]:
            return f"{plural} from {first} on", 1.1
        start = "up to" if first == possible[0] else f"{first} to"
        return f"{plural} {start} {last}", 1.2
    missing = np.setdiff1d(possible, places)
    if len(missing) == 1:
        return f"{plural} other than {missing[0]}", 1.3
    return f"{plural} {few(places)}", 1.5 + 0.2 * len(places)


def _conditions(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[Region]:
    """Yield what may be special of elements besides their place."""
    yield Region("", np.ones(wrong.shape, bool), kind="places")
    found = (_of_padding(question, axes), _of_numbers(question, axes, wrong), _of_values(question, wrong))
    for text, flags, kind, cost in (one for some in found for one in some):
        yield Region(text, np.broadcast_to(flags, wrong.shape), {}, kind, cost)


Condition = tuple[str, Flags, str, float]
"""What is said, of which elements (an array that can be broadcast), the kind, and how much it says."""


def _stretched(numbers: NDArray[Any], axes: tuple[str, ...], *along: int) -> NDArray[Any]:
    """Return numbers of some axes, given in their order, so that they can be broadcast to all."""
    return numbers.reshape([numbers.shape[along.index(i)] if i in along else 1 for i in range(len(axes))])


def _of_padding(question: Question, axes: tuple[str, ...]) -> Iterator[Condition]:
    if "batch" not in axes:
        return
    sample, config, batch = axes.index("batch"), question.config, question.case.batch
    padded = padded_rows(config, batch)
    for axis, word, hidden in (
        ("tokens", "tokens", "padded"),
        ("query", "queries", "padded"),
        ("key", "keys", "masked"),
    ):
        if axis in axes and axis in padded:
            flags = _stretched(padded[axis], axes, sample, axes.index(axis))
            yield f"{hidden} {word}", flags, "padding", 1.0
            yield f"{word} that are not {hidden}", ~flags, "padding", 1.0
    if "key" in padded:
        rows = padded["key"]
        some, every = (_stretched(np.asarray(flags), axes, sample) for flags in (rows.any(1), rows.all(1)))
        yield "samples that are padding only", every, "empty rows", 1.05
        yield "samples with some text", ~every, "padding", 1.05
        yield "samples with padding", some, "padding", 1.05
        yield "samples without padding", ~some, "padding", 1.05
    if "key" in axes and "heads" in axes and (visible := seen_keys(config, batch)) is not None:
        yield "rows whose keys are all masked", np.asarray(~visible.any(-1, keepdims=True)), "empty rows", 0.9


def _of_numbers(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[Condition]:
    """Yield ids, segments and labels, and how far a key lies behind its query."""
    batch, known = question.case.batch, list[tuple[str, str, NDArray[Any]]]()
    for word, ids in (("id", batch.input_ids), ("segment", batch.segment_ids)):
        if ids is not None and axes[:2] == ("batch", "tokens") and ids.shape == wrong.shape[:2]:
            known.append((word, "ids", _stretched(ids, axes, 0, 1)))
    if batch.labels is not None and question.tensor in ("losses", "log_probabilities", "logits"):
        known.append(("samples of label", "labels", _stretched(batch.labels, axes, 0)))
    for word, kind, numbers in known:
        rows = wrong.any(tuple(i for i, size in enumerate(numbers.shape) if size == 1), keepdims=True)
        found, clean = numbers[rows], numbers[~rows]
        low, high = int(found.min()), int(found.max())
        if low == high:
            yield f"{word} {low}", numbers == low, kind, 1.1
        if clean.size and low > clean.max():
            yield f"{word}s from {limit_between(clean.max(), low):.0f} on", numbers >= low, kind, 0.9
        if clean.size and low < high < clean.min():
            yield f"{word}s below {limit_between(high, int(clean.min())):.0f}", numbers <= high, kind, 0.9
    if "query" in axes:
        distance = np.arange(wrong.shape[-1]) - np.arange(wrong.shape[-2])[:, None]
        yield "keys after the query", distance > 0, "distance", 1.0
        yield "keys before the query", distance < 0, "distance", 1.0
        yield "keys at the query's own place", distance == 0, "distance", 1.0


def _of_values(question: Question, wrong: Flags) -> Iterator[Condition]:
    """Yield thresholds on what went into the step."""
    if question.parameter or question.tensor.startswith("embeddings."):
        return
    sources = {name: array for name, array in inputs_of(question).items() if array.shape == wrong.shape}
    sources.setdefault("the right value", question.right.value)
    for name, array in sources.items():
        for text, values in ((name, array), (f"the size of {name}", abs(array))):
            if not np.isfinite(values).all():
                continue
            low, high = values[wrong].min(), values[wrong].max()
            below, above = values[values < low], values[values > high]
            if below.size:
                said = f"where {text} is above {_between(below.max(), low)}"
                yield said, values >= low, "value", 1.6
            if above.size:
                said = f"where {text} is below {_between(high, above.min())}"
                yield said, values <= high, "value", 1.6


def _between(low: float, high: float) -> str:
    """Return the shortest number between two."""
    tried = (f"{number:.{digits}g}" for digits in range(1, 18) for number in (high, low, (low + high) / 2))
    return next((text for text in tried if low <= float(text) <= high), f"{high:.17g}")


def inputs_of(question: Question) -> dict[str, Array]:
    """Return the taps that the step in question is computed from, or is near to."""
    if question.tensor not in question.names:
        return {}
    now = question.exact.now
    prefix = question.tensor.rpartition(".")[0]
    before = [name for name in question.before if name in now]
    near = [name for name in before if name.startswith(f"{prefix}.")] if prefix else before
    found = {f"`{name}`": now[name].value for name in (near or before)[::-1]}
    for name, tensor in question.exact.entered.items():
        if name.rpartition(".")[0] == prefix:
            found.setdefault("what entered the sublayer", tensor.value)
    return found
