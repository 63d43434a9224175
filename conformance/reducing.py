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


SIZES = ("num_layers", "batch", "tokens", "num_heads", "head_dim", "d_ff", "vocab_size", "max_positions")
"""What is made smaller, in this order: what makes a case cheap comes first."""

_LAYER = re.compile(r"layers\.(\d+)\.")


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
        first = self.result.first_divergence
        if size == "num_layers" and first and (layer := _LAYER.search(first.tensor)):
            self.accept(layers_kept(self.job, [int(layer[1])]))
        if size == "batch" and now > 1:
            any(self.accept(kept(self.job, {"batch": [sample]})) for sample in range(now))
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
    first = slice(length)
    if size == "num_layers":
        return layers_kept(job, list(range(length)))
    if size == "vocab_size":
        return _fewer_tokens(job) if length == 1 else None
    if size == "batch":
        return kept(job, {"batch": first})
    if size == "tokens":
        return kept(job, dict.fromkeys(("tokens", "query", "key"), first))
    if size == "d_ff":
        return kept(job, {"d_ff": first}, d_ff=length)
    if size == "max_positions":
        return kept(job, {"positions": first}, max_positions=length)
    heads = length if size == "num_heads" else job.config.num_heads
    width = length if size == "head_dim" else job.config.head_dim
    axes = dict.fromkeys(("d_model", "features"), slice(heads * width))
    axes |= {"heads": slice(heads), "head_dim": slice(width)}
    return kept(job, axes, num_heads=heads, d_model=heads * width)


def kept(job: Job, axes: Mapping[str, slice | list[int]], **changes: Any) -> Job | None:
    """Return a case with some entries of axes, under a changed configuration; None if they do not fit it."""

    def cut_down(array: Array, shape: str) -> Array:
        return np.ascontiguousarray(array[tuple(axes.get(axis, slice(None)) for axis in shape.split())])

    entries = parameters(job.config, job.part)
    weights = {name: cut_down(array, entries[name].shape) for name, array in job.weights.items()}
    return _remade(
        job, weights, {name: cut_down(array, shape) for name, array, shape in _given(job)}, **changes
    )


def layers_kept(job: Job, layers: list[int]) -> Job | None:
    """Return a case with some of the layers, in their order; None if it has no others."""
    weights = {}
    for name, array in job.weights.items():
        layer = _LAYER.match(name)
        if layer is None:
            weights[name] = array
        elif (old := int(layer[1])) in layers:
            weights[f"layers.{layers.index(old)}.{name[layer.end() :]}"] = array
    if len(weights) == len(job.weights):
        return None
    return _remade(job, weights, job.batch.arrays(), num_layers=len(layers))


def _fewer_tokens(job: Job) -> Job | None:
    """Return a case whose table has rows for the tokens that occur and for padding alone."""
    config, ids = job.config, job.batch.input_ids
    if ids is None:
        return None
    padding = {"pad_id": config.pad_id}
    if config.token_padding_row is not None:
        padding["token_padding_row"] = config.token_padding_row
    rows = sorted({*ids.reshape(-1).tolist(), *padding.values()})
    if len(rows) == config.vocab_size:
        return None
    changes = {name: rows.index(row) for name, row in padding.items()}
    renamed = replace(job.batch, input_ids=np.searchsorted(rows, ids).astype(ids.dtype))
    return kept(replace(job, batch=renamed), {"vocab": rows}, vocab_size=len(rows), **changes)


def _given(job: Job) -> Iterator[tuple[str, Array, str]]:
    """Yield the inputs of a case, and the names of their axes."""
    table = inputs(job.config, job.part)
    for name, array in job.batch.arrays().items():
        shape = table[name].shape
        yield name, array, shape if len(shape.split()) == array.ndim else "batch query key"


def _remade(job: Job, weights: Weights, arrays: Mapping[str, Array], **changes: Any) -> Job | None:
    """Return a case of other contents; None if they do not fit each other."""
    try:
        batch, config = from_arrays(arrays), job.config.replace(**changes)
        validate_weights(config, weights, job.part)
        validate_batch(config, batch, job.part)
    except SpecError:
        return None
    return replace(job, config=config, weights=weights, batch=batch)
