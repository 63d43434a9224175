"""Bugs in pooling, pooler and classifier (SPEC HED-1 to HED-3)."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.faults.fault import REFUSED, Fault, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Head
from conformance.mutants.surgery import Steps


def real_tokens(family: Steps, model: Any, x: Array, ids: Array) -> tuple[Array, Any]:
    """Return which tokens are real, (B, T, 1), and how many of each sample, (B, 1), at least 1."""
    real = family.o.numpy(ids) != model.pad_id
    return family.o.constant(real[..., None]), family.o.constant(np.maximum(real.sum(axis=1), 1)[:, None], x)


def mean_of_real(family: Steps, model: Any, x: Array, ids: Array) -> Array:
    """Average over real tokens."""
    real, count = real_tokens(family, model, x, ids)
    return family.o.sum(family.o.where(real, x, 0.0), 1)[:, 0] / count


def last_real(family: Steps, model: Any, x: Array, ids: Array) -> Array:
    """Take the last real token."""
    real = family.o.numpy(ids) != model.pad_id
    tokens = real.shape[1]
    last = np.where(real.any(axis=1), tokens - 1 - np.argmax(real[:, ::-1], axis=1), 0)
    chosen = family.o.constant((np.arange(tokens) == last[:, None])[..., None])
    return family.o.sum(family.o.where(chosen, x, 0.0), 1)[:, 0]


def column_major(family: Steps, model: Any, x: Array, ids: Array) -> Array:
    """Flatten (B, D, T), as a framework with channels first would."""
    batch, tokens, width = tuple(x.shape)
    return family.o.reshape(family.o.transpose(x, (0, 2, 1)), (batch, tokens * width))


def padding_zeroed(family: Steps, model: Any, x: Array, ids: Array) -> Array:
    """Zero padded rows before flattening."""
    batch, tokens, width = tuple(x.shape)
    real, _ = real_tokens(family, model, x, ids)
    return family.o.reshape(family.o.where(real, x, 0.0), (batch, tokens * width))


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "pooling", "what": what, "variant": "bert", "first": ("pooling",), **fields})


FAULTS = (
    mutant(
        "pooling_last_token",
        "The last token is pooled, not the first.",
        input="more than one token",
        change=steps(Head, pool=lambda family, model, x, ids: x[:, -1]),
    ),
    mutant(
        "pooling_last_real_token",
        "The last real token is pooled, not the first.",
        input="more than one token",
        change=steps(Head, pool=last_real),
    ),
    mutant(
        "pooling_second_token",
        "The token after the first is pooled.",
        input="more than one token",
        change=steps(Head, pool=lambda family, model, x, ids: x[:, min(1, tuple(x.shape)[1] - 1)]),
    ),
    mutant(
        "pooling_mean",
        "All tokens are averaged, padding included.",
        input="more than one token",
        change=steps(Head, pool=lambda family, model, x, ids: family.o.mean(x, 1)[:, 0]),
    ),
    mutant("pooling_mean_of_real_tokens", "Real tokens are averaged.", input="more than one token", change=steps(Head, pool=mean_of_real)),
    mutant(
        "pooling_maximum",
        "The largest number of each feature is pooled.",
        input="more than one token",
        change=steps(Head, pool=lambda family, model, x, ids: family.o.max(x, 1)[:, 0]),
    ),
    mutant(
        "pooling_axes_swapped",
        "The first sample is pooled, not the first token: batch and tokens are mixed up.",
        first=("pooling", REFUSED),
        input="more than one token",
        change=steps(Head, pool=lambda family, model, x, ids: x[0]),
    ),
    mutant(
        "pooling_squeezed",
        "Axes of size 1 are dropped, the batch axis with them if there is one sample.",
        scenario="single",
        first=("pooling", REFUSED),
        input="a batch of one sample",
        alone=True,
        change=steps(Head, pool=lambda family, model, x, ids: family.o.squeeze(x[:, :1])),
    ),
    mutant(
        "flatten_column_major",
        "Features are flattened before tokens.",
        variant="tf1-text-classifier",
        change=steps(Head, pool=column_major),
    ),
    mutant(
        "flatten_padding_zeroed",
        "Padded rows are zeroed before flattening.",
        variant="tf1-text-classifier",
        input="padding",
        change=steps(Head, pool=padding_zeroed),
    ),
    mutant(
        "pooler_skipped",
        "The pooler's linear layer is left out.",
        first=("pooler.dense",),
        change=steps(Head, dense=lambda family, model, pooled: pooled),
    ),
    mutant(
        "pooler_tanh_missing",
        "No tanh follows the pooler's linear layer.",
        first=("pooler.output",),
        change=steps(Head, activate=lambda family, dense: dense),
    ),
    mutant(
        "pooler_relu_for_tanh",
        "A ReLU follows the pooler's linear layer.",
        first=("pooler.output",),
        change=steps(Head, activate=lambda family, dense: family.o.relu(dense)),
    ),
    mutant(
        "logits_softmaxed",
        "The model returns probabilities, not logits.",
        first=("logits",),
        change=steps(Head, classify=lambda family, model, pooled: family.o.softmax(model.classifier(pooled), -1)),
    ),
)
