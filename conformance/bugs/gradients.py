"""Bugs that leave every value as it is and show in gradients alone (SPEC GRD-1 to GRD-5, EMB-4, EMB-5).

Such a bug of a step is written at the tap that the step gives: its values stay, and its gradient is that of
something else. It shows in what is differentiated next: the parameters of the step, and whatever came before
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import Edits, Gradients, option
from concord.conformance.bugs.context import Context, Flags
from concord.conformance.bugs.norms import one, zero
from concord.conformance.bugs.operations import Array
from concord.spec.arrays import Ids

VECTOR = 4
ROOT = math.sqrt(2 / math.pi)


def times(m: Context, factor: float = 1.0, **powers: float) -> Array:
    """Multiply the gradient of a tap, by powers of sizes too."""
    return m.with_gradient(m.y, lambda gradient: gradient * (factor * m.size(**powers)))


def instead(m: Context, other: Array) -> Array:
    """Return the tap with the gradient of something else."""
    return m.value_of(m.y, other)


def slope(m: Context, made: Array) -> Array:
    """Take another slope for an elementwise step."""
    return instead(m, m.x * m.stop_gradient(made))


def as_it_is(m: Context) -> Array:
    """Let gradients pass the step as they are."""
    return instead(m, m.x)


def detached(m: Context) -> Array:
    return m.stop_gradient(m.y)


def stopped(m: Context, flags: Flags) -> Array:
    """Let no gradient flow where a flag is True."""
    return m.where(flags, detached(m), m.y)


# Tables.


def weighted(m: Context, share: Callable[[Ids], NDArray[np.floating]]) -> Array:
    """Multiply the gradient of each row's use by a share, (B, T), made of the rows."""
    table = m.tap.rpartition(".")[2]
    rows = m.rows if table == "position" else m.segments if table == "segment" else m.ids
    return instead(m, m.y * m.constant(share(rows)[..., None], m.y))


def by_frequency(ids: Ids) -> NDArray[np.floating]:
    """Divide the gradient of a row by how often its id occurs."""
    return np.asarray(1 / np.bincount(ids.reshape(-1))[ids], np.float64)


def last_alone(ids: Ids) -> NDArray[np.floating]:
    """Assign the gradient of a row where it should be added: the last occurrence of an id wins."""
    flat = ids.reshape(-1).tolist()
    last = {value: place for place, value in enumerate(flat)}
    return np.array([last[value] == place for place, value in enumerate(flat)], np.float64).reshape(ids.shape)


def embedding_gradient_of_first_use(m: Context) -> Array:
    """Stop it where an id stands that its sample has before."""
    used = [[value in row[:place] for place, value in enumerate(row)] for row in m.ids.tolist()]
    return stopped(m, np.array(used)[..., None])


def padding_rows_detached(m: Context) -> Array:
    return stopped(m, ~m.real[..., None])


def padding_detached(m: Context, last_too: bool) -> Array:
    """Let no gradient flow back into padded rows of what enters a layer, or leaves the last one."""
    end = "residual2" if m.config.norm_placement == "pre" else "norm2"
    if m.scope != "embeddings" and not m.tap.endswith(end):
        return m.y
    last = m.tap == f"layers.{m.config.num_layers - 1}.{end}"
    return padding_rows_detached(m) if last_too or not last else m.y


def of_loss(m: Context, share: float) -> Array:
    """Return logits whose gradient has some more of the labels, less what all classes have alike."""
    labels = np.asarray(m.labels[:, None] == np.arange(m.config.num_classes), np.float64)
    more = (share * (labels - 1 / m.config.num_classes) if share < 1 else labels) / len(labels)
    like = m.y
    return m.with_gradient(like, lambda gradient: gradient + m.constant(more, like))


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


def square(m: Context, x: Array) -> Array:
    """Return the square of the hyperbolic tangent."""
    return m.tanh(x) * m.tanh(x)


def one_sided(m: Context, below: float) -> Array:
    """Take the slope of a ReLU that lets some of what is negative through."""
    return slope(m, m.where(m.x > 0.0, m.x * 0.0 + 1.0, m.x * 0.0 + below))


def of_gate(m: Context, steepness: float) -> Array:
    """Take the slope of x sigmoid(steepness x)."""
    gate = m.sigmoid(m.x * steepness)
    return slope(m, gate + m.x * gate * (1.0 - gate) * steepness)


def of_tanh_form(m: Context, x: Array, inner: float = 1.0) -> Array:
    """Take the slope of GELU with tanh, the term of which is multiplied."""
    tangent = m.tanh((x + x * x * x * 0.044715) * ROOT)
    steep = (x * x * (3 * 0.044715) + 1.0) * (inner * ROOT)
    return slope(m, (tangent + 1.0) * 0.5 + x * 0.5 * (1.0 - tangent * tangent) * steep)


