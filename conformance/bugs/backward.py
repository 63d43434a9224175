"""Bugs of the backward pass alone: every value is right, a derivative is not (SPEC GRD-1).

A fault of a step is written at the tap that the step gives: its values stay, and its gradient is that of something else. It
shows in what is differentiated next: the parameters of the step, and whatever came before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.conformance.bugs.bug import REFUSED, Bug, edited
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.operations import Array

HUB = "https://github.com/"
VECTOR = 4
ACTIVATION, WEIGHTS, SCORES = "*.feed_forward.activation", "*.attention.weights", "*.attention.scores"
NORMS = ("embeddings.norm", "*.norm1", "*.norm2", "final_norm")


def shows_in(*names: str) -> tuple[str, ...]:
    """Return the tensors that may rightly be named first: the gradients of these taps, and of parameters whose names have patterns."""
    return tuple(f"gradients.{name}" if "*" in name else f"gradients.taps.{name}" for name in names)


def passed(function: Callable[[Context, Array], Array]) -> Edit:
    """Return the edit that sends the gradient of a tap through a function."""
    return lambda m, y: m.o.with_gradient(y, lambda gradient: function(m, gradient))


def slope(made: Callable[[Context, Array], Array]) -> Edit:
    """Return the edit that takes another slope for an elementwise step, made of what went in."""

    def edit(m: Context, y: Array) -> Array:
        x = m.source()
        factor = m.o.stop_gradient(made(m, x))
        return m.o.value_of(y, x * factor)

    return edit


def instead(made: Callable[[Context, Array], Array]) -> Edit:
    """Return the edit that has the gradient of something else."""
    return lambda m, y: m.o.value_of(y, made(m, y))


# Activations.


def bell(m: Context, x: Array) -> Array:
    """Return the density of the normal distribution."""
    return m.o.exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


def share(m: Context, x: Array) -> Array:
    """Return the distribution function of the normal distribution."""
    return (m.o.erf(x / math.sqrt(2.0)) + 1.0) * 0.5


def one_sided(m: Context, x: Array) -> Array:
    return m.o.where(x > 0.0, x * 0.0 + 1.0, x * 0.0)


def leaky(m: Context, x: Array) -> Array:
    return m.o.where(x > 0.0, x * 0.0 + 1.0, x * 0.0 + 0.01)


def guided(m: Context, y: Array) -> Array:
    """Let positive gradients through alone."""
    return m.o.with_gradient(y, m.o.relu)


# Attention.


def over_queries(m: Context, y: Array) -> Array:
    """Take the sum of the softmax's derivative over queries instead of keys."""
    weights = m.o.stop_gradient(y)

    def back(gradient: Array) -> Array:
        return weights * (gradient - m.o.sum(gradient * weights, 2))

    through = m.o.with_gradient(m.unnormalised, back)
    return m.o.value_of(y, through)


def maximum_differentiated(m: Context, y: Array) -> Array:
    """Differentiate the shift by the largest score, but not the sum."""
    scores = m.unnormalised
    powers = m.o.exp(scores - m.o.max(scores, 3))
    return powers / m.o.stop_gradient(m.o.sum(powers, 3))


def padded_left_out(m: Context, y: Array) -> Array:
    """Let no gradient flow from padded queries."""
    return m.o.where(m.real[:, None, :, None], y, m.o.stop_gradient(y))


def tail_dropped(m: Context, gradient: Array) -> Array:
    width = tuple(gradient.shape)[-1]
    return m.o.where(np.arange(width) < width // VECTOR * VECTOR, gradient, gradient * 0.0)


def first_head_alone(m: Context, gradient: Array) -> Array:
    return m.o.where(m.flags(gradient, 2, 0), gradient, gradient * 0.0)


# Norms.


def without_gain(m: Context, y: Array) -> Array:
    """Send the gradient on as if the gain were 1."""
    x = m.source()
    normed = m.norm(x, gain=lambda gain: gain * 0.0 + 1.0, offset=lambda offset: offset * 0.0)
    return normed + m.o.stop_gradient(normed) * m.weight(f"{m.owner}.weight") + m.weight(f"{m.owner}.bias")


def unbiased(m: Context, y: Array) -> Array:
    """Divide by D - 1 in the derivative."""
    width = tuple(y.shape)[-1]
    return m.norm(
        m.source(), variance=lambda variance: m.o.value_of(variance, variance * (width / (width - 1.0)))
    )


def rows_dropped(m: Context, y: Array) -> Array:
    """Leave the last rows, which do not fill a block of four, out of the gradients of gain and offset."""
    batch, tokens, _ = tuple(y.shape)
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1)
    kept = rows < batch * tokens // VECTOR * VECTOR
    alone = m.norm(m.source(), gain=m.o.stop_gradient, offset=m.o.stop_gradient)
    return m.o.where(kept, y, alone)


