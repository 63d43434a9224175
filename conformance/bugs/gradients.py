"""Bugs that leave every value as it is and show in gradients alone (SPEC GRD-1 to GRD-4, EMB-4, EMB-5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Bug, Change, Gradients, edited, handed_out, option
from concord.conformance.bugs.context import Context, Ids
from concord.conformance.bugs.norms import of_norms
from concord.conformance.bugs.operations import Array

TOKENS, SEGMENTS = "gradients.embeddings.token.weight", "gradients.embeddings.segment.weight"
LAST, BEFORE_LAST = "gradients.classifier.bias", "gradients.layers.1.norm1.bias"
SHIFT = "softmax ignores a shift for all keys alike: the gradient is zero in exact arithmetic"


def weighted(share: Callable[[Ids], NDArray[np.floating]]) -> Change:
    """Return the change that multiplies the gradient of each token's vector by a share, (B, T), made of the ids."""
    return edited(
        lambda m, y: m.o.value_of(y, y * m.o.constant(share(m.ids)[..., None], y)), "embeddings.token"
    )


def by_frequency(ids: Ids) -> NDArray[np.floating]:
    """Divide the gradient of a row by how often its id occurs."""
    share: NDArray[np.floating] = 1.0 / (ids[..., None, None] == ids).sum(axis=(-1, -2))
    return share


def last_alone(ids: Ids) -> NDArray[np.floating]:
    """Assign the gradient of a row where it should be added: the last occurrence of an id wins."""
    given = ids.reshape(-1)
    last = np.array([value not in given[place + 1 :] for place, value in enumerate(given)], dtype=np.float64)
    return last.reshape(ids.shape)


def without_row_term(m: Context, y: Array) -> Array:
    """Differentiate the softmax as if it were an elementwise function: p g, without the term for the row."""
    weights, scores = m.o.stop_gradient(y), m.unnormalised
    return weights + weights * (scores - m.o.stop_gradient(scores))


def padding_detached(m: Context, y: Array) -> Array:
    """Let no gradient flow back into padded rows of what enters a layer."""
    last = m.tap == f"layers.{m.config.num_layers - 1}.norm2"
    return y if last else m.o.where(m.real[..., None], y, m.o.stop_gradient(y))


def key_bias_detached(m: Context, y: Array) -> Array:
    return m.o.value_of(y, m.o.reshape(m.source() @ m.weight(f"{m.tap}.weight"), tuple(y.shape)))


def clipped(gradients: Gradients) -> Gradients:
    """Shorten all gradients together to the length 1, if they are longer."""
    length = float(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())) ** 0.5
    return {
        name: (gradient / max(length, 1.0)).astype(gradient.dtype) for name, gradient in gradients.items()
    }


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{"name": name, "group": "gradients", "what": what, "variant": "bert", "first": (LAST,), **fields}
    )


