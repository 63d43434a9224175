"""A failing case made small: fewer layers, samples, tokens and heads, as long as the same thing is wrong.

Weights and inputs are those of the case, cut down; nothing is drawn anew. A bug that shows in a model of real
size then shows in one whose tensors can be read by eye.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.pool import Pool
from concord.conformance.campaign import Job, Runner, Setup
from concord.conformance.verdict import Result
from concord.spec.batch import from_arrays, validate_batch
from concord.spec.errors import SpecError
from concord.spec.parameters import Weights, parameters, validate_weights
from concord.spec.tensors import inputs

Array = NDArray[Any]

FAILED = ("diverges", "refused", "error", "crashed", "timed out", "out of memory")
"""Statuses of a case that has found something."""

Signature = tuple[str, str, str]
"""Backend, status, and the tensor that diverges first, or what the backend said.

Failures that share it are one finding.
"""


def signature_of(result: Result) -> Signature:
    """Return what a failure is known by: whatever layer and part it shows in, it is the same."""
    row = result.first_divergence
    note = result.detail if row is None else row.note if row.deciding is None else ""
    words = f"{row.tensor if row else ''} {re.sub('[0-9]+', '#', note)}"
    return result.backend, result.status, re.sub(r"\blayers\.\d+\.", "", words).strip()


SIZES = (
    "num_layers",
    "batch",
    "tokens",
    "num_heads",
    "head_dim",
    "d_ff",
    "num_classes",
    "vocab_size",
    "max_positions",
)
"""What is made smaller, in this order: what makes a case cheap comes first."""


@dataclass
class Reduction:
    """A case that is made smaller, as long as it fails in the same way.

    Attributes:
        job: the smallest case that does.
        result: what the backend does with it; of the case itself, where nothing smaller fails.
        attempt: runs a case.
        progress: called with the number of cases that were run and the sizes of the smallest so far.
        before: how large the case was, by size (:data:`SIZES`).
        tried: how many smaller cases were run.
    """

    job: Job
    result: Result
    attempt: Callable[[Job], Result]
    progress: Callable[[int, Mapping[str, int]], None]
    before: Mapping[str, int]
    tried: int = 0

    @property
    def failed(self) -> bool:
        """Whether the case fails at all."""
        return self.result.status in FAILED

    @property
    def after(self) -> Mapping[str, int]:
        """How large the case is."""
        return sizes_of(self.job)

    def run(self) -> None:
        """Go through all sizes until none gets smaller.

        A bug may need less of one thing when there is less of another.
        """
        while True:
            before = self.after
            for size in SIZES:
                self.smaller(size)
            if self.after == before:
                return

    def smaller(self, size: str) -> None:
        """Make one size as small as it may be."""
        least, now = 1, self.after[size]
        if size == "num_layers" and (layer := _layer(self.result)) is not None:
            self.accept(layers_kept(self.job, [layer]))
        if size == "batch" and now > 1:
            any(self.accept(samples_kept(self.job, [sample])) for sample in range(now))
        now = self.after[size]
        while least < now:
            middle = 1 if least == 1 else (least + now) // 2  # most bugs need next to nothing
            if self.accept(cut(self.job, size, middle)):
                now = self.after[size]
            else:
                least = middle + 1

    def accept(self, job: Job | None) -> bool:
        """Run a smaller case; it takes the place of the one before if it fails in the same way."""
        if job is None:
            return False
        self.tried += 1
        result = self.attempt(job)
        if signature_of(result) != signature_of(self.result):
            return False
        self.job, self.result = job, result
        self.progress(self.tried, self.after)
        return True


def reduce(
    job: Job,
    name: str,
    settings: Setup,
    progress: Callable[[int, Mapping[str, int]], None] = lambda tried, sizes: None,
) -> Reduction:
    """Make a case small on which a backend fails.

    Args:
        job: the case.
        name: of the backend.
        progress: as :attr:`Reduction.progress`.

    Raises:
        UnknownNameError: for an unknown backend.
    """
    with Pool(width=1) as pool:
        attempt = Runner(name, settings, pool, {}).attempt
        found = Reduction(job, attempt(job), attempt, progress, sizes_of(job))
        if found.failed:
            found.run()
            found.job = replace(found.job, case=f"{job.case}-reduced")
    return found


def sizes_of(job: Job) -> dict[str, int]:
    """Return how large a case is, by size (:data:`SIZES`)."""
    axes = {
        axis: length
        for _, array, shape in _given(job)
        for axis, length in zip(shape.split(), array.shape, strict=True)
    }
    tokens = axes.get("tokens", max(axes.get("query", 1), axes.get("key", 1)))
    found = {size: getattr(job.config, size) for size in SIZES if hasattr(job.config, size)}
    return {**found, "batch": axes["batch"], "tokens": tokens}


def cut(job: Job, size: str, length: int) -> Job | None:
    """Return a case with one size cut down to a length; None if there is no such case."""
    config, labels = job.config, job.batch.labels
    if size == "batch":
        return samples_kept(job, list(range(length)))
    if size == "num_layers":
        return layers_kept(job, list(range(length)))
    if size == "vocab_size":
        return _fewer_tokens(job, length)
    if size == "num_classes" and (length < 2 or (labels is not None and int(labels.max()) >= length)):
        return None
    if size == "tokens":
        changes = {"max_positions": length} if config.pooling == "flatten" else {}
        return _resized(job, changes, dict.fromkeys(("tokens", "query", "key"), length))
    heads = length if size == "num_heads" else config.num_heads
    width = length if size == "head_dim" else config.head_dim
    changes = {"num_heads": heads, "d_model": heads * width}
    return _resized(job, changes if size in ("num_heads", "head_dim") else {size: length})


def _resized(job: Job, changes: Mapping[str, int], shorter: Mapping[str, int] | None = None) -> Job | None:
    """Return a case of smaller sizes, and of shorter axes of the inputs: of every axis the first entries."""
    whole = job.config
    try:
        config = whole.replace(**changes)
    except SpecError:
        return None
    lengths = {
        "d_model": config.d_model,
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "d_ff": config.d_ff,
        "classes": config.num_classes,
        "positions": config.max_positions,
        "features": config.d_model * (config.max_positions if config.pooling == "flatten" else 1),
    }
    weights = {}
    for name, parameter in parameters(whole, job.part).items():
        array = job.weights[name]
        if config.pooling == "flatten" and "features" in parameter.shape.split():
            # One row for each position and column.
            array = array.reshape(whole.max_positions, whole.d_model, -1)
            array = array[: config.max_positions, : config.d_model].reshape(-1, array.shape[-1])
        weights[name] = _first(array, parameter.shape, lengths)
    arrays = {
        name: _first(array, shape, {**lengths, **(shorter or {})}) for name, array, shape in _given(job)
    }
    return _remade(job, weights, arrays, **changes)


def _layer(result: Result) -> int | None:
    """Return the layer in which a failure shows first."""
    row = result.first_divergence
    found = re.search(r"\blayers\.(\d+)\.", row.tensor) if row is not None else None
    return int(found[1]) if found else None


def layers_kept(job: Job, layers: list[int]) -> Job | None:
    """Return a case with some of the layers, in their order; None if it has no others."""
    if len(layers) == job.config.num_layers or not any(name.startswith("layers.") for name in job.weights):
        return None
    weights = {name: array for name, array in job.weights.items() if not name.startswith("layers.")}
    for new, old in enumerate(layers):
        prefix = f"layers.{old}."
        weights |= {
            f"layers.{new}.{name.removeprefix(prefix)}": array
            for name, array in job.weights.items()
            if name.startswith(prefix)
        }
    return _remade(job, weights, num_layers=len(layers))


def samples_kept(job: Job, samples: list[int]) -> Job | None:
    """Return a case with some of the samples, in their order."""
    return _remade(job, job.weights, {name: array[samples] for name, array in job.batch.arrays().items()})


def _fewer_tokens(job: Job, length: int) -> Job | None:
    """Return a case whose table has rows for the tokens that occur, for padding, and for some others."""
    config, ids = job.config, job.batch.input_ids
    if ids is None or "embeddings.token.weight" not in job.weights:
        return None
    padding = (config.pad_id, config.token_padding_row)
    needed = {int(i) for i in np.unique(ids)} | {row for row in padding if row is not None}
    others = (row for row in range(config.vocab_size) if row not in needed)
    if len(needed) > length:
        return None
    rows = sorted([*needed, *(row for row, _ in zip(others, range(length - len(needed)), strict=False))])
    place = {row: new for new, row in enumerate(rows)}
    changes: dict[str, Any] = {"vocab_size": len(rows), "pad_id": place[config.pad_id]}
    if config.token_padding_row is not None:
        changes["token_padding_row"] = place[config.token_padding_row]
    renamed = np.asarray([place[int(token)] for token in ids.reshape(-1)], ids.dtype).reshape(ids.shape)
    table = np.ascontiguousarray(job.weights["embeddings.token.weight"][rows])
    weights = {**job.weights, "embeddings.token.weight": table}
    return _remade(job, weights, job.batch.arrays() | {"input_ids": renamed}, **changes)


def _given(job: Job) -> Iterator[tuple[str, Array, str]]:
    """Yield the inputs of a case, and the names of their axes."""
    table = inputs(job.config, job.part)
    for name, array in job.batch.arrays().items():
        shape = table[name].shape
        yield name, array, shape if len(shape.split()) == array.ndim else "batch query key"


def _first(array: Array, shape: str, lengths: Mapping[str, int]) -> Array:
    """Return the first entries of every axis that has a length."""
    return np.ascontiguousarray(array[tuple(slice(lengths.get(axis)) for axis in shape.split())])


def _remade(
    job: Job, weights: Weights, arrays: Mapping[str, Array] | None = None, **changes: Any
) -> Job | None:
    """Return a case of other contents; None if they do not fit each other."""
    try:
        batch = from_arrays(job.batch.arrays() if arrays is None else arrays)
        config = job.config.replace(**changes)
        validate_weights(config, weights, job.part)
        validate_batch(config, batch, job.part)
    except SpecError:
        return None
    return replace(job, config=config, weights=weights, batch=batch)
