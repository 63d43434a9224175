"""Where a tensor is wrong: the plainest condition that holds of all wrong elements and hardly any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.context import Flags
from concord.conformance.expectation import Array, subject_of
from concord.conformance.explain.question import Question
from concord.conformance.wording import few, limit_between
from concord.spec.masks import visible_keys
from concord.spec.parameters import parameters
from concord.spec.tensors import taps

FILLED = 0.9
"""Which share of a region has to be wrong for the region to be said: some errors are small by chance."""

WORDS = {
    "batch": "sample",
    "tokens": "token",
    "query": "query",
    "key": "key",
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


@dataclass(frozen=True)
class Region:
    """A set of elements.

    Attributes:
        text: in words that follow "only"; empty for everywhere.
        flags: which elements, in the tensor's shape.
        places: axis name to the places along it, where the region is made of those.
        kind: of the condition: ``"everywhere"``, ``"places"``, ``"padding"``, ``"ids"``, ``"value"`` or
            ``"empty rows"``.
        cost: how much has to be said.
    """

    text: str
    flags: Flags
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kind: str = "places"
    cost: float = 1.0


def axes_of(question: Question) -> tuple[str, ...]:
    """Return the names of the axes of the tensor in question; of a linear weight's, in and out."""
    name = subject_of(question.tensor)
    known = taps(question.config, question.case.part)
    if question.parameter is None or question.parameter.startswith("taps."):
        axes = known[name].shape.split() if name in known else []
        return (*axes[:-2], "query", "key") if axes.count("tokens") == 2 else tuple(axes)
    table = parameters(question.config, question.case.part)
    if (
        name in table
        and name.startswith("embeddings.")
        and name.endswith(".weight")
        and question.actual.ndim == 2
    ):
        return ({"token": "vocab", "position": "positions"}.get(name.split(".")[1], "segments"), "d_model")
    return {1: ("out",), 2: ("in", "out")}.get(question.actual.ndim, ())


def smallest(question: Question, wrong: Flags) -> Region:
    """Return the plainest region that holds all wrong elements, and whose elements are nearly all wrong."""
    everywhere = Region("", np.ones(wrong.shape, bool), kind="everywhere", cost=0.0)
    if not wrong.any() or wrong.mean() >= FILLED:
        return everywhere
    axes = axes_of(question)
    candidates = [everywhere]
    if axes:
        width = question.config.head_dim if "attention" in question.tensor else 0
        product = _product(axes, wrong, np.ones(wrong.shape, bool), "", width)
        candidates.append(product)
        for text, condition, kind, cost in _conditions(question, axes, wrong):
            flags = np.broadcast_to(condition, wrong.shape)
            if (wrong & ~flags).any() or flags.all():
                continue
            found = _product(axes, wrong, flags, text, width)
            candidates.append(Region(found.text, found.flags, found.places, kind, cost + found.cost))
    return max(candidates, key=lambda region: _worth(region, wrong))


def _worth(region: Region, wrong: Flags) -> tuple[float, float]:
    """Return how good a region is.

    How much of it is wrong, to within what chance does, and then how little is said.
    """
    filled = float((wrong & region.flags).sum() / region.flags.sum())
    return (round(min(filled, FILLED + 0.05) * 20), -region.cost)


