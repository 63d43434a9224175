"""Bugs in the precision of one operation (SPEC PRC-2)."""

from __future__ import annotations

from concord.conformance.bugs.activations import gelu_by
from concord.conformance.bugs.bug import Change, group, weight
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.gradients import passed
from concord.conformance.bugs.norms import normed
from concord.conformance.bugs.operations import Array
from concord.spec.precision import precision

WEIGHTS, SCORES, CONTEXT = "*attention.weights", "*attention.scores", "*attention.context"


def stored(number_format: str) -> Edit:
    """Return the edit that keeps a tap in a shorter format."""
    return lambda m, y: m.o.round_to(y, number_format)


def variance_in(number_format: str) -> Edit:
    return normed(variance=lambda m, variance: m.o.round_to(variance, number_format))


def deviation_by_one_step(m: Context, variance: Array) -> Array:
    """Refine a reciprocal of half precision by one step of Newton's method."""
    rough = m.o.round_to(1.0 / m.deviation(variance), "bfloat16")
    squared = m.deviation(variance) * m.deviation(variance)
    return 1.0 / (rough * (1.5 - squared * rough * rough * 0.5))


def linear_in_tf32(name: str) -> Edit:
    """Return the edit that rounds the factors of a linear layer's product to 11 bits."""

    def edit(m: Context, y: Array) -> Array:
        layer = f"{m.scope}.{name}" if m.scope else name
        product = m.o.round_to(m.source(), "tf32") @ m.o.round_to(m.weight(f"{layer}.weight"), "tf32")
        return m.o.reshape(m.biased(layer, product), tuple(y.shape))

    return edit


def in_last_layer(edit: Edit) -> Edit:
    return lambda m, y: edit(m, y) if m.layer == m.config.num_layers - 1 else y


def reciprocal_rounded(m: Context, y: Array) -> Array:
    """Multiply by the reciprocal of the sum, taken in half precision."""
    return m.softmax(total=lambda total: 1.0 / m.o.round_to(1.0 / total, "float16"))


def through(number_format: str, tap: str) -> Change:
    """Return the change that sends the weight of a tap through a shorter format."""
    return weight(f"{tap}.weight", precision(number_format).round)


def exponential_by_parts(m: Context, y: Array) -> Array:
    """Take 2^f for a parabola between whole powers of two, with an error of 2e-3, by squaring ten times."""

    def exponential(x: Array) -> Array:
        root = m.o.where(x < -80.0, x * 0.0 - 80.0, x) / 1024.0
        power = root + root * root * 0.4 + 1.0
        for _ in range(10):
            power = power * power
        return power

    return m.softmax(exponential)


bug = group("rounding", clause="PRC-2").bug

