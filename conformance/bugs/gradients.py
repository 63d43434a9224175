"""Bugs that leave every value as it is and show in gradients alone (SPEC GRD-1 to GRD-5, EMB-4, EMB-5).

Such a bug of a step is written at the tap that the step gives: its values stay, and its gradient is that of
something else. It shows in what is differentiated next: the parameters of the step, and whatever came before
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Changes, Gradients, option, skipped
from concord.conformance.bugs.context import Context, Edit, Flags
from concord.conformance.bugs.norms import normed, one, zero
from concord.conformance.bugs.operations import Array
from concord.conformance.bugs.pooling import rightly
from concord.spec.arrays import Ids

VECTOR = 4
ROOT = math.sqrt(2 / math.pi)


def passed(function: Edit) -> Edit:
    """Return the edit that sends the gradient of a tap through a function."""
    return lambda m, y: m.with_gradient(y, lambda gradient: function(m, gradient))


def times(factor: float = 1.0, **powers: float) -> Edit:
    """Return the edit that multiplies the gradient of a tap, by powers of sizes too."""
    return passed(lambda m, gradient: gradient * (factor * m.size(**powers)))


def slope(made: Edit) -> Edit:
    """Return the edit that takes another slope for an elementwise step, made of what went in."""

    def edit(m: Context, y: Array) -> Array:
        x = m.source()
        return m.value_of(y, x * m.stop_gradient(made(m, x)))

    return edit


def slope_at_result(made: Edit) -> Edit:
    """Return the same, made of what came out."""
    return lambda m, y: m.value_of(y, m.source() * m.stop_gradient(made(m, y)))


def instead(made: Edit) -> Edit:
    """Return the edit that has the gradient of something else."""
    return lambda m, y: m.value_of(y, made(m, y))


as_it_is = instead(skipped)
"""Gradients pass the step as they are."""


def detached(m: Context, y: Array) -> Array:
    return m.stop_gradient(y)


def stopped(flags: Callable[[Context, Array], Flags]) -> Edit:
    """Return the edit that lets no gradient flow where a flag is True."""
    return lambda m, y: m.where(flags(m, y), m.stop_gradient(y), y)


# Tables.


def weighted(share: Callable[[Ids], NDArray[np.floating]]) -> Edit:
    """Return the edit that multiplies the gradient of each row's use by a share, (B, T), made of the rows."""

    def edit(m: Context, y: Array) -> Array:
        table = m.tap.rpartition(".")[2]
        given = "segment_ids" if table == "segment" else "input_ids"
        rows = m.rows if table == "position" else m.batch.required(given)
        return m.value_of(y, y * m.constant(share(rows)[..., None], y))

    return edit


def by_frequency(ids: Ids) -> NDArray[np.floating]:
    """Divide the gradient of a row by how often its id occurs."""
    return np.asarray(1 / np.bincount(ids.reshape(-1))[ids], np.float64)


def last_alone(ids: Ids) -> NDArray[np.floating]:
    """Assign the gradient of a row where it should be added: the last occurrence of an id wins."""
    flat = ids.reshape(-1).tolist()
    last = {value: place for place, value in enumerate(flat)}
    return np.array([last[value] == place for place, value in enumerate(flat)], np.float64).reshape(ids.shape)


def later_uses(m: Context, y: Array) -> Flags:
    """Return where an id stands that its sample has before."""
    used = [[value in row[:place] for place, value in enumerate(row)] for row in m.ids.tolist()]
    return np.array(used)[..., None]


def of_padding(m: Context, y: Array) -> Flags:
    return ~m.real[..., None]


def padding_detached(last_too: bool) -> Edit:
    """Let no gradient flow back into padded rows of what enters a layer, or leaves the last one."""

    def edit(m: Context, y: Array) -> Array:
        end = "residual2" if m.config.norm_placement == "pre" else "norm2"
        if m.scope != "embeddings" and not m.tap.endswith(end):
            return y
        last = m.tap == f"layers.{m.config.num_layers - 1}.{end}"
        return stopped(of_padding)(m, y) if last_too or not last else y

    return edit