def _whole(columns: NDArray[np.integer], width: int) -> bool:
    """Return whether columns are those of whole heads."""
    return bool(
        columns.tolist()
        == [head * width + i for head in sorted(set((columns // width).tolist())) for i in range(width)]
    )


def _product(axes: tuple[str, ...], wrong: Flags, within: Flags, text: str, width: int = 0) -> Region:
    """Return what is in some places along each axis, as far as another condition has not said so."""
    flags, said, places, cost = within.copy(), [text] if text else [], {}, 0.0
    for place, axis in enumerate(axes):
        others = tuple(i for i in range(wrong.ndim) if i != place)
        touched, possible = np.asarray(wrong.any(others)), np.asarray(flags.any(others))
        if (touched == possible).all():
            continue
        word, found, every, size = (
            WORDS.get(axis, axis),
            np.flatnonzero(touched),
            np.flatnonzero(possible),
            len(touched),
        )
        if axis in ("d_model", "out") and width and len(found) * 2 <= size and _whole(found, width):
            word, found, every, size = (
                "head",
                found[::width] // width,
                np.unique(every // width),
                size // width,
            )
        words, price = listed(word, found, every, size)
        said.append(words)
        cost += price
        places[axis] = tuple(int(i) for i in np.flatnonzero(touched))
        flags = flags & touched.reshape([-1 if i == place else 1 for i in range(wrong.ndim)])
    return Region(", ".join(said), flags, places, "places", cost)


def listed(
    word: str, places: NDArray[np.integer], possible: NDArray[np.integer], size: int
) -> tuple[str, float]:
    """Return places along an axis in words, and how much has to be said."""
    first, last = int(places[0]), int(places[-1])
    plural = {"class": "classes", "query": "queries", "column of the head": "columns of the head"}.get(
        word, f"{word}s"
    )
    inside = [int(i) for i in possible if first <= i <= last]
    if len(places) == 1:
        end = (
            f" (the last {word})"
            if first == size - 1 and size > 2
            else f" (the first {word})"
            if first == 0 and size > 1
            else ""
        )
        return f"{word} {first}{end}", 1.0
    if inside == places.tolist():
        if last == possible[-1]:
            return f"{plural} from {first} on", 1.1
        return (
            (f"{plural} up to {last}", 1.1) if first == possible[0] else (f"{plural} {first} to {last}", 1.3)
        )
    for start, word_of in ((0, "even"), (1, "odd")):
        if places.tolist() == [int(i) for i in possible if i % 2 == start] and len(places) > 3:
            return f"{word_of} {plural}", 1.2
    missing = sorted(set(possible.tolist()) - set(places.tolist()))
    if len(missing) == 1 and len(places) > 1:
        return f"{plural} other than {missing[0]}", 1.3
    return f"{plural} {few(places)}", 1.5 + 0.2 * len(places)


Condition = tuple[str, Flags, str, float]
"""What is said, of which elements (an array that can be broadcast), the kind, and how much it says."""


def _conditions(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[Condition]:
    """Yield what may be special of elements besides their place."""
    yield from _of_padding(question, axes)
    yield from _of_ids(question, axes, wrong)
    yield from _of_labels(question, axes, wrong)
    if "query" in axes:
        yield from _of_distance(wrong)
    yield from _of_values(question, wrong)


def stretched(flags: Flags, axes: tuple[str, ...], along: tuple[int, ...]) -> Flags:
    """Return flags of some axes, given in their order, so that they can be broadcast to all."""
    shape = [1] * len(axes)
    for place, size in zip(along, flags.shape, strict=True):
        shape[place] = size
    return flags.reshape(shape)


def _rows(axes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the axes of samples with each axis of tokens, and what the tokens are there."""
    words = {"tokens": "tokens", "query": "queries", "key": "keys"}
    if "batch" in axes:
        yield from (
            (words[axis], (axes.index("batch"), place)) for place, axis in enumerate(axes) if axis in words
        )


def _of_padding(question: Question, axes: tuple[str, ...]) -> Iterator[Condition]:
    if "batch" not in axes:
        return
    try:
        keys, queries = question.exact.context.real, question.exact.context.real_queries
    except (KeyError, ValueError):  # the part has no mask
        return
    for word, along in _rows(axes):
        real = queries if word == "queries" else keys
        if real.ndim != 2 or real.shape[1] != question.actual.shape[along[1]]:
            continue
        before, after = _ends(real)
        hidden = "masked" if word == "keys" else "padded"
        for text, flags in (
            (f"{hidden} {word}", ~real),
            (f"{word} that are not {hidden}", real),
            (f"{hidden} {word} inside the text", ~real & ~before & ~after),
            (f"{hidden} {word} after the text", after),
            (f"{hidden} {word} before the text", before & ~after),
            (
                f"{word} after the first {hidden} one",
                ~np.minimum.accumulate(real, axis=1) & (np.cumsum(~real, axis=1) > (~real)),
            ),
        ):
            yield text, stretched(flags, axes, along), "padding", 1.0
    if keys.ndim == 2:
        before, after = _ends(keys)
        empty, full = ~keys.any(1), keys.all(1)
        for text, samples, kind in (
            ("samples that are padding only", empty, "empty rows"),
            ("samples with some text", ~empty, "padding"),
            ("samples with padding", ~full, "padding"),
            ("samples without padding", full, "padding"),
            ("samples with padding inside the text", (~keys & ~before & ~after).any(1), "padding"),
            ("samples with some padding and some text", ~full & ~empty, "padding"),
        ):
            yield text, stretched(np.asarray(samples), axes, (axes.index("batch"),)), kind, 1.05
    if "key" in axes and "heads" in axes:
        visible = visible_keys(question.config, keys, question.actual.shape[1])
        seen = np.asarray(visible.sum(-1, keepdims=True))
        yield "rows whose keys are all masked", seen == 0, "empty rows", 0.9
        yield "rows with several visible keys", seen > 1, "padding", 1.0
        yield "visible keys of rows with several of them", np.asarray(visible) & (seen > 1), "padding", 1.05


def _ends(real: Flags) -> tuple[Flags, Flags]:
    """Return which tokens (B, T) stand before the first real one of their text, and which after the last."""
    before = ~np.maximum.accumulate(real, axis=1)
    return before, ~np.maximum.accumulate(real[:, ::-1], axis=1)[:, ::-1]


def _of_ids(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[Condition]:
    batch = question.case.batch
    for name, ids in (("id", batch.input_ids), ("segment", batch.segment_ids)):
        if ids is None or ids.shape != wrong.shape[:2] or axes[:2] != ("batch", "tokens"):
            continue
        touched = np.asarray(wrong.reshape(*ids.shape, -1).any(-1))
        found, clean = np.unique(ids[touched]), np.unique(ids[~touched])
        low, high = int(found.min()), int(found.max())
        said: list[tuple[str, Flags, float]] = []
        if len(found) == 1:  # said of padding where it is that
            said.append((f"{name} {low}", ids == low, 1.1))
        if len(clean) and low > clean.max():
            said.append((f"{name}s from {limit_between(clean.max(), low):.0f} on", ids >= low, 0.9))
        if len(clean) and high < clean.min() and len(found) > 1:
            said.append((f"{name}s below {limit_between(high, int(clean.min())):.0f}", ids <= high, 0.9))
        if len(found) > 1 and not set(found) & set(clean):
            said.append((f"{name}s {few(found)}", np.isin(ids, found), 2.0))
        if name == "id":
            values, first, counts = np.unique(ids, return_index=True, return_counts=True)
            again = ~np.isin(np.arange(ids.size), first).reshape(ids.shape)
            said += [
                ("ids that have occurred before", again, 1.2),
                ("ids that occur more than once", np.isin(ids, values[counts > 1]), 1.2),
            ]
        for text, flags, cost in said:
            yield text, stretched(flags, axes, (0, 1)), "ids", cost


def _of_labels(question: Question, axes: tuple[str, ...], wrong: Flags) -> Iterator[Condition]:
    labels = question.case.batch.labels
    if (
        labels is not None
        and axes[:1] == ("batch",)
        and question.tensor in ("losses", "log_probabilities", "logits")
    ):
        touched = wrong.reshape(len(labels), -1).any(-1)
        for label in np.unique(labels[touched]):
            yield f"samples whose label is {label}", stretched(labels == label, axes, (0,)), "labels", 0.9
        for label in np.setdiff1d(labels[~touched], labels[touched]):
            yield f"samples whose label is not {label}", stretched(labels != label, axes, (0,)), "labels", 1.0


def _of_distance(wrong: Flags) -> Iterator[Condition]:
    queries, keys = wrong.shape[-2:]
    distance = np.arange(keys) - np.arange(queries)[:, None]
    shape = (1,) * (wrong.ndim - 2) + distance.shape
    for text, flags in (
        ("keys after the query", distance > 0),
        ("keys before the query", distance < 0),
        ("keys at the query's own place", distance == 0),
    ):
        yield text, flags.reshape(shape), "distance", 1.0
    touched = abs(distance)[np.nonzero(wrong.reshape(-1, queries, keys).any(0))]
    if touched.size and touched.min() > 1:
        yield (
            f"keys at least {touched.min()} tokens from the query",
            (abs(distance) >= touched.min()).reshape(shape),
            "distance",
            1.2,
        )


def _of_values(question: Question, wrong: Flags) -> Iterator[Condition]:
    """Yield thresholds on what went into the step, or on the largest of its row."""
    if question.tensor.startswith(
        ("embeddings.token", "embeddings.position", "embeddings.segment", "gradients.")
    ):
        return
    sources = {name: array for name, array in inputs_of(question).items() if array.shape == wrong.shape}
    sources.setdefault("the right value", question.right.value)
    for name, array in sources.items():
        for text, values in ((name, array), (f"the size of {name}", abs(array))):
            if np.isfinite(values).all():
                yield from _thresholds(text, values, wrong, 1.6)
    row = np.asarray(wrong.any(-1, keepdims=True))
    if wrong.ndim > 1 and not row.all():
        for name, array in sources.items():
            largest = abs(array).max(-1, keepdims=True)
            deviation = array.std(-1, keepdims=True)
            if np.isfinite(array).all():
                yield from _thresholds(f"the largest of {name} in its row", largest, row, 1.9)
                yield from _thresholds(f"the deviation of the row of {name}", deviation, row, 2.0)


def _thresholds(name: str, values: Array, wrong: Flags, cost: float) -> Iterator[Condition]:
    low, high = values[wrong].min(), values[wrong].max()
    below, above = values[values < low], values[values > high]
    if below.size:
        yield f"where {name} is above {_short(float(below.max()), float(low))}", values >= low, "value", cost
    if above.size:
        yield (
            f"where {name} is below {_short(float(high), float(above.min()))}",
            values <= high,
            "value",
            cost,
        )


def _short(low: float, high: float) -> str:
    """Return the shortest number between two."""
    for digits in range(1, 9):
        for number in (
            float(f"{high:.{digits}g}"),
            float(f"{low:.{digits}g}"),
            float(f"{(low + high) / 2:.{digits}g}"),
        ):
            if low <= number <= high:
                return f"{number:g}"
    return f"{high:.9g}"


def inputs_of(question: Question) -> dict[str, Array]:
    """Return the taps that the step in question is computed from, or is near to."""
    if question.tensor not in question.names:
        return {}
    now = question.exact.now
    prefix = question.tensor.rpartition(".")[0]
    before = [name for name in question.before if name in now]
    near = [name for name in before if name.startswith(f"{prefix}.")] if prefix else before
    found = {f"`{name}`": now[name].value for name in (near or before)[::-1]}
    entered = question.exact.entered
    for name, tensor in entered.items():
        if name.rpartition(".")[0] == prefix:
            found.setdefault("what entered the sublayer", tensor.value)
    return found