BUGS = (
    bug(
        "softmax_powers_in_bfloat16",
        "The powers of the softmax are rounded to bfloat16 before they are summed.",
        lambda m, y: m.softmax(powers=lambda powers: m.o.round_to(powers, "bfloat16")),
        WEIGHTS,
        source="tinygrad/tinygrad/pull/12280",
    ),
    bug(
        "softmax_of_float16_scores",
        "The softmax is of scores in float16.",
        lambda m, y: m.o.softmax(m.o.round_to(m.unnormalised, "float16"), 3),
        WEIGHTS,
        source="pytorch/pytorch/issues/123911",
    ),
    bug(
        "softmax_reciprocal_in_float16",
        "The softmax multiplies by a reciprocal in float16.",
        reciprocal_rounded,
        WEIGHTS,
        source="tenstorrent/tt-metal/issues/26040",
    ),
    bug(
        "softmax_stored_in_bfloat16_last",
        "The last layer keeps its weights in bfloat16.",
        in_last_layer(stored("bfloat16")),
        WEIGHTS,
        first=("layers.1.attention.weights",),
        cause="stored_in_bfloat16",
        input="two layers",
        source="huggingface/transformers/issues/27341",
    ),
    bug(
        "softmax_exponential_approximate",
        "The exponential of the softmax is approximated to 2e-3.",
        exponential_by_parts,
        WEIGHTS,
        source="sonos/tract/pull/2677",
    ),
    bug(
        "norm_variance_in_float16",
        "The variance of a norm is kept in float16.",
        variance_in("float16"),
        "embeddings.norm",
        source="deepspeedai/DeepSpeed/issues/581",
    ),
    bug(
        "norm_variance_in_bfloat16",
        "The variance of a norm is kept in bfloat16.",
        variance_in("bfloat16"),
        "embeddings.norm",
        source="flagos-ai/FlagGems/pull/221",
    ),
    bug(
        "norm_mean_in_float16",
        "The mean of a norm is kept in float16.",
        normed(center=lambda m, x, mean: x - m.o.round_to(mean, "float16")),
        "embeddings.norm",
        source="flagos-ai/FlagGems/pull/221",
    ),
    bug(
        "norm_deviation_by_one_step",
        "The deviation is refined once from bfloat16.",
        normed(deviation=deviation_by_one_step),
        "embeddings.norm",
        source="Xilinx/finn/pull/1667",
    ),
    bug(
        "query_in_tf32",
        "The query is a product in TF32.",
        linear_in_tf32("query"),
        "*attention.query",
        cause="tf32_products",
        source="pytorch/pytorch/issues/53635",
    ),
    bug(
        "outer_in_tf32_last",
        "The last layer's second linear layer is a product in TF32.",
        in_last_layer(linear_in_tf32("outer")),
        "*.feed_forward.outer",
        first=("layers.1.feed_forward.outer",),
        cause="tf32_products",
        source="pytorch/pytorch/issues/79270",
    ),
    bug(
        "context_in_tf32",
        "The weighted sum of values is a product in TF32.",
        lambda m, y: m.context(m.o.round_to(m.used_weights, "tf32"), m.o.round_to(m.beside("value"), "tf32")),
        CONTEXT,
        cause="tf32_products",
        source="tensorflow/tensorflow/issues/127346",
    ),
    bug(
        "weights_in_bfloat16_for_context",
        "Weights are rounded to bfloat16 for the sum of values alone.",
        lambda m, y: m.context(m.o.round_to(m.used_weights, "bfloat16")),
        CONTEXT,
        source="pytorch/pytorch/pull/128922",
    ),
    bug(
        "scores_stored_in_float16",
        "Scores are kept in float16.",
        stored("float16"),
        SCORES,
        cause="stored_in_float16",
        source="pytorch/pytorch/pull/188247",
    ),
    bug(
        "embeddings_stored_in_float16",
        "The sum of the embeddings is kept in float16.",
        stored("float16"),
        "embeddings.sum",
        cause="stored_in_float16",
        source="pytorch/xla/issues/3658",
    ),
    bug(
        "positions_through_bfloat16",
        "The position table was stored in bfloat16.",
        through("bfloat16", "embeddings.position"),
        variant="vanilla-encoder",
        first=("embeddings.position",),
        cause="weight_in_bfloat16 or stored_in_bfloat16",
        source="huggingface/transformers/issues/15292",
    ),
    bug(
        "gelu_erf_in_bfloat16",
        "erf is rounded to bfloat16.",
        gelu_by(lambda m, z: m.o.round_to(m.o.erf(z), "bfloat16")),
        "*.feed_forward.activation",
        source="pytorch/pytorch/pull/186286",
    ),
    bug(
        "losses_stored_in_float16",
        "Losses are kept in float16.",
        stored("float16"),
        "losses",
        cause="stored_in_float16",
        source="huggingface/transformers/issues/48459",
    ),
    bug(
        "gradient_of_layer_in_bfloat16",
        "The gradient between the layers is rounded to bfloat16.",
        passed(lambda m, gradient: m.o.rounded(gradient, "bfloat16")),
        "layers.0.norm2",
        first=("gradients.taps.layers.0.norm2", "gradients.layers.0.norm2.*"),
        source="NVIDIA/TransformerEngine/pull/545",
    ),
)