def counted_twice(m: Context, y: Array) -> Array:
    """Add the gradients of the second use of a shared norm twice."""
    normed = m.norm(
        m.source(),
        gain=lambda gain: gain + (gain - m.o.stop_gradient(gain)),
        offset=lambda offset: offset + (offset - m.o.stop_gradient(offset)),
    )
    return normed


def offset_of_mean(m: Context, y: Array) -> Array:
    """Average the gradient of the offset over rows instead of summing it."""
    batch, tokens, _ = tuple(y.shape)
    offset = m.weight(f"{m.owner}.bias")
    return m.norm(m.source(), offset=m.o.stop_gradient) + (offset - m.o.stop_gradient(offset)) / float(
        batch * tokens
    )


# Residuals and linear layers.


def bias_twice(m: Context, y: Array) -> Array:
    bias = m.weight(f"{m.scope}.outer.bias")
    return y + (bias - m.o.stop_gradient(bias))


def residual_halved(m: Context, y: Array) -> Array:
    return m.source() * 0.5 + m.source("result")


def residual_twice(m: Context, y: Array) -> Array:
    return m.source() * 2.0 + m.source("result")


def embedding_of_unique(m: Context, y: Array) -> Array:
    """Count the first occurrence of an id in each sample alone."""
    ids = m.ids
    first = np.array([[value not in row[:place] for place, value in enumerate(row)] for row in ids.tolist()])
    return m.o.where(first[..., None], y, m.o.stop_gradient(y))


def first_position_stopped(m: Context, y: Array) -> Array:
    return m.o.where(m.flags(y, 1, 0), m.o.stop_gradient(y), y)


def last_sample_stopped(m: Context, y: Array) -> Array:
    return m.o.where(m.flags(y, 0, -1), m.o.stop_gradient(y), y)


def fault(
    name: str,
    what: str,
    edit: Edit,
    taps: str | tuple[str, ...],
    clause: str,
    first: tuple[str, ...],
    **fields: Any,
) -> Bug:
    patterns = (taps,) if isinstance(taps, str) else taps
    return Bug(
        **{
            "name": name,
            "group": "backward",
            "what": what,
            "variant": "bert",
            "change": edited(edit, *patterns),
            "first": first,
            "cause": name,
            "tried": True,
            "clause": clause,
            **fields,
        }
    )


OF_INNER = shows_in("layers.1.feed_forward.inner", "layers.1.feed_forward.inner.*")
OF_POOLER = shows_in("pooler.dense", "pooler.*")
OF_SCORES = shows_in(
    "layers.1.attention.masked_scores",
    "layers.1.attention.scores",
    "layers.1.attention.key",
    "layers.1.attention.query",
    "layers.1.attention.key.*",
    "layers.1.attention.query.*",
)
OF_INPUT = shows_in("layers.1.residual2", "layers.1.feed_forward.outer", "layers.1.feed_forward.outer.*")