BUGS = (
    mutant(
        "norm_variance_detached",
        "The variance of a norm is taken for a constant.",
        first=(BEFORE_LAST, "gradients.taps.layers.1.residual2", "gradients.layers.1.feed_forward.outer.*"),
        change=of_norms(
            lambda m, y: m.norm(
                m.source(), deviation=lambda variance: m.o.stop_gradient(m.deviation(variance))
            )
        ),
        cause="detached_variance",
        clause="NRM-2",
    ),
    mutant(
        "norm_mean_detached",
        "The mean of a norm is taken for a constant.",
        first=(BEFORE_LAST, "gradients.taps.layers.1.residual2", "gradients.layers.1.feed_forward.outer.*"),
        change=of_norms(lambda m, y: m.norm(m.source(), center=lambda x, mean: x - m.o.stop_gradient(mean))),
        cause="detached_mean",
        clause="NRM-2",
    ),
    mutant(
        "norm_shared_counted_once",
        "Gain and offset of the norm that both sublayers share get the gradient of its first use alone.",
        variant="nndl-paddle",
        first=("gradients.layers.1.norm.*",),
        change=edited(
            lambda m, y: m.norm(m.source(), gain=m.o.stop_gradient, offset=m.o.stop_gradient), "*.norm2"
        ),
        cause="shared_norm_counted_once",
        clause="NRM-5",
    ),
    mutant(
        "embedding_scale_detached",
        "The gradient of token vectors is not multiplied by sqrt(D).",
        variant="nndl-paddle",
        first=(TOKENS,),
        change=edited(lambda m, y: m.o.value_of(y, y / math.sqrt(m.config.d_model)), "embeddings.token"),
        cause="embedding_scale_in_gradient",
        clause="EMB-2",
    ),
    mutant(
        "padding_row_trained",
        "The row of padding gets a gradient.",
        variant="vanilla-encoder",
        first=(TOKENS,),
        input="padding",
        change=option(token_padding_row=None),
        cause="token_padding_row",
        clause="EMB-4",
    ),
    mutant(
        "padding_row_of_wrong_id",
        "Row 0 gets no gradient, while padding is id 1.",
        variant="vanilla-encoder",
        first=(TOKENS,),
        input="the id 0 or padding",
        change=option(token_padding_row=0),
        cause="token_padding_row",
        clause="EMB-4",
    ),
    mutant(
        "padding_row_frozen",
        "The row of padding gets no gradient, where the source trains it.",
        variant="tf1-text-classifier",
        first=(TOKENS,),
        input="padding",
        change=option(token_padding_row=0),
        cause="token_padding_row",
        clause="EMB-4",
    ),
    mutant(
        "segment_padding_row_trained",
        "Row 0 of the segment table gets a gradient.",
        variant="bert-pytorch",
        first=(SEGMENTS,),
        input="padding",
        change=option(segment_padding_row=None),
        cause="segment_padding_row",
        clause="EMB-5",
    ),
    mutant(
        "position_padding_row_trained",
        "The row that padding takes of the position table gets a gradient.",
        variant="roberta",
        first=("gradients.embeddings.position.weight",),
        input="padding",
        change=option(position_padding_row=None),
        cause="position_padding_row",
        clause="POS-7",
    ),
    mutant(
        "embedding_gradient_by_frequency",
        "The gradient of a row is divided by how often its id occurs.",
        first=(TOKENS,),
        input="an id that occurs twice",
        change=weighted(by_frequency),
        cause="gradient_by_frequency",
    ),
    mutant(
        "embedding_gradient_of_last_alone",
        "Of an id that occurs several times, the last occurrence overwrites the others' gradients.",
        first=(TOKENS,),
        input="an id that occurs twice",
        change=weighted(last_alone),
        cause="gradient_overwritten",
    ),
    mutant(
        "position_table_frozen",
        "The learned position table gets no gradient.",
        first=("gradients.embeddings.position.weight",),
        change=edited(lambda m, y: m.o.stop_gradient(y), "embeddings.position"),
        cause="no_gradient",
    ),
    mutant(
        "residual_detached",
        "No gradient flows through the residual.",
        first=("gradients.taps.layers.1.norm1", BEFORE_LAST),
        change=edited(
            lambda m, y: m.o.stop_gradient(m.source()) + m.source("result"), "*.residual1", "*.residual2"
        ),
        cause="detached_residual",
        clause="RES-1",
    ),
    mutant(
        "attention_weights_detached",
        "No gradient flows through the attention weights.",
        first=(
            "gradients.taps.layers.1.attention.masked_scores",
            "gradients.layers.1.attention.key.*",
            "gradients.layers.1.attention.query.*",
        ),
        input="more than one token",
        change=edited(lambda m, y: m.o.stop_gradient(y), "*.attention.weights"),
        cause="no_gradient",
        clause="ATT-5",
    ),
    mutant(
        "softmax_gradient_without_row_term",
        "The softmax is differentiated as if it were an elementwise function.",
        first=(
            "gradients.taps.layers.1.attention.masked_scores",
            "gradients.layers.1.attention.key.*",
            "gradients.layers.1.attention.query.*",
        ),
        change=edited(without_row_term, "*.attention.weights"),
        cause="softmax_gradient_without_row_term",
        tried=True,
        clause="ATT-5",
    ),
    mutant(
        "encoder_detached",
        "The head alone is trained: no gradient flows into the encoder.",
        first=("gradients.taps.layers.1.norm2", "gradients.layers.1.norm2.bias"),
        change=edited(lambda m, y: m.o.stop_gradient(y), "pooling"),
        cause="no_gradient",
        clause="HED-1",
    ),
    mutant(
        "padding_detached",
        "No gradient flows back into padded rows, though padded queries are computed.",
        first=("gradients.layers.0.norm2.bias",),
        input="a row of padding only",
        change=edited(padding_detached, "embeddings.norm", "*.norm2"),
        cause="detached_padding",
        clause="MSK-4",
    ),
    mutant(
        "loss_gradient_of_sum",
        "The gradient is that of the sum over samples, while the mean is reported.",
        first=("gradients.taps.losses", LAST),
        input="more than one sample",
        change=edited(lambda m, y: m.o.value_of(y, m.o.sum(m.source())), "loss"),
        cause="gradient_of_sum",
        clause="LOS-2",
    ),
    mutant(
        "gradients_clipped",
        "Gradients are clipped to norm 1 before they are handed out.",
        input="gradients above norm 1",
        change=handed_out(clipped),
        cause="gradient_clipped",
        clause="GRD-1",
    ),
    mutant(
        "gradients_accumulated",
        "Gradients of an earlier step were not reset.",
        change=handed_out(lambda gradients: {name: gradient * 2 for name, gradient in gradients.items()}),
        cause="gradient_accumulated",
        clause="GRD-1",
    ),
    mutant(
        "key_bias_without_gradient",
        "The bias of the keys gets no gradient.",
        first=(),
        equivalent={"float64": SHIFT, "float32": SHIFT},
        change=edited(key_bias_detached, "*.attention.key"),
    ),
)