def tanh_gradient_of_rounded(m: Context) -> Array:
    rounded = m.rounded(m.tanh(m.x), "bfloat16")
    return slope(m, 1.0 - rounded * rounded)


# Attention.


def of_softmax(m: Context, pull: Callable[[Array, Array], Array]) -> Array:
    """Return the softmax whose derivative is made of the gradient and the weights."""
    weights = detached(m)
    return instead(m, m.with_gradient(m.unnormalised, lambda gradient: pull(gradient, weights)))


def taken_off(
    m: Context, reduction: str = "", factor: float = 1.0, axis: int = 3, weighted: bool = True
) -> Array:
    """Return the softmax whose derivative takes something else off than the sum over the row.

    Args:
        reduction: of gradients, times their weights where these count; empty: each by itself.
    """

    def pull(gradient: Array, weights: Array) -> Array:
        if not reduction:
            return gradient * weights * (1.0 - weights)
        inner = getattr(m, reduction)(gradient * weights if weighted else gradient, axis)
        return weights * (gradient - inner * factor)

    return of_softmax(m, pull)


def softmax_gradient_without_row_term(m: Context) -> Array:
    """Differentiate the softmax as if it were an elementwise function: p g, without the term for the row."""
    weights, scores = detached(m), m.unnormalised
    return weights + weights * (scores - m.stop_gradient(scores))


def softmax_gradient_without_sum(m: Context) -> Array:
    """Differentiate the shift by the largest score, but not the sum."""
    scores = m.unnormalised
    powers = m.exp(scores - m.max(scores, 3))
    return instead(m, powers / m.stop_gradient(m.sum(powers, 3)))


