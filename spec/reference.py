"""The reference: the whole model family, forward and gradients, in NumPy."""

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
    """What the reference computed.

    All arrays have the dtype of the arithmetic, float64 unless another was asked for.

    Attributes:
        output: the result of the part: logits (B, C), or the pooled vector (B, D), or (B, T, D), or (B, Q,
            D).
        loss: scalar (SPEC LOS-1 to LOS-5).
        taps: every intermediate tensor by name, in the order of computation and the shapes of
            :func:`concord.spec.tensors.taps`.
        gradients: of the loss, for each trainable parameter, and ``inputs.<name>`` for given tensors, in the
            order in which the backward pass completes them, each in the shape of what it is the gradient of
            (SPEC GRD-1).
        tap_gradients: of the loss, for each tap that it depends on, in the same order (SPEC GRD-6).
        backward: names of all gradients in that order, ``taps.<tap>`` for those of taps.
    """

    output: Array
    loss: Array
    taps: dict[str, Array]
    gradients: dict[str, Array] = field(default_factory=dict)
    tap_gradients: dict[str, Array] = field(default_factory=dict)
    backward: list[str] = field(default_factory=list)

    @property
    def logits(self) -> Array:
        """The output under the name that it has in the whole model."""
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
    """Compute a part of the model: the oracle that every backend is judged by.

    Args:
        config: the member of the family.
        weights: canonical name to array of any floating dtype; exactly the parameters of the part (SPEC
            WGT-1, WGT-2).
        batch: the inputs of the part (SPEC INP-1 to INP-5).
        gradients: whether to differentiate the loss too.
        part: one of :data:`concord.spec.tensors.PARTS`.
        dtype: the precision whose *model* is computed: weights, inputs and mask constants are rounded to it
            once, and the sum with an additive mask constant is rounded as it rounds (SPEC PRC-2, MSK-5,
            MSK-6).
        arithmetic: the precision in which it is computed. ``float64`` gives the truth for ``dtype``;
            ``dtype`` itself gives an example of what correct arithmetic of that precision makes of it.
        pinned: tap name to array. Each tap is computed from the pinned taps before it, where there are any,
            and what follows goes on from the pinned one (SPEC PRT-2). Gradients flow through, by the pinned
            values.
        deviations: in what a backend says that it deviates from the specification
            (:mod:`concord.spec.deviations`).

    Raises:
        WeightsError, BatchError: for input that does not fit, listing everything that is wrong.
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
    """Compute a part of the model in any kind of arithmetic.

    The other arguments are those of :func:`reference`.

    ``model`` stands in for the model that is specified, as something that goes wrong in one of its steps.

    The arrays of a :class:`concord.spec.montecarlo.MonteCarlo` arithmetic have a leading axis of samples, of
    size 1 where no sample can differ from another.
    """
    validate_weights(config, weights, part)
    validate_batch(config, batch, part)
    rounded_weights, rounded_batch = round_inputs(weights, batch, dtype)
    taps, found = dict[str, Array](), dict[str, Array]()

    def store(name: str, array: Array) -> None:
        if name.startswith("gradients."):
            found[name.removeprefix("gradients.")] = run.full(name.removeprefix("gradients."), array)
        else:
            taps[name] = array

    run = (model or Model)(
        config, rounded_weights, rounded_batch, dtype, arithmetic, pinned or {}, deviations
    )
    run.observe(store, gradients, part)
    by_taps = {name.removeprefix("taps."): array for name, array in found.items() if name.startswith("taps.")}
    return Truth(
        taps[output_name(config, part)],
        taps["loss"],
        taps,
        {n: g for n, g in found.items() if not n.startswith("taps.")},
        by_taps,
        list(found),
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
    unrounded: Callable[[str], bool] = lambda name: False,
    deviations: Deviations = NONE,
    slices: bool = False,
    dropout: Dropout = lambda site, shape: None,
) -> int:
    """Compute a part of the model and keep nothing: each tensor is handed on as soon as it is there.

    Args:
        weights, batch: valid, and rounded to ``dtype`` already.
        observer: takes the tensors.
        pinned_gradients: tap name to the gradient of the loss by it. What flows back further goes on from the
            pinned one.
        unrounded: says of which pinned taps what follows may have seen the values before they were rounded.
        slices: whether to hand on the gradients by looked-up rows before they are summed, (B, T, D), as
            ``gradients.slices.<table>``.
        dropout: what is dropped at each site.

    Returns:
        How many elements were computed on the way forward: what a sample takes up in memory, but for a
        factor.
    """
    run = Model(config, weights, batch, dtype, arithmetic, pinned or {}, deviations)
    run.pinned_gradients, run.unrounded, run.slices = pinned_gradients or {}, unrounded, slices
    run.dropout = dropout
    return run.observe(observer, gradients, part)


def used_rows(config: EncoderConfig, batch: Batch, part: str = "model") -> dict[str, Ids]:
    """Return which rows of each table a batch looks up, in ascending order.

    Those of the others have no gradient.
    """
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
    """Return the predicted label of each sample (SPEC HED-4).

    Logits (B, C) to int64 (B,), 0 or 1 where C is 1.
    """
    return (logits[:, 0] >= 0).astype(np.int64) if config.num_classes == 1 else np.argmax(logits, axis=-1)