def of_loss(share: float) -> Edit:
    """Return logits whose gradient has some more of the labels, less what all classes have alike."""

    def edit(m: Context, y: Array) -> Array:
        labels = np.asarray(m.labels[:, None] == np.arange(m.config.num_classes), np.float64)
        more = (share * (labels - 1 / m.config.num_classes) if share < 1 else labels) / len(labels)
        return m.with_gradient(y, lambda gradient: gradient + m.constant(more, y))

    return edit


def clipped(gradients: Gradients) -> Gradients:
    """Shorten all gradients together to the length 1, if they are longer."""
    length = float(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())) ** 0.5
    return {
        name: (gradient / max(length, 1.0)).astype(gradient.dtype) for name, gradient in gradients.items()
    }


def gradients_accumulated(gradients: Gradients) -> Gradients:
    """Add them to the same of another run."""
    return {name: gradient * 2 for name, gradient in gradients.items()}


# Activations.


def bell(m: Context, x: Array) -> Array:
    """Return the density of the normal distribution."""
    return m.exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


def share(m: Context, x: Array) -> Array:
    """Return the distribution function of the normal distribution."""
    return (m.erf(x / math.sqrt(2.0)) + 1.0) * 0.5


def square_slope_at_result(m: Context, x: Array) -> Array:
    return m.tanh(x) * m.tanh(x)


def one_sided(below: float) -> Edit:
    """Return the slope of a ReLU that lets some of what is negative through."""
    return slope(lambda m, x: m.where(x > 0.0, x * 0.0 + 1.0, x * 0.0 + below))


def of_gate(steepness: float) -> Edit:
    """Return the slope of x sigmoid(steepness x)."""

    def made(m: Context, x: Array) -> Array:
        gate = m.sigmoid(x * steepness)
        return gate + x * gate * (1.0 - gate) * steepness

    return slope(made)


def of_tanh_form(m: Context, x: Array, inner: float = 1.0) -> Array:
    """Return the slope of GELU with tanh, the term of which is multiplied."""
    tangent = m.tanh((x + x * x * x * 0.044715) * ROOT)
    steep = (x * x * (3 * 0.044715) + 1.0) * (inner * ROOT)
    return (tangent + 1.0) * 0.5 + x * 0.5 * (1.0 - tangent * tangent) * steep


# Attention.


def of_softmax(pull: Callable[[Context, Array, Array], Array]) -> Edit:
    """Return the softmax whose derivative is made of the gradient and the weights."""

    def edit(m: Context, y: Array) -> Array:
        weights = m.stop_gradient(y)
        return m.value_of(y, m.with_gradient(m.unnormalised, lambda gradient: pull(m, gradient, weights)))

    return edit


def taken_off(reduction: str = "", factor: float = 1.0, axis: int = 3, weighted: bool = True) -> Edit:
    """Return the softmax whose derivative takes something else off than the sum over the row.

    Args:
        reduction: of gradients, times their weights where these count; empty: each by itself.
    """

    def pull(m: Context, gradient: Array, weights: Array) -> Array:
        if not reduction:
            return gradient * weights * (1.0 - weights)
        inner = getattr(m, reduction)(gradient * weights if weighted else gradient, axis)
        return weights * (gradient - inner * factor)

    return of_softmax(pull)


def softmax_gradient_without_row_term(m: Context, y: Array) -> Array:
    """Differentiate the softmax as if it were an elementwise function: p g, without the term for the row."""
    weights, scores = m.stop_gradient(y), m.unnormalised
    return weights + weights * (scores - m.stop_gradient(scores))


def maximum_differentiated(m: Context, y: Array) -> Array:
    """Differentiate the shift by the largest score, but not the sum."""
    scores = m.unnormalised
    powers = m.exp(scores - m.max(scores, 3))
    return powers / m.stop_gradient(m.sum(powers, 3))