def value_gradient_tail_dropped(m: Context) -> Array:
    """Stop it at the features that a vector of four does not fill."""
    width = tuple(m.y.shape)[-1]
    return stopped(m, np.arange(width) >= width // VECTOR * VECTOR)


# Norms.


def without_mean(m: Context, x: Array, mean: Array) -> Array:
    return x - m.stop_gradient(mean)


def constant_deviation(m: Context, variance: Array) -> Array:
    return m.stop_gradient(m.deviation(variance))


def norm_shared_counted_once(m: Context) -> Array:
    return m.norm(m.x, gain=m.stop_gradient, offset=m.stop_gradient)


def norm_shared_counted_twice(m: Context) -> Array:
    def twice(x: Array) -> Array:
        return x + (x - m.stop_gradient(x))

    return m.norm(m.x, gain=twice, offset=twice)


def norm_slope(m: Context, pull: Callable[[Array, Array, Array], Array]) -> Array:
    """Return the norm whose derivative is made of the gained gradient, the normed input and the deviation."""
    gain, offset = m.weight(f"{m.owner}.weight"), m.weight(f"{m.owner}.bias")
    centered = m.x - m.mean(m.x, -1)
    count = float(m.config.d_model - (m.config.norm_variance == "unbiased"))
    deviation = m.stop_gradient(m.deviation(m.sum(centered * centered, -1) / count))
    row = m.stop_gradient(centered) / deviation
    through = m.with_gradient(m.x, lambda gradient: pull(gradient, row, deviation))
    return instead(m, through * m.stop_gradient(gain) + row * gain + offset)


def closed_form(m: Context, variance: float = 1.0, deviation: int = 1, mean: str = "mean") -> Array:
    """Return the norm whose derivative has the term of the variance so often, is divided by a power of the
    deviation, and takes means, or sums for them.
    """

    def pull(gradient: Array, row: Array, root: Array) -> Array:
        over = getattr(m, mean)
        slope = gradient - over(gradient, -1) - row * over(gradient * row, -1) * variance
        for _ in range(deviation):
            slope = slope / root
        return slope

    return norm_slope(m, pull)


def norm_gradient_without_gain(m: Context) -> Array:
    """Send the gradient on as if the gain were 1."""
    row = m.norm(m.x, gain=one, offset=zero)
    gained = m.stop_gradient(row) * m.weight(f"{m.owner}.weight")
    return instead(m, row + gained + m.weight(f"{m.owner}.bias"))


def norm_gradient_unbiased(m: Context) -> Array:
    """Divide by D - 1 in the derivative."""
    factor = m.config.d_model / (m.config.d_model - 1.0)
    return m.norm(m.x, variance=lambda variance: m.value_of(variance, variance * factor))


def norm_gradient_of_some_rows(m: Context) -> Array:
    """Leave the last rows, which do not fill a block of four, out of the gradients of gain and offset."""
    batch, tokens, _ = tuple(m.y.shape)
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1)
    return m.where(rows < batch * tokens // VECTOR * VECTOR, m.y, norm_shared_counted_once(m))


def norm_gradient_of_mean_offset(m: Context) -> Array:
    """Average the gradient of the offset over rows instead of summing it."""
    batch, tokens, _ = tuple(m.y.shape)
    offset = m.weight(f"{m.owner}.bias")
    moved = (offset - m.stop_gradient(offset)) / float(batch * tokens)
    return m.norm(m.x, offset=m.stop_gradient) + moved


# Residuals and linear layers.


def residual_detached(m: Context) -> Array:
    return m.stop_gradient(m.x) + m.source("result")


def residual_of(m: Context, factor: float) -> Array:
    """Return the residual whose first term has a gradient that is multiplied."""
    return instead(m, m.x * factor + m.source("result"))


def bias_gradient_twice(m: Context) -> Array:
    bias = m.weight(f"{m.scope}.outer.bias")
    return m.y + (bias - m.stop_gradient(bias))


EDITS: Edits = {
    "norm_variance_detached": lambda m: m.norm(m.x, deviation=partial(constant_deviation, m)),
    "norm_mean_detached": lambda m: m.norm(m.x, center=partial(without_mean, m)),
    "detached_statistics": lambda m: m.norm(
        m.x, center=partial(without_mean, m), deviation=partial(constant_deviation, m)
    ),
    "padding_row_trained": lambda r: option(r, token_padding_row=None),
    "segment_padding_row_trained": lambda r: option(r, segment_padding_row=None),
    "position_padding_row_trained": lambda r: option(r, position_padding_row=None),
    "embedding_gradient_by_frequency": lambda m: weighted(m, by_frequency),
    "embedding_gradient_of_last_alone": lambda m: weighted(m, last_alone),
    "gradient_of_first_use": lambda m: weighted(m, lambda rows: last_alone(rows[::-1, ::-1])[::-1, ::-1]),
    "detached_residual": lambda m: instead(m, m.source("result")),
    "query_mask_in_gradient": lambda m: instead(m, m.beside("weights")),
    "activation_slope": {
        "the quick GELU, x sigmoid(1.702 x)": lambda m: of_gate(m, 1.702),
        "x sigmoid(x)": lambda m: of_gate(m, 1.0),
        "the GELU without the term of its tanh": lambda m: of_tanh_form(m, m.x, 0.0),
        "the GELU whose second term lacks x": lambda m: slope(m, share(m, m.x) + bell(m, m.x)),
        "a logistic function, taken for it": lambda m: slope(m, m.sigmoid(m.x)),
        "a ReLU that lets 0.1 through": lambda m: one_sided(m, 0.1),
        "a ReLU that lets 0.2 through": lambda m: one_sided(m, 0.2),
        "the GELU taken at the result instead of what went in": lambda m: slope(
            m, share(m, m.y) + m.y * bell(m, m.y)
        ),
        "the GELU with tanh taken at the result": lambda m: of_tanh_form(m, m.y),
        "tanh": lambda m: slope(m, 1.0 - square(m, m.x)),
    },
    "tanh_slope": {
        "1 less itself, not its square": lambda m: slope(m, 1.0 - m.y),
        "its square": lambda m: slope(m, m.y * m.y),
        "that of a logistic function": lambda m: slope(m, m.y * (1.0 - m.y)),
        "taken at the result": lambda m: slope(m, 1.0 - square(m, m.y)),
    },
    "loss_gradient_of_sum": lambda m: instead(m, m.sum(m.x)),
    "key_bias_without_gradient": lambda m: instead(
        m, m.reshape(m.x @ m.weight(f"{m.tap}.weight"), tuple(m.y.shape))
    ),
    "gelu_gradient_by_tanh": lambda m: instead(m, m.activation(m.x, "gelu_tanh")),
    "gelu_gradient_without_density": lambda m: slope(m, share(m, m.x)),
    "gelu_gradient_halved_density": lambda m: slope(m, share(m, m.x) + m.x * bell(m, m.x) * 0.5),
    "relu_gradient_guided": lambda m: m.with_gradient(m.y, m.relu),
    "tanh_gradient_sign": lambda m: slope(m, square(m, m.x) + 1.0),
    "tanh_gradient_without_square": lambda m: slope(m, 1.0 - (m.abs(m.tanh(m.x)))),
    "softmax_gradient_passed": lambda m: instead(m, m.unnormalised),
    "softmax_gradient_of_real_queries": lambda m: stopped(m, ~m.real[:, None, :, None]),
    "query_gradient_last_row_dropped": lambda m: stopped(m, m.flags(1, -1)),
    "key_gradient_of_first_head": lambda m: stopped(m, ~m.flags(2, 0)),
    "residual_second_detached": lambda m: instead(m, residual_detached(m)),
    "embedding_gradient_without_first": lambda m: stopped(m, m.flags(1, 0)),
    "embedding_gradient_of_last_lost": lambda m: stopped(m, m.flags(0, -1)),
}
