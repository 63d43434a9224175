"""Inputs of a run: the container, its validation, and example batches with every awkward row."""

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
    """The inputs of one run. Integers may have any integer dtype, numbers any floating dtype.

    B samples of T tokens, Q queries, S keys, H heads of width K, D = H K. Each part takes some of them
    (:func:`concord.spec.tensors.inputs`); an array that the part does not take is refused.

    Attributes:
        input_ids: integers (B, T) in [0, vocab_size): the tokens. ``pad_id`` marks padding, wherever it
            stands (SPEC INP-1, MSK-1).
        segment_ids: integers (B, T) in [0, num_segments), also for padding (SPEC EMB-5).
        labels: integers (B,) in [0, num_classes), or in {0, 1} where there is one class: what the loss is
            taken against (SPEC INP-3).
        embeddings: numbers (B, T, D), in place of those that tables would give (SPEC PRT-1).
        query: numbers (B, Q, D), or (B, Q, H, K) for ``dot_product``.
        key: numbers (B, S, D), or (B, S, H, K).
        value: numbers (B, S, D), or (B, S, H, K).
        key_mask: bool (B, S) or (B, Q, S), True where a key is visible; without it all are (SPEC MSK-4).
        query_mask: bool (B, Q), True where a query is real; it matters with ``query_mask = overwrite`` alone
            (SPEC MSK-8).
        cotangent: numbers in the shape of the part's output. Where there are no labels, the loss is the sum
            of output times cotangent: the gradients of that are compared (SPEC LOS-5).
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
        """Return the arrays that are there, by name."""
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: array for name, array in fields if array is not None}

    def required(self, name: str) -> NDArray[Any]:
        """Return an input that the part needs.

        Raises:
            BatchError: if it is absent.
        """
        array: NDArray[Any] | None = getattr(self, name)
        if array is None:
            raise BatchError(f"{name!r} is missing but is required [clause=PRT-1]")
        return array


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> Batch:
    """Build a batch from arrays by name (SPEC INP-1).

    Shapes and values are checked by :func:`validate_batch`.

    Args:
        arrays: names of :class:`Batch`'s fields to arrays.

    Raises:
        UnknownNameError: for a name that is no input, with the nearest names.
    """
    known = [field.name for field in dataclasses.fields(Batch)]
    for name in arrays:
        if name not in known:
            raise unknown("input", name, known)
    return Batch(**arrays)


def validate_batch(config: EncoderConfig, batch: Batch, part: str = "model", where: str = "") -> None:
    """Refuse inputs that do not fit (SPEC INP-1 to INP-5).

    Args:
        part: one of :data:`concord.spec.tensors.PARTS`.
        where: context for the messages, for example ``"backend=paddle"``.

    Raises:
        BatchError: listing everything that is wrong, at once.
    """
    given, table, context = batch.arrays(), inputs(config, part), f"{where}, " if where else ""
    problems = [
        f"{n!r} is missing but is required [{context}clause={t.clause}]"
        for n, t in table.items()
        if t.required and n not in given
    ]
    problems += [
        f"{n!r} is unexpected: part {part!r} of this configuration takes no such input "
        f"[{context}clause=PRT-1]"
        for n in given
        if n not in table
    ]
    sizes: dict[str, int] = {}
    for name, tensor in table.items():
        if name in given:
            problem = wrong_type(name, given[name], tensor.kind) or _shape_problem(
                config, name, given[name], tensor.shape, sizes
            )
            if problem:
                problems.append(f"{problem} [{context}clause={tensor.clause}]")
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
    """Check a shape against the axes seen so far, and note those that it is the first to have."""
    if name == "key_mask" and array.ndim == 3:
        shape = "batch query key"
    axes = shape.split()
    if array.ndim != len(axes):
        return f"{name!r} has rank {array.ndim}, shape {array.shape}, but must have axes ({', '.join(axes)})"
    if 0 in array.shape:
        return f"{name!r} has shape {array.shape} but no axis may be empty"
    for axis, size in zip(axes, array.shape, strict=True):
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
        tokens, widest = batch.required("input_ids").shape[1], config.max_positions - config.position_start
        if tokens > widest:
            problems.append(
                (
                    f"'input_ids' has {tokens} tokens but at most {widest} fit: 'max_positions' is "
                    f"{config.max_positions} and numbers start at {config.position_start}",
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
    "ragged": "rows full, 1 token, half, none at all (fully padded), and full with padding inside the text",
    "equal": "every row ends in the same amount of padding",
    "left": (
        "the first row begins with padding and has it inside; then one of 1 token, half, full, and "
        "full with padding inside the text"
    ),
}
"""How :func:`example_batch` may pad (SPEC INP-6)."""


def example_batch(
    config: EncoderConfig,
    batch: int = 4,
    tokens: int | None = None,
    seed: int = 0,
    padding: str | Sequence[int] = "ragged",
    part: str = "model",
) -> Batch:
    """Draw a batch for a part of the model (SPEC INP-6): ids and labels int64, masks bool, numbers float64.

    Args:
        batch: B, the number of samples.
        tokens: T; by default as many as the position table has room for. For the attention parts the number
            of keys; there are T // 2 + 1 queries.
        seed: of the random stream.
        padding: one of :data:`PADDINGS`, or how many real tokens each sample begins with.
        part: one of :data:`concord.spec.tensors.PARTS`.

    Raises:
        UnknownNameError: for an unknown padding or part.
        BatchError: if the batch does not fit the configuration.
    """
    if isinstance(padding, str) and padding not in PADDINGS:
        raise unknown("padding", padding, list(PADDINGS))
    generator = np.random.default_rng([seed, batch])
    tokens = config.max_positions - config.position_start if tokens is None else tokens
    real = _real_tokens(batch, tokens, padding)
    drawn = Batch(**_draw(config, generator, real, part))
    validate_batch(config, drawn, part)
    return drawn


def completed(
    config: EncoderConfig,
    batch: Batch,
    part: str = "model",
    drawn: bool = False,
) -> Batch:
    """Return a batch with what the loss alone needs (SPEC INP-3, LOS-5), where nobody gave it.

    What is not asked for need not be given.

    Args:
        drawn: whether gradients of the loss are wanted: then labels go through all classes, and a cotangent
            is drawn; else the labels are all the same and the cotangent is zero.
    """
    given = batch.arrays()
    table = inputs(config, part)
    missing = table.keys() - given.keys()
    # Of a part that stops at attention, the queries decide the shape.
    main = next((given[name] for name in ("input_ids", "query") if name in given), None)
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
    """Draw each input of a part. Floating-point values are float32 numbers held in float64."""
    batch, tokens = real.shape
    sizes = axis_sizes(config, batch=batch, tokens=tokens, key=tokens, query=tokens // 2 + 1)
    drawn: Arrays = {}
    for name, tensor in inputs(config, part).items():
        shape = resolve(tensor.shape, sizes)
        if name == "input_ids":
            words = (
                generator.integers(0, config.vocab_size - 1, shape)
                if config.vocab_size > 1
                else np.zeros(shape, np.int64)
            )
            words += words >= config.pad_id  # any id but padding
            drawn[name] = np.where(real, np.minimum(words, config.vocab_size - 1), config.pad_id)
        elif name == "segment_ids":
            border = generator.integers(1, tokens + 1, (batch, 1))
            drawn[name] = (
                np.where(real, (np.arange(tokens) >= border) + max(0, config.num_segments - 2), 0)
                % config.num_segments
            )
        elif name == "labels":
            drawn[name] = (np.arange(batch) + 1) % max(config.num_classes, 2)
        elif name == "key_mask":
            drawn[name] = real
        elif name == "query_mask":
            drawn[name] = real[:, : shape[1]]
        else:
            drawn[name] = generator.standard_normal(shape).astype(np.float32).astype(np.float64)
    return drawn


def round_inputs(weights: Weights, batch: Batch, dtype: str) -> tuple[Arrays, Batch]:
    """Return weights and floating-point inputs rounded once to a precision.

    (SPEC PRC-2), in its storage dtype.
    """
    target = precision(dtype)
    inputs = {
        n: target.round(a) if np.issubdtype(a.dtype, np.floating) else a for n, a in batch.arrays().items()
    }
    return {name: target.round(array) for name, array in weights.items()}, from_arrays(inputs)