def tail(m: Context, y: Array) -> Flags:
    """Return the features that a vector of four does not fill."""
    width = tuple(y.shape)[-1]
    return np.asarray(np.arange(width) >= width // VECTOR * VECTOR)


# Norms.


def mean_stopped(m: Context, x: Array, mean: Array) -> Array:
    return x - m.stop_gradient(mean)


def deviation_stopped(m: Context, variance: Array) -> Array:
    return m.stop_gradient(m.deviation(variance))


def twice(m: Context, x: Array) -> Array:
    """Return a number whose gradient counts twice."""
    return x + (x - m.stop_gradient(x))


def norm_slope(pull: Callable[[Context, Array, Array, Array], Array]) -> Edit:
    """Return the norm whose derivative is made of the gained gradient, the normed input and the deviation."""

    def edit(m: Context, y: Array) -> Array:
        x, gain, offset = m.source(), m.weight(f"{m.owner}.weight"), m.weight(f"{m.owner}.bias")
        row, deviation = (m.stop_gradient(value) for value in m.standardised(x))
        through = m.with_gradient(x, lambda gradient: pull(m, gradient, row, deviation))
        return m.value_of(y, through * m.stop_gradient(gain) + row * gain + offset)

    return edit


def closed_form(variance: float = 1.0, deviation: int = 1, mean: str = "mean") -> Edit:
    """Return the norm whose derivative has the term of the variance so often, is divided by a power of the
    deviation, and takes means, or sums for them.
    """

    def pull(m: Context, gradient: Array, row: Array, root: Array) -> Array:
        over = getattr(m, mean)
        slope = gradient - over(gradient, -1) - row * over(gradient * row, -1) * variance
        for _ in range(deviation):
            slope = slope / root
        return slope

    return norm_slope(pull)


def without_gain(m: Context, y: Array) -> Array:
    """Send the gradient on as if the gain were 1."""
    row = normed(gain=one, offset=zero)(m, y)
    return row + m.stop_gradient(row) * m.weight(f"{m.owner}.weight") + m.weight(f"{m.owner}.bias")


def unbiased(m: Context, variance: Array) -> Array:
    """Divide by D - 1 in the derivative."""
    return m.value_of(variance, variance * (m.config.d_model / (m.config.d_model - 1.0)))


def norm_gradient_of_some_rows(m: Context, y: Array) -> Array:
    """Leave the last rows, which do not fill a block of four, out of the gradients of gain and offset."""
    batch, tokens, _ = tuple(y.shape)
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1)
    alone = m.norm(m.source(), gain=m.stop_gradient, offset=m.stop_gradient)
    return m.where(rows < batch * tokens // VECTOR * VECTOR, y, alone)


def norm_gradient_of_mean_offset(m: Context, y: Array) -> Array:
    """Average the gradient of the offset over rows instead of summing it."""
    batch, tokens, _ = tuple(y.shape)
    offset = m.weight(f"{m.owner}.bias")
    return m.norm(m.source(), offset=m.stop_gradient) + (offset - m.stop_gradient(offset)) / float(
        batch * tokens
    )


# Residuals and linear layers.


def residual_detached(m: Context, y: Array) -> Array:
    return m.stop_gradient(m.source()) + m.source("result")


def bias_gradient_twice(m: Context, y: Array) -> Array:
    bias = m.weight(f"{m.scope}.outer.bias")
    return y + (bias - m.stop_gradient(bias))


EDITS: Changes = {
    "norm_variance_detached": normed(deviation=deviation_stopped),
    "norm_mean_detached": normed(center=mean_stopped),
    "detached_statistics": normed(center=mean_stopped, deviation=deviation_stopped),
    "norm_shared_counted_once": normed(gain=detached, offset=detached),
    "padding_row_trained": option(token_padding_row=None),
    "padding_rows_detached": stopped(of_padding),
    "segment_padding_row_trained": option(segment_padding_row=None),
    "position_padding_row_trained": option(position_padding_row=None),
    "embedding_gradient_by_frequency": weighted(by_frequency),
    "embedding_gradient_of_last_alone": weighted(last_alone),
    "gradient_of_first_use": weighted(lambda rows: last_alone(rows[::-1, ::-1])[::-1, ::-1]),
    "detached_residual": instead(lambda m, y: m.source("result")),
    "query_mask_in_gradient": instead(lambda m, y: m.beside("weights")),
    "activation_slope": {
        "the quick GELU, x sigmoid(1.702 x)": of_gate(1.702),
        "x sigmoid(x)": of_gate(1.0),
        "the GELU without the term of its tanh": slope(lambda m, x: of_tanh_form(m, x, 0.0)),
        "the GELU whose second term lacks x": slope(lambda m, x: share(m, x) + bell(m, x)),
        "a logistic function, taken for it": slope(lambda m, x: m.sigmoid(x)),
        "a ReLU that lets 0.1 through": one_sided(0.1),
        "a ReLU that lets 0.2 through": one_sided(0.2),
        "the GELU taken at the result instead of what went in": slope_at_result(
            lambda m, y: share(m, y) + y * bell(m, y)
        ),
        "the GELU with tanh taken at the result": slope_at_result(of_tanh_form),
        "tanh": slope(lambda m, x: 1.0 - square_slope_at_result(m, x)),
    },
    "tanh_slope": {
        "1 less itself, not its square": slope_at_result(lambda m, y: 1.0 - y),
        "its square": slope_at_result(lambda m, y: y * y),
        "that of a logistic function": slope_at_result(lambda m, y: y * (1.0 - y)),
        "taken at the result": slope_at_result(lambda m, y: 1.0 - square_slope_at_result(m, y)),
    },
    "detached_length": lambda m, y: m.source() / m.stop_gradient(rightly(m, m.source())),
    "loss_gradient_of_sum": instead(lambda m, y: m.sum(m.source())),
    "key_bias_without_gradient": instead(
        lambda m, y: m.reshape(m.source() @ m.weight(f"{m.tap}.weight"), tuple(y.shape))
    ),
    "gelu_gradient_by_tanh": instead(lambda m, y: m.activation(m.source(), "gelu_tanh")),
    "gelu_gradient_without_density": slope(share),
    "gelu_gradient_halved_density": slope(lambda m, x: share(m, x) + x * bell(m, x) * 0.5),
    "relu_gradient_guided": lambda m, y: m.with_gradient(y, m.relu),
    "tanh_gradient_sign": slope(lambda m, x: square_slope_at_result(m, x) + 1.0),
    "tanh_gradient_without_square": slope(lambda m, x: 1.0 - (m.abs(m.tanh(x)))),
    "tanh_gradient_of_rounded": slope(
        lambda m, x: 1.0 - m.rounded(m.tanh(x), "bfloat16") * m.rounded(m.tanh(x), "bfloat16")
    ),
    "softmax_gradient_passed": instead(lambda m, y: m.unnormalised),
    "softmax_gradient_without_sum": instead(maximum_differentiated),
    "softmax_gradient_of_real_queries": stopped(lambda m, y: ~m.real[:, None, :, None]),
    "value_gradient_tail_dropped": stopped(tail),
    "query_gradient_last_row_dropped": stopped(lambda m, y: m.flags(y, 1, -1)),
    "key_gradient_of_first_head": stopped(lambda m, y: ~m.flags(y, 2, 0)),
    "norm_gradient_without_gain": instead(without_gain),
    "norm_gradient_unbiased": normed(variance=unbiased),
    "norm_shared_counted_twice": normed(gain=twice, offset=twice),
    "residual_gradient_halved": instead(lambda m, y: m.source() * 0.5 + m.source("result")),
    "residual_gradient_twice": instead(lambda m, y: m.source() * 2.0 + m.source("result")),
    "residual_second_detached": instead(residual_detached),
    "embedding_gradient_of_first_use": stopped(later_uses),
    "embedding_gradient_without_first": stopped(lambda m, y: m.flags(y, 1, 0)),
    "embedding_gradient_of_last_lost": stopped(lambda m, y: m.flags(y, 0, -1)),
}