BUGS = (
    fault("gelu_gradient_by_tanh", "GELU with erf is differentiated as its approximation.", instead(lambda m, y: m.activation(m.source(), "gelu_tanh")), ACTIVATION, "FFN-2", OF_INNER, cause="activation", source=f"{HUB}flagos-ai/FlagGems/pull/159"),
    fault("gelu_gradient_without_density", "The derivative of GELU lacks its second term.", slope(share), ACTIVATION, "FFN-2", OF_INNER, cause="activation_slope", source=f"{HUB}flagos-ai/FlagGems/pull/159"),
    fault("gelu_gradient_halved_density", "The second term of GELU's derivative has half its size.", slope(lambda m, x: share(m, x) + x * bell(m, x) * 0.5), ACTIVATION, "FFN-2", OF_INNER, source=f"{HUB}huggingface/candle/pull/1160"),
    fault("gelu_gradient_of_relu", "GELU is differentiated as a ReLU.", slope(one_sided), ACTIVATION, "FFN-2", OF_INNER, cause="activation or activation_slope", source=f"{HUB}karpathy/llm.c/pull/307"),
    fault("relu_gradient_guided", "The ReLU lets positive gradients through alone.", guided, ACTIVATION, "FFN-2", OF_INNER, variant="vanilla-encoder", source=f"{HUB}jax-ml/jax/pull/2342"),
    fault("relu_gradient_leaky", "The ReLU lets a hundredth of the gradient through where it is closed.", slope(leaky), ACTIVATION, "FFN-2", OF_INNER, variant="vanilla-encoder", cause="activation_slope", source=f"{HUB}jax-ml/jax/issues/37821"),
    fault("tanh_gradient_sign", "The derivative of tanh is 1 + y² instead of 1 - y².", slope(lambda m, x: m.o.tanh(x) * m.o.tanh(x) + 1.0), "pooler.output", "HED-2", OF_POOLER, source=f"{HUB}gy910210/neural-network-from-scratch/issues/2"),
    fault("tanh_gradient_without_square", "The derivative of tanh is 1 - |y| instead of 1 - y².", slope(lambda m, x: 1.0 - (m.o.relu(m.o.tanh(x)) + m.o.relu(-m.o.tanh(x)))), "pooler.output", "HED-2", OF_POOLER, cause="tanh_slope", source=f"{HUB}microsoft/knossos-ksc/pull/505"),
    fault("tanh_gradient_of_rounded", "The derivative of tanh is taken of a value in bfloat16.", slope(lambda m, x: 1.0 - m.o.rounded(m.o.tanh(x), "bfloat16") * m.o.rounded(m.o.tanh(x), "bfloat16")), "pooler.output", "HED-2", OF_POOLER, source=f"{HUB}tenstorrent/tt-metal/issues/55349"),
    fault("softmax_gradient_over_queries", "The sum in the softmax's derivative runs over queries.", over_queries, WEIGHTS, "ATT-5", OF_SCORES, cause="softmax_slope", source=f"{HUB}pocketpy/cTensor/pull/31"),
    fault("softmax_gradient_passed", "Gradients pass the softmax as they are.", instead(lambda m, y: m.unnormalised), WEIGHTS, "ATT-5", OF_SCORES, cause="softmax_in_gradient", source=f"{HUB}pjreddie/darknet/pull/96"),
    fault("softmax_gradient_without_sum", "The softmax is differentiated with its sum for a constant.", instead(maximum_differentiated), WEIGHTS, "ATT-5", OF_SCORES, source=f"{HUB}PaddlePaddle/Paddle/pull/57905"),
    fault("softmax_gradient_of_real_queries", "No gradient flows through the softmax of padded queries.", padded_left_out, WEIGHTS, "ATT-5", OF_SCORES, input="padding", cause="softmax_gradient_of_real_queries or detached_padding", source=f"{HUB}XunhaoLai/native-sparse-attention-triton/issues/27"),
    fault("query_gradient_unscaled", "The gradient of the query is not multiplied by the scale of the scores.", passed(lambda m, g: g * math.sqrt(m.config.head_dim)), "*.attention.query", "ATT-4", shows_in("layers.1.attention.query", "layers.1.attention.query.*"), cause="score_scale_in_gradient", source=f"{HUB}NVIDIA/TransformerEngine/issues/3216"),
    fault("key_gradient_scaled_twice", "The gradient of the key is multiplied by the scale of the scores twice.", passed(lambda m, g: g / math.sqrt(m.config.head_dim)), "*.attention.key", "ATT-4", shows_in("layers.1.attention.key", "layers.1.attention.key.*"), cause="score_scale_in_gradient", source=f"{HUB}Dao-AILab/flash-attention/issues/498"),
    fault("value_gradient_tail_dropped", "The gradient of the value is zero in features that a vector of four does not fill.", passed(tail_dropped), "*.attention.value", "ATT-6", shows_in("layers.1.attention.value", "layers.1.attention.value.*"), source=f"{HUB}Dao-AILab/flash-attention/issues/2552"),
    fault("query_gradient_last_row_dropped", "The last query has no gradient.", lambda m, y: m.o.with_gradient(y, lambda g: m.o.where(m.flags(g, 1, -1), g * 0.0, g)), "*.attention.query", "ATT-4", shows_in("layers.1.attention.query", "layers.1.attention.query.*", "layers.0.attention.query", "layers.0.attention.query.*"), input="a last token that others depend on", source=f"{HUB}Dao-AILab/flash-attention/pull/2896"),
    fault("key_gradient_of_first_head", "The key has a gradient in the first head alone.", passed(first_head_alone), "*.attention.key", "ATT-2", shows_in("layers.1.attention.key", "layers.1.attention.key.*"), source=f"{HUB}fla-org/flash-linear-attention/pull/384"),
    fault("value_detached", "No gradient flows through the value.", lambda m, y: m.o.stop_gradient(y), "*.attention.value", "ATT-6", (*shows_in("layers.1.attention.value", "layers.1.attention.value.*"), REFUSED), cause="detached_value or no_gradient", source=f"{HUB}Dao-AILab/flash-attention/issues/2541"),
    fault("norm_gradient_without_gain", "The gradient of a norm's input lacks the gain.", instead(without_gain), NORMS, "NRM-2", OF_INPUT, source=f"{HUB}flagos-ai/FlagGems/pull/59"),
    fault("norm_gradient_unbiased", "The derivative of the variance divides by D - 1.", unbiased, NORMS, "NRM-4", OF_INPUT, source=f"{HUB}pytorch/pytorch/issues/141425"),
    fault("norm_gradient_of_some_rows", "The last rows, which do not fill a block, do not count in the gradients of gain and offset.", rows_dropped, NORMS, "NRM-2", shows_in("layers.*.norm*", "embeddings.norm.*"), source=f"{HUB}karpathy/llm.c/pull/408"),
    fault("norm_gradient_of_mean_offset", "The gradient of a norm's offset is a mean over rows.", offset_of_mean, NORMS, "NRM-2", shows_in("layers.1.norm2.b*"), source=f"{HUB}state-spaces/mamba/pull/1023"),
    fault("norm_shared_counted_twice", "The second use of a shared norm counts twice in the gradients of its gain and offset.", counted_twice, "*.norm2", "NRM-5", shows_in("layers.1.norm.*"), variant="nndl-paddle", source=f"{HUB}NVIDIA/TransformerEngine/issues/3437"),
    fault("residual_gradient_halved", "Half of the gradient flows through the second residual.", instead(residual_halved), "*.residual2", "RES-1", shows_in("layers.1.norm1", "layers.1.norm1.*"), source=f"{HUB}state-spaces/mamba/pull/1023"),
    fault("residual_gradient_twice", "The gradient of the first residual is added twice.", instead(residual_twice), "*.residual1", "RES-1", shows_in("layers.0.norm2", "layers.0.norm2.*"), source=f"{HUB}NVIDIA/Megatron-LM/pull/7582"),
    fault("residual_second_detached", "No gradient flows through the second residual.", instead(lambda m, y: m.o.stop_gradient(m.source()) + m.source("result")), "*.residual2", "RES-1", shows_in("layers.1.norm1", "layers.1.norm1.*"), cause="detached_residual", source=f"{HUB}aws-neuron/nki-samples/pull/81"),
    fault("bias_gradient_twice", "The gradient of a bias is added once for each of two devices.", bias_twice, "*.feed_forward.outer", "FFN-1", shows_in("layers.1.feed_forward.outer.b*"), cause="gradient_accumulated", source=f"{HUB}EleutherAI/gpt-neox/issues/615"),
    fault("embedding_gradient_of_first_use", "An id that a sample has twice counts once.", embedding_of_unique, "embeddings.token", "GRD-1", shows_in("embeddings.token", "embeddings.token.*"), input="an id that a sample has twice", source=f"{HUB}PaddlePaddle/Paddle/pull/9120"),
    fault("embedding_gradient_without_first", "The first token's embedding has no gradient.", first_position_stopped, "embeddings.sum", "GRD-1", shows_in("embeddings.token", "embeddings.segment", "embeddings.position", "embeddings.*.weight"), source=f"{HUB}NVIDIA/TransformerEngine/pull/545"),
    fault("embedding_gradient_of_last_lost", "The last sample has no gradient in the embeddings.", last_sample_stopped, "embeddings.sum", "GRD-1", shows_in("embeddings.token", "embeddings.segment", "embeddings.position", "embeddings.*.weight"), source=f"{HUB}NVIDIA/TransformerEngine/issues/3216"),
    fault("loss_scale_kept", "Gradients keep the factor 1024 that they were scaled by.", passed(lambda m, g: g * 1024.0), "loss", "GRD-1", ("gradients.classifier.*", "gradients.taps.loss", "gradients.taps.losses"), source=f"{HUB}NVIDIA/Megatron-LM/issues/1446"),
)  # fmt: skip
