"""Bugs that leave every value as it is and show in gradients alone (SPEC GRD-1 to GRD-4, EMB-4, EMB-5)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.faults.fault import Fault, option, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Attend, Embed, EncoderLayer, Gradients, Head, Loss, MultiHead, Norm, PostNorm, TokenVectors
from conformance.mutants.surgery import Steps

TOKENS, SEGMENTS = "gradients.embeddings.token.weight", "gradients.embeddings.segment.weight"
LAST, BEFORE_LAST = "gradients.classifier.bias", "gradients.layers.1.norm1.bias"
SHIFT = "softmax ignores a shift for all keys alike: the gradient is zero in exact arithmetic"


def weighted(family: Steps, vectors: Array, share: NDArray[np.floating]) -> Array:
    """Return vectors whose gradient is multiplied by a share for each token, (B, T)."""
    factor = family.o.constant(share[..., None], vectors)
    return family.o.value_of(vectors, vectors * factor)


def by_frequency(family: Steps, layer: Any, ids: Array) -> Array:
    """Divide the gradient of a row by how often its id occurs."""
    given = family.o.numpy(ids)
    count = (given[..., None, None] == given).sum(axis=(-1, -2))
    return weighted(family, family.o.take(family.o.table(layer.token), ids), 1.0 / count)


def last_alone(family: Steps, layer: Any, ids: Array) -> Array:
    """Assign the gradient of a row where it should be added: the last occurrence of an id wins."""
    given = family.o.numpy(ids).reshape(-1)
    last = np.array([value not in given[place + 1 :] for place, value in enumerate(given)], dtype=np.float64)
    return weighted(family, family.o.take(family.o.table(layer.token), ids), last.reshape(tuple(ids.shape)))


def without_row_term(family: Steps, layer: Any, scores: Array, unmasked: Array, visible: Array) -> Array:
    """Differentiate the softmax as if it were an elementwise function: p g, without the term for the row."""
    weights = family.o.stop_gradient(family.o.softmax(scores, -1))
    return weights + weights * (scores - family.o.stop_gradient(scores))


def padding_detached(family: Steps, layer: Any, x: Array, real: Array, tap: Any) -> Array:
    """Let no gradient flow back into padded rows."""
    return family.original(layer, family.o.where(real[..., None], x, family.o.stop_gradient(x)), real, tap=tap)


def used_once(family: Steps, layer: Any, number: int, x: Array) -> Array:
    """Let gain and offset of the shared norm have a gradient from its first use alone."""
    norm = getattr(layer, layer.norm_names[number - 1])
    normed = norm(x)
    if number == 1:
        return normed
    gain, offset = family.o.gain(norm), family.o.offset(norm)
    detached = (normed - offset) / gain * family.o.stop_gradient(gain) + family.o.stop_gradient(offset)
    return family.o.value_of(normed, detached)


def key_bias_detached(family: Steps, layer: Any, role: str, x: Array) -> Array:
    linear = getattr(layer, role)
    projected = linear(x)
    if role != "key":
        return layer.activation(projected)
    return family.o.value_of(projected, x @ family.o.weight(linear) + family.o.stop_gradient(family.o.bias(linear)))


def clipped(family: Steps, gradients: dict[str, Array]) -> dict[str, Array]:
    """Shorten all gradients together to the length 1, if they are longer."""
    length = float(sum((family.o.numpy(gradient).astype(np.float64) ** 2).sum() for gradient in gradients.values())) ** 0.5
    return {name: gradient / max(length, 1.0) for name, gradient in gradients.items()}


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "gradients", "what": what, "variant": "bert", "first": (LAST,), **fields})


FAULTS = (
    mutant(
        "norm_variance_detached",
        "The variance of a norm is taken for a constant.",
        first=(BEFORE_LAST, "gradients.taps.layers.1.residual2", "gradients.layers.1.feed_forward.outer.*"),
        change=steps(Norm, deviation=lambda family, layer, variance: family.o.stop_gradient(layer.deviation(variance, layer.epsilon))),
    ),
    mutant(
        "norm_mean_detached",
        "The mean of a norm is taken for a constant.",
        first=(BEFORE_LAST, "gradients.taps.layers.1.residual2", "gradients.layers.1.feed_forward.outer.*"),
        change=steps(Norm, center=lambda family, layer, x: x - family.o.stop_gradient(family.o.mean(x, -1))),
    ),
    mutant(
        "norm_shared_counted_once",
        "Gain and offset of the norm that both sublayers share get the gradient of its first use alone.",
        variant="nndl-paddle",
        first=("gradients.layers.1.norm.*",),
        change=steps(PostNorm, norm=used_once),
    ),
    mutant(
        "embedding_scale_detached",
        "The gradient of token vectors is not multiplied by sqrt(D).",
        variant="nndl-paddle",
        first=(TOKENS,),
        change=steps(TokenVectors, scale=lambda family, layer, vectors: family.o.value_of(vectors * layer.scale, vectors)),
    ),
    mutant(
        "padding_row_trained",
        "The row of padding gets a gradient.",
        variant="vanilla-encoder",
        first=(TOKENS,),
        input="padding",
        change=option(token_padding_row=None),
    ),
    mutant(
        "padding_row_of_wrong_id",
        "Row 0 gets no gradient, while padding is id 1.",
        variant="vanilla-encoder",
        first=(TOKENS,),
        input="the id 0 or padding",
        change=option(token_padding_row=0),
    ),
    mutant(
        "padding_row_frozen",
        "The row of padding gets no gradient, where the source trains it.",
        variant="tf1-text-classifier",
        first=(TOKENS,),
        input="padding",
        change=option(token_padding_row=0),
    ),
    mutant(
        "segment_padding_row_trained",
        "Row 0 of the segment table gets a gradient.",
        variant="bert-pytorch",
        first=(SEGMENTS,),
        input="padding",
        change=option(segment_padding_row=None),
    ),
    mutant(
        "embedding_gradient_by_frequency",
        "The gradient of a row is divided by how often its id occurs.",
        first=(TOKENS,),
        input="an id that occurs twice",
        change=steps(TokenVectors, look_up=by_frequency),
    ),
    mutant(
        "embedding_gradient_of_last_alone",
        "Of an id that occurs several times, the last occurrence overwrites the others' gradients.",
        first=(TOKENS,),
        input="an id that occurs twice",
        change=steps(TokenVectors, look_up=last_alone),
    ),
    mutant(
        "position_table_frozen",
        "The learned position table gets no gradient.",
        first=("gradients.embeddings.position.weight",),
        change=steps(
            Embed,
            position=lambda family, layer, real: family.o.stop_gradient(
                family.o.take(family.o.table(layer.position), layer.position_ids(real))
            ),
        ),
    ),
    mutant(
        "residual_detached",
        "No gradient flows through the residual.",
        first=(BEFORE_LAST,),
        change=steps(PostNorm, residual=lambda family, number, x, y: family.o.stop_gradient(x) + y),
    ),
    mutant(
        "attention_weights_detached",
        "No gradient flows through the attention weights.",
        first=("gradients.layers.1.attention.key.*", "gradients.layers.1.attention.query.*"),
        input="more than one token",
        change=steps(Attend, softmax=lambda family, layer, scores, unmasked, visible: family.o.stop_gradient(family.o.softmax(scores, -1))),
    ),
    mutant(
        "softmax_gradient_without_row_term",
        "The softmax is differentiated as if it were an elementwise function.",
        first=("gradients.layers.1.attention.key.*", "gradients.layers.1.attention.query.*"),
        change=steps(Attend, softmax=without_row_term),
    ),
    mutant(
        "encoder_detached",
        "The head alone is trained: no gradient flows into the encoder.",
        first=("gradients.layers.1.norm2.bias",),
        change=steps(Head, pool=lambda family, model, x, ids: family.o.stop_gradient(x[:, 0])),
    ),
    mutant(
        "padding_detached",
        "No gradient flows back into padded rows, though padded queries are computed.",
        first=("gradients.layers.0.norm2.bias",),
        input="a row of padding only",
        change=steps(EncoderLayer, run=padding_detached),
    ),
    mutant(
        "loss_gradient_of_sum",
        "The gradient is that of the sum over samples, while the mean is reported.",
        input="more than one sample",
        change=steps(
            Loss, reduce=lambda family, losses, counted, count: family.o.value_of(family.o.sum(losses) / count, family.o.sum(losses))
        ),
    ),
    mutant(
        "gradients_clipped",
        "Gradients are clipped to norm 1 before they are handed out.",
        input="gradients above norm 1",
        change=steps(Gradients, change=clipped),
    ),
    mutant(
        "gradients_accumulated",
        "Gradients of an earlier step were not reset.",
        change=steps(Gradients, change=lambda family, gradients: {name: gradient * 2.0 for name, gradient in gradients.items()}),
    ),
    mutant(
        "key_bias_without_gradient",
        "The bias of the keys gets no gradient.",
        first=(),
        equivalent={"float64": SHIFT, "float32": SHIFT},
        change=steps(MultiHead, project=key_bias_detached),
    ),
)
