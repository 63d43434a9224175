"""The reference: the whole model family, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Ids
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.encoder import Dropout, Model, Observer
from concord.spec.leaves import Leaves
from concord.spec.masks import real_tokens
from concord.spec.parameters import Weights, validate_weights
from concord.spec.positions import position_ids
from concord.spec.tensors import OF_IDS, output_name


@dataclass
class Truth:
    """Tensors of the reference, in the dtype of its arithmetic.

    Attributes:
        output: result of the part: (B, C), (B, D), (B, T, D) or (B, Q, D).
        loss: scalar (SPEC LOS-1 to LOS-5).
        taps: every intermediate tensor (:func:`concord.spec.tensors.taps`).
        gradients: gradients of the loss by parameter and ``inputs.<name>``, in order of the backward pass
            (SPEC GRD-1).
        tap_gradients: gradients of the taps that the loss depends on (SPEC GRD-6).
        backward: names of all gradients in order, with ``taps.<tap>`` for taps.
    """

    output: Array
    loss: Array
    taps: dict[str, Array]
    gradients: dict[str, Array] = field(default_factory=dict)
    tap_gradients: dict[str, Array] = field(default_factory=dict)
    backward: list[str] = field(default_factory=list)

    @property
    def logits(self) -> Array:
        """The output of the whole model."""
        return self.output


def reference(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    gradients: bool = False,
    part: str = "model",
    dtype: str = "float64",
    arithmetic: str = "float64",
    pinned: Mapping[str, Array] | None = None,
    deviations: Deviations = NONE,
) -> Truth:
    """Compute a part of the model.

    Args:
        weights: exactly the parameters of the part, in any floating dtype (SPEC WGT-1, WGT-2).
        part: one of :data:`concord.spec.tensors.PARTS`.
        dtype: precision of the *model*: of weights, inputs and mask constants (SPEC PRC-2, MSK-5, MSK-6).
        arithmetic: precision of the *computation*. ``float64`` gives the truth, ``dtype`` a correct run.
        pinned: arrays by tap name; later steps continue from them (SPEC PRT-2).
        deviations: deviations declared by a backend (:mod:`concord.spec.deviations`).

    Raises:
        WeightsError, BatchError: listing all problems of the input.
        UnknownNameError: for an unknown part or precision.
    """
    return compute(
        config,
        weights,
        batch,
        Arithmetic(arithmetic),
        gradients,
        part,
        dtype,
        pinned,
        deviations,
    )


def compute(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    arithmetic: Arithmetic,
    gradients: bool = False,
    part: str = "model",
    dtype: str = "float64",
    pinned: Mapping[str, Array] | None = None,
    deviations: Deviations = NONE,
    model: Callable[..., Model] | None = None,
) -> Truth:
    """Compute a part in any arithmetic; other arguments as in :func:`reference`.

    Args:
        arithmetic: :class:`concord.spec.montecarlo.MonteCarlo` adds a leading axis of samples, or of size 1.
        model: replaces :class:`concord.spec.encoder.Model`, to inject a bug.
    """
    validate_weights(config, weights, part)
    validate_batch(config, batch, part)
    rounded_weights, rounded_batch = round_inputs(weights, batch, dtype)
    taps, gradient_arrays = dict[str, Array](), dict[str, Array]()

    def store(name: str, array: Array) -> None:
        if name.startswith("gradients."):
            gradient_arrays[name.removeprefix("gradients.")] = run.full(
                name.removeprefix("gradients."), array
            )
        else:
            taps[name] = array

    run = (model or Model)(
        config, rounded_weights, rounded_batch, dtype, arithmetic, pinned or {}, deviations
    )
    run.observe(store, gradients, part)
    by_taps = {
        name.removeprefix("taps."): array
        for name, array in gradient_arrays.items()
        if name.startswith("taps.")
    }
    return Truth(
        taps[output_name(config, part)],
        taps["loss"],
        taps,
        {n: g for n, g in gradient_arrays.items() if not n.startswith("taps.")},
        by_taps,
        list(gradient_arrays),
    )


def observe(
    config: EncoderConfig,
    weights: Weights | Leaves,
    batch: Batch,
    arithmetic: Arithmetic,
    observer: Observer,
    gradients: bool = True,
    part: str = "model",
    dtype: str = "float64",
    pinned: Mapping[str, Array] | None = None,
    pinned_gradients: Mapping[str, Array] | None = None,
    deviations: Deviations = NONE,
    slices: bool = False,
    dropout: Dropout = lambda site, shape: None,
) -> int:
    """Compute a part, and report each tensor immediately instead of keeping it.

    Args:
        weights, batch: valid, and already rounded to ``dtype``.
        pinned_gradients: gradients by tap name; the backward pass continues from them.
        slices: whether to report ``gradients.slices.<table>`` (B, T, D), before rows with the same id are
            summed.

    Returns:
        The number of forward elements, which determines a sample's memory.
    """
    run = Model(config, weights, batch, dtype, arithmetic, pinned or {}, deviations)
    run.pinned_gradients, run.slices = pinned_gradients or {}, slices
    run.dropout = dropout
    return run.observe(observer, gradients, part)


def used_rows(config: EncoderConfig, batch: Batch, part: str = "model") -> dict[str, Ids]:
    """Sorted rows of each table that a batch looks up."""
    if part not in OF_IDS:
        return {}
    tokens = batch.required("input_ids")
    ids = {
        "embeddings.token.weight": tokens,
        "embeddings.position.weight": position_ids(config, real_tokens(config, tokens)),
    }
    if config.num_segments:
        ids["embeddings.segment.weight"] = batch.required("segment_ids")
    return {name: np.unique(rows) for name, rows in ids.items()}


def predict(config: EncoderConfig, logits: Array) -> Ids:
    """Predicted label of each sample: (B, C) to int64 (B,) (SPEC HED-4)."""
    return (logits[:, 0] >= 0).astype(np.int64) if config.num_classes == 1 else np.argmax(logits, axis=-1)
