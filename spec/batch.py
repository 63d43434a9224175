"""Inputs of a run: container, validation, and examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.spec.arrays import Array, Arrays, Ids, Mask, not_finite, wrong_element, wrong_shape, wrong_type
from concord.spec.config import EncoderConfig
from concord.spec.errors import BatchError, unknown
from concord.spec.parameters import Weights
from concord.spec.precision import precision
from concord.spec.tensors import OF_IDS, POOLED, axis_sizes, inputs, resolve


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The inputs of one run: integers and floating-point values of any width.

    B samples of T tokens, Q queries, S keys, H heads of width K, D = H K. Each part accepts only its own
    inputs (:func:`concord.spec.tensors.inputs`).

    Attributes:
        input_ids: integers (B, T) in [0, vocab_size); ``pad_id`` marks padding anywhere (SPEC INP-1, MSK-1).
        segment_ids: integers (B, T) in [0, num_segments), also for padding (SPEC EMB-5).
        labels: integers (B,) in [0, num_classes), or in {0, 1} for one class (SPEC INP-3).
        embeddings: (B, T, D), replace the tables' vectors (SPEC PRT-1).
        query: (B, Q, D), or (B, Q, H, K) for ``dot_product``.
        key, value: (B, S, D), or (B, S, H, K).
        key_mask: bool (B, S) or (B, Q, S), True where a key is visible; default all (SPEC MSK-4).
        query_mask: bool (B, Q), True where a query is real; for ``query_mask = overwrite`` (SPEC MSK-8).
        cotangent: in the shape of the output; without labels the loss is sum(output * cotangent) (SPEC
            LOS-5).
    """

    input_ids: Ids | None = None
    segment_ids: Ids | None = None
    labels: Ids | None = None
    embeddings: Array | None = None
    query: Array | None = None
    key: Array | None = None
    value: Array | None = None
    key_mask: Mask | None = None
    query_mask: Mask | None = None
    cotangent: Array | None = None

    def arrays(self) -> Arrays:
        """The given arrays, named."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: array for name, array in fields if array is not None}

    def required(self, name: str) -> NDArray[Any]:
        """Return an input, or raise ``BatchError`` if it is absent."""
        array: NDArray[Any] | None = getattr(self, name)
        if array is None:
            raise BatchError(f"{name!r} is missing but is required [clause=PRT-1]")
        return array


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Batch:
    """Build a batch from arrays by field name, unchecked.

    Raises:
        UnknownNameError: for an unknown input.
    """
    names = [field.name for field in dataclasses.fields(Batch)]
    for name in arrays:
        if name not in names:
            raise unknown("input", name, names)
    return Batch(**arrays)


def validate_batch(config: EncoderConfig, batch: Batch, part: str = "model", where: str = "") -> None:
    """Reject inputs that do not fit (SPEC INP-1 to INP-5).

    Args:
        where: context of messages, such as ``"backend=paddle"``.

    Raises:
        BatchError: listing all problems.
    """
    arrays, table, context = batch.arrays(), inputs(config, part), f"{where}, " if where else ""
    problems = [
        f"{n!r} is missing but is required [{context}clause={t.clause}]"
        for n, t in table.items()
        if t.required and n not in arrays
    ]
    problems += [
        f"{n!r} is unexpected: part {part!r} of this configuration takes no such input "
        f"[{context}clause=PRT-1]"
        for n in arrays
        if n not in table
    ]
    sizes: dict[str, int] = {}
    for name, tensor in table.items():
        if name in arrays:
            problem = wrong_type(name, arrays[name], tensor.kind) or _shape_problem(
                config, name, arrays[name], tensor.shape, sizes
            )
            if problem:
                problems.append(f"{problem} [{context}clause={tensor.clause}]")
    # Check values only in arrays of the correct type and shape.
    if not problems:
        problems = [
            f"{problem} [{context}clause={clause}]"
            for problem, clause in _value_problems(config, batch, part)
        ]
    if problems:
        raise BatchError(problems)


def _shape_problem(
    config: EncoderConfig, name: str, array: NDArray[Any], shape: str, sizes: dict[str, int]
) -> str | None:
    if name == "key_mask" and array.ndim == 3:
        shape = "batch query key"
    axes = shape.split()
    if array.ndim != len(axes):
        return f"{name!r} has rank {array.ndim}, shape {array.shape}, but must have axes ({', '.join(axes)})"
    if 0 in array.shape:
        return f"{name!r} has shape {array.shape} but no axis may be empty"
    for axis, size in zip(axes, array.shape, strict=True):
        # The first array with an axis sets that axis' size.
        sizes.setdefault(axis, axis_sizes(config).get(axis, size))
    return wrong_shape(name, array, resolve(shape, sizes))


def _value_problems(config: EncoderConfig, batch: Batch, part: str) -> list[tuple[str, str]]:
    problems = []
    label_count = max(config.num_classes, 2)
    for name, bound, clause in (
        ("input_ids", config.vocab_size, "INP-1"),
        ("segment_ids", config.num_segments, "EMB-5"),
        ("labels", label_count, "INP-3"),
    ):
        ids = getattr(batch, name)
        outside = None if ids is None else (ids < 0) | (ids >= bound)
        if outside is not None and (problem := wrong_element(name, ids, outside, f"lie in [0, {bound})")):
            problems.append((problem, clause))
    if part in OF_IDS:
        tokens, widest = batch.required("input_ids").shape[1], config.max_tokens
        if tokens > widest:
            problems.append(
                (
                    f"'input_ids' has {tokens} tokens but at most {widest} fit: 'max_positions' is "
                    f"{config.max_positions} and positions start at {config.position_start}",
                    "INP-2",
                )
            )
        elif part in POOLED and config.pooling == "flatten" and tokens != config.max_positions:
            problems.append(
                (
                    f"'input_ids' has {tokens} tokens but must have {config.max_positions}, which is "
                    f"'max_positions': the head flattens all of them",
                    "INP-5",
                )
            )
    if (
        part == "model"
        and config.ignore_label is not None
        and (batch.required("labels") == config.ignore_label).all()
    ):
        problems.append(
            (
                f"'labels' are all {config.ignore_label}, which 'ignore_label' leaves out; at least one "
                f"must count",
                "LOS-3",
            )
        )
    for name, array in batch.arrays().items():
        if problem := not_finite(name, array):
            problems.append((problem, "INP-4"))
    return problems


PADDINGS: dict[str, str] = {
    "none": "every row full",
    "ragged": (
        "rows that are full, of 1 token, half full, fully padded, and full with padding inside the text"
    ),
    "equal": "every row ends in the same amount of padding",
    "left": (
        "the first row has padding at its start and inside; then rows with 1 token, half full, full, and "
        "full with padding inside the text"
    ),
}
"""Padding patterns of :func:`example_batch` (SPEC INP-6)."""


def example_batch(
    config: EncoderConfig,
    batch: int = 4,
    tokens: int | None = None,
    seed: int = 0,
    padding: str | Sequence[int] = "ragged",
    part: str = "model",
) -> Batch:
    """Draw a batch for a part (SPEC INP-6): int64 ids and labels, bool masks, float64 values.

    Args:
        tokens: T, by default the maximum; in attention parts S, with T // 2 + 1 queries.
        padding: one of :data:`PADDINGS`, or each sample's number of leading real tokens.

    Raises:
        UnknownNameError: for an unknown padding or part.
        BatchError: if the batch does not fit the configuration.
    """
    if isinstance(padding, str) and padding not in PADDINGS:
        raise unknown("padding", padding, list(PADDINGS))
    generator = np.random.default_rng([seed, batch])
    tokens = config.max_tokens if tokens is None else tokens
    real = _real_tokens(batch, tokens, padding)
    example = Batch(**_draw(config, generator, real, part))
    validate_batch(config, example, part)
    return example


def completed(
    config: EncoderConfig,
    batch: Batch,
    part: str = "model",
    drawn: bool = False,
) -> Batch:
    """Fill in missing labels or a missing cotangent (SPEC INP-3, LOS-5).

    Args:
        drawn: cycle labels through all classes and draw the cotangent, for gradients; by default labels are
            equal, and the cotangent is zero.
    """
    arrays = batch.arrays()
    table = inputs(config, part)
    missing = table.keys() - arrays.keys()
    # The attention parts have no ids; the number of queries determines the shape of their output.
    main = next((arrays[name] for name in ("input_ids", "query") if name in arrays), None)
    if main is None or main.ndim < 2:
        return batch
    values: dict[str, Any] = {}
    if "labels" in missing:
        classes = [label for label in range(max(config.num_classes, 2)) if label != config.ignore_label]
        values["labels"] = np.asarray(classes, np.int64)[np.arange(len(main)) * drawn % len(classes)]
    if "cotangent" in missing:
        count, tokens = main.shape[:2]
        sizes = axis_sizes(config, batch=count, tokens=tokens, query=tokens)
        shape = resolve(table["cotangent"].shape, sizes)
        numbers = np.random.default_rng([0, count]).standard_normal(shape) if drawn else np.zeros(shape)
        values["cotangent"] = numbers.astype(np.float32).astype(np.float64)
    return dataclasses.replace(batch, **values)


def _real_tokens(batch: int, tokens: int, padding: str | Sequence[int]) -> Mask:
    if not isinstance(padding, str):
        return np.arange(tokens) < np.asarray(padding)[:, None]
    real = np.ones((batch, tokens), dtype=bool)
    if padding == "equal":
        real[:, -max(1, tokens // 3) :] = tokens == 1
    if padding in ("ragged", "left"):
        full, empty = (tokens, 0) if padding == "ragged" else (0, tokens)
        for row, length in zip(range(batch), (full, 1, (tokens + 1) // 2, empty), strict=False):
            real[row, length:] = False
        for row in range(4, batch):
            real[row, 1 + row % max(1, tokens - 1) :: 3] = False
    if padding == "left":
        first, middle = 1 + tokens // 8, tokens // 2
        real[0, first:] = True
        real[0, middle : middle + 1 + tokens // 32] = tokens < 4
    return real


def _draw(config: EncoderConfig, generator: np.random.Generator, real: Mask, part: str) -> Arrays:
    batch, tokens = real.shape
    sizes = axis_sizes(config, batch=batch, tokens=tokens, key=tokens, query=tokens // 2 + 1)
    arrays: Arrays = {}
    for name, tensor in inputs(config, part).items():
        shape = resolve(tensor.shape, sizes)
        if name == "input_ids":
            words = (
                generator.integers(0, config.vocab_size - 1, shape)
                if config.vocab_size > 1
                else np.zeros(shape, np.int64)
            )
            words += words >= config.pad_id  # skip pad_id
            arrays[name] = np.where(real, np.minimum(words, config.vocab_size - 1), config.pad_id)
        elif name == "segment_ids":
            border = generator.integers(1, tokens + 1, (batch, 1))
            arrays[name] = (
                np.where(real, (np.arange(tokens) >= border) + max(0, config.num_segments - 2), 0)
                % config.num_segments
            )
        elif name == "labels":
            arrays[name] = (np.arange(batch) + 1) % max(config.num_classes, 2)
        elif name == "key_mask":
            arrays[name] = real
        elif name == "query_mask":
            arrays[name] = real[:, : shape[1]]
        else:
            # float32 values stored as float64, so that runs in both precisions get the same input (SPEC
            # WGT-5).
            arrays[name] = generator.standard_normal(shape).astype(np.float32).astype(np.float64)
    return arrays


def round_inputs(weights: Weights, batch: Batch, dtype: str) -> tuple[Arrays, Batch]:
    """Round weights and floating-point inputs to a precision (SPEC PRC-2)."""
    target = precision(dtype)
    inputs = {
        n: target.round(a) if np.issubdtype(a.dtype, np.floating) else a for n, a in batch.arrays().items()
    }
    return {name: target.round(array) for name, array in weights.items()}, from_arrays(inputs)
