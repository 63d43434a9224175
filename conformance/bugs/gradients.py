"""Bugs that leave every value as it is and show in gradients alone (SPEC GRD-1 to GRD-5, EMB-4, EMB-5).

Such a bug of a step is written at the tap that the step gives: its values stay, and its gradient is that of
something else. It shows in what is differentiated next: the parameters of the step, and whatever came before
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.attention import SCORES, WEIGHTS
from concord.conformance.bugs.bug import REFUSED, BugGroup, Gradients, group, handed_out, option, where
from concord.conformance.bugs.context import Context, Edit, Flags, Ids
from concord.conformance.bugs.norms import NORMS, RESIDUALS, normed, one, zero
from concord.conformance.bugs.operations import Array
from concord.conformance.bugs.pooling import rightly

VECTOR = 4
ROOT = math.sqrt(2 / math.pi)
TABLES = TOKEN, POSITION, SEGMENT = ("embeddings.token", "embeddings.position", "embeddings.segment")
LAST, BEFORE_LAST = "gradients.classifier.bias", "gradients.layers.1.norm1.bias"
SHIFT = "softmax ignores a shift for all keys alike: the gradient is zero in exact arithmetic"

Function = Callable[[Context, Array], Array]


def shows_in(*names: str) -> tuple[str, ...]:
    """Return the tensors that may rightly be named first.

    Gradients of taps, and of parameters by patterns.
    """
    return tuple(f"gradients.{name}" if "*" in name else f"gradients.taps.{name}" for name in names)


def of_step(clause: str, tap: str, *shows: str) -> BugGroup:
    """Return what makes the bugs of a step.

    Args:
        shows: as :func:`shows_in` takes them; by default the step in the last layer, and its parameters.
    """
    last = tap.replace("*attention", "layers.1.attention").replace("*.", "layers.1.")
    return group("gradients", tap, clause=clause, first=shows_in(*(shows or (last, f"{last}.*"))))


def passed(function: Function) -> Edit:
    """Return the edit that sends the gradient of a tap through a function."""
    return lambda m, y: m.o.with_gradient(y, lambda gradient: function(m, gradient))


def times(factor: Callable[[Context], float]) -> Edit:
    """Return the edit that multiplies the gradient of a tap."""
    return passed(lambda m, gradient: gradient * factor(m))


def slope(made: Function) -> Edit:
    """Return the edit that takes another slope for an elementwise step, made of what went in."""

    def edit(m: Context, y: Array) -> Array:
        x = m.source()
        return m.o.value_of(y, x * m.o.stop_gradient(made(m, x)))

    return edit


def slope_at_result(made: Function) -> Edit:
    """Return the same, made of what came out."""
    return lambda m, y: m.o.value_of(y, m.source() * m.o.stop_gradient(made(m, y)))


def instead(made: Function) -> Edit:
    """Return the edit that has the gradient of something else."""
    return lambda m, y: m.o.value_of(y, made(m, y))


as_it_is = instead(lambda m, y: m.source())
"""Gradients pass the step as they are."""


def detached(m: Context, y: Array) -> Array:
    return m.o.stop_gradient(y)


def stopped(flags: Callable[[Context, Array], Flags]) -> Edit:
    """Return the edit that lets no gradient flow where a flag is True."""
    return lambda m, y: m.o.where(flags(m, y), m.o.stop_gradient(y), y)


def root(m: Context) -> float:
    return math.sqrt(m.config.head_dim)


# Tables.


def weighted(share: Callable[[Ids], NDArray[np.floating]]) -> Edit:
    """Return the edit that multiplies the gradient of each row's use by a share, (B, T), made of the rows."""

    def edit(m: Context, y: Array) -> Array:
        given = "segment_ids" if m.tap == SEGMENT else "input_ids"
        rows = m.rows if m.tap == POSITION else m.batch.required(given)
        return m.o.value_of(y, y * m.o.constant(share(rows)[..., None], y))

    return edit


def by_frequency(ids: Ids) -> NDArray[np.floating]:
    """Divide the gradient of a row by how often its id occurs."""
    return np.asarray(1 / np.bincount(ids.reshape(-1))[ids], np.float64)


def last_alone(ids: Ids) -> NDArray[np.floating]:
    """Assign the gradient of a row where it should be added: the last occurrence of an id wins."""
    flat = ids.reshape(-1).tolist()
    last = {value: place for place, value in enumerate(flat)}
    return np.array([last[value] == place for place, value in enumerate(flat)], np.float64).reshape(ids.shape)


def first_alone(ids: Ids) -> NDArray[np.floating]:
    return last_alone(ids[::-1, ::-1])[::-1, ::-1]


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
        return m.o.with_gradient(y, lambda gradient: gradient + m.o.constant(more, y))

    return edit


def clipped(gradients: Gradients) -> Gradients:
    """Shorten all gradients together to the length 1, if they are longer."""
    length = float(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values())) ** 0.5
    return {
        name: (gradient / max(length, 1.0)).astype(gradient.dtype) for name, gradient in gradients.items()
    }


# Activations.


def bell(m: Context, x: Array) -> Array:
    """Return the density of the normal distribution."""
    return m.o.exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


def share(m: Context, x: Array) -> Array:
    """Return the distribution function of the normal distribution."""
    return (m.o.erf(x / math.sqrt(2.0)) + 1.0) * 0.5


def square_of_tanh(m: Context, x: Array) -> Array:
    return m.o.tanh(x) * m.o.tanh(x)


def one_sided(below: float) -> Edit:
    """Return the slope of a ReLU that lets some of what is negative through."""
    return slope(lambda m, x: m.o.where(x > 0.0, x * 0.0 + 1.0, x * 0.0 + below))


def of_gate(steepness: float) -> Edit:
    """Return the slope of x sigmoid(steepness x)."""

    def made(m: Context, x: Array) -> Array:
        gate = m.o.sigmoid(x * steepness)
        return gate + x * gate * (1.0 - gate) * steepness

    return slope(made)


def of_tanh_form(m: Context, x: Array, inner: float = 1.0) -> Array:
    """Return the slope of GELU with tanh, the term of which is multiplied."""
    tangent = m.o.tanh((x + x * x * x * 0.044715) * ROOT)
    steep = (x * x * (3 * 0.044715) + 1.0) * (inner * ROOT)
    return (tangent + 1.0) * 0.5 + x * 0.5 * (1.0 - tangent * tangent) * steep


# Attention.


def of_softmax(pull: Callable[[Context, Array, Array], Array]) -> Edit:
    """Return the softmax whose derivative is made of the gradient and the weights."""

    def edit(m: Context, y: Array) -> Array:
        weights = m.o.stop_gradient(y)
        return m.o.value_of(y, m.o.with_gradient(m.unnormalised, lambda gradient: pull(m, gradient, weights)))

    return edit


def taken_off(inner: Callable[[Context, Array, Array], Array]) -> Edit:
    """Return the softmax whose derivative takes something else off than the sum over the row."""
    return of_softmax(lambda m, gradient, weights: weights * (gradient - inner(m, gradient, weights)))


def without_row_term(m: Context, y: Array) -> Array:
    """Differentiate the softmax as if it were an elementwise function: p g, without the term for the row."""
    weights, scores = m.o.stop_gradient(y), m.unnormalised
    return weights + weights * (scores - m.o.stop_gradient(scores))


def maximum_differentiated(m: Context, y: Array) -> Array:
    """Differentiate the shift by the largest score, but not the sum."""
    scores = m.unnormalised
    powers = m.o.exp(scores - m.o.max(scores, 3))
    return powers / m.o.stop_gradient(m.o.sum(powers, 3))


def tail(m: Context, y: Array) -> Flags:
    """Return the features that a vector of four does not fill."""
    width = tuple(y.shape)[-1]
    return np.asarray(np.arange(width) >= width // VECTOR * VECTOR)


# Norms.


def mean_stopped(m: Context, x: Array, mean: Array) -> Array:
    return x - m.o.stop_gradient(mean)


def deviation_stopped(m: Context, variance: Array) -> Array:
    return m.o.stop_gradient(m.deviation(variance))


def twice(m: Context, x: Array) -> Array:
    """Return a number whose gradient counts twice."""
    return x + (x - m.o.stop_gradient(x))


def norm_slope(pull: Callable[[Context, Array, Array, Array], Array]) -> Edit:
    """Return the norm whose derivative is made of the gained gradient, the normed input and the deviation."""

    def edit(m: Context, y: Array) -> Array:
        x, gain, offset = m.source(), m.weight(f"{m.owner}.weight"), m.weight(f"{m.owner}.bias")
        row, deviation = (m.o.stop_gradient(value) for value in m.standardised(x))
        through = m.o.with_gradient(x, lambda gradient: pull(m, gradient, row, deviation))
        return m.o.value_of(y, through * m.o.stop_gradient(gain) + row * gain + offset)

    return edit


def closed_form(m: Context, gradient: Array, row: Array, sign: float = 1.0, total: bool = False) -> Array:
    """Return the derivative of a norm times its deviation, the term of its variance multiplied."""
    mean = m.o.sum if total else m.o.mean
    return gradient - mean(gradient, -1) - row * mean(gradient * row, -1) * sign


def without_gain(m: Context, y: Array) -> Array:
    """Send the gradient on as if the gain were 1."""
    row = normed(gain=one, offset=zero)(m, y)
    return row + m.o.stop_gradient(row) * m.weight(f"{m.owner}.weight") + m.weight(f"{m.owner}.bias")


def unbiased(m: Context, variance: Array) -> Array:
    """Divide by D - 1 in the derivative."""
    return m.o.value_of(variance, variance * (m.config.d_model / (m.config.d_model - 1.0)))


def rows_dropped(m: Context, y: Array) -> Array:
    """Leave the last rows, which do not fill a block of four, out of the gradients of gain and offset."""
    batch, tokens, _ = tuple(y.shape)
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1)
    alone = m.norm(m.source(), gain=m.o.stop_gradient, offset=m.o.stop_gradient)
    return m.o.where(rows < batch * tokens // VECTOR * VECTOR, y, alone)


def offset_of_mean(m: Context, y: Array) -> Array:
    """Average the gradient of the offset over rows instead of summing it."""
    batch, tokens, _ = tuple(y.shape)
    offset = m.weight(f"{m.owner}.bias")
    return m.norm(m.source(), offset=m.o.stop_gradient) + (offset - m.o.stop_gradient(offset)) / float(
        batch * tokens
    )


# Residuals and linear layers.


def residual_detached(m: Context, y: Array) -> Array:
    return m.o.stop_gradient(m.source()) + m.source("result")


def bias_twice(m: Context, y: Array) -> Array:
    bias = m.weight(f"{m.scope}.outer.bias")
    return y + (bias - m.o.stop_gradient(bias))


OF_INPUT = shows_in("layers.1.residual2", "layers.1.feed_forward.outer", "layers.1.feed_forward.outer.*")
OF_NORM = (BEFORE_LAST, "gradients.taps.layers.1.residual2", "gradients.layers.1.feed_forward.outer.*")
OF_WEIGHTS = (
    "gradients.taps.layers.1.attention.masked_scores",
    "gradients.layers.1.attention.key.*",
    "gradients.layers.1.attention.query.*",
)
OF_TABLE: dict[str, Any] = {table: {"first": (f"gradients.{table}.weight",)} for table in TABLES}
OF_ROWS = shows_in("embeddings.token", "embeddings.segment", "embeddings.position", "embeddings.*.weight")
PADDED = ("embeddings.norm", "embeddings.sum", "*.norm2", "*.residual2")
OCCURS_TWICE = "an id that occurs twice"
HALVES = {"": RESIDUALS, " of attention": RESIDUALS[:1], " of two linear layers": RESIDUALS[1:]}

TABLE, HANDED_OUT = group("gradients", clause="GRD-1"), group("gradients", clause="GRD-1", first=(LAST,))
ROW = group("gradients", clause="EMB-4", **OF_TABLE[TOKEN])
NORM = group("gradients", *NORMS, clause="NRM-2", first=OF_INPUT)
RESIDUAL = of_step("RES-1", "*.residual2", "layers.1.norm1", "layers.1.norm1.*")
ACTIVATION = of_step(
    "FFN-2", "*.feed_forward.activation", "layers.1.feed_forward.inner", "layers.1.feed_forward.inner.*"
)
POOLER = of_step("HED-2", "pooler.output", "pooler.dense", "pooler.*")
LOSS, LOGITS, LENGTH = (
    group("gradients", tap, clause=clause, first=("gradients.*",))
    for tap, clause in (("loss", "LOS-2"), ("logits", "LOS-1"), ("normalized", "HED-5"))
)
ATTENDED = [f"layers.1.attention.{name}" for name in ("masked_scores", "scores", "key", "query")]
SOFTMAX = of_step("ATT-5", WEIGHTS, *ATTENDED, f"{ATTENDED[2]}.*", f"{ATTENDED[3]}.*")
QUERY, KEY = (of_step("ATT-4", f"*attention.{name}") for name in ("query", "key"))
VALUE = of_step("ATT-6", "*attention.value")
SHARED = group("gradients", "*.norm2", clause="NRM-5", first=("gradients.layers.1.norm.*",))
OF_PADDING = group("gradients", *PADDED, clause="MSK-4", first=("gradients.layers.0.norm2.bias",))

BUGS = (
    NORM.bug(
        "norm_variance_detached",
        "The variance of a norm is taken for a constant.",
        normed(deviation=deviation_stopped),
        first=OF_NORM,
        cause="detached_variance",
    ),
    NORM.bug(
        "norm_mean_detached",
        "The mean of a norm is taken for a constant.",
        normed(center=mean_stopped),
        first=OF_NORM,
        cause="detached_mean",
    ),
    NORM.also(
        "detached_statistics",
        "mean and variance that are taken for constants",
        normed(center=mean_stopped, deviation=deviation_stopped),
    ),
    NORM.also("norm_in_gradient or no_gradient", "a norm that gradients pass as they are", as_it_is),
    SHARED.bug(
        "norm_shared_counted_once",
        "Gain and offset of the norm that both sublayers share get the gradient of its first use alone.",
        where(normed(gain=detached, offset=detached), norm_sharing="shared"),
        variant="nndl-paddle",
        cause="shared_norm_counted_once",
    ),
    SHARED.also(
        "shared_norm_counted_once",
        "the second use of a shared norm alone",
        where(normed(gain=detached, offset=detached), norm_sharing="shared"),
        "*.norm1",
    ),
    *NORM.forms(
        "norm_slope",
        "a norm whose derivative {}",
        {
            "takes sums for means": norm_slope(lambda m, g, n, d: closed_form(m, g, n, total=True) / d),
            "is divided by the variance": norm_slope(lambda m, g, n, d: closed_form(m, g, n) / d / d),
            "is not divided by the deviation": norm_slope(lambda m, g, n, d: closed_form(m, g, n)),
            "adds the term of the variance": norm_slope(lambda m, g, n, d: closed_form(m, g, n, -1.0) / d),
            "has twice the term of the variance": norm_slope(
                lambda m, g, n, d: closed_form(m, g, n, 2.0) / d
            ),
            "has half the term of the variance": norm_slope(lambda m, g, n, d: closed_form(m, g, n, 0.5) / d),
        },
    ),
    ROW.bug(
        "embedding_scale_detached",
        "The gradient of token vectors is not multiplied by sqrt(D).",
        where(times(lambda m: m.config.d_model**-0.5), embedding_scale="sqrt_d_model"),
        TOKEN,
        variant="nndl-paddle",
        cause="embedding_scale_in_gradient",
        clause="EMB-2",
    ),
    ROW.also(
        "embedding_scale_in_gradient",
        "a gradient that is multiplied by sqrt(D) twice",
        where(times(lambda m: m.config.d_model**0.5), embedding_scale="sqrt_d_model"),
        TOKEN,
        clause="EMB-2",
    ),
    ROW.bug(
        "padding_row_trained",
        "The row of padding gets a gradient.",
        option(token_padding_row=None),
        variant="vanilla-encoder",
        cause="token_padding_row",
        input="padding",
    ),
    ROW.bug(
        "padding_row_of_wrong_id",
        "Row 0 gets no gradient, while padding is id 1.",
        option(token_padding_row=0),
        variant="vanilla-encoder",
        input="the id 0 or padding",
        cause="token_padding_row",
    ),
    ROW.bug(
        "padding_row_frozen",
        "The row of padding gets no gradient, where the source trains it.",
        option(token_padding_row=0),
        variant="tf1-text-classifier",
        cause="token_padding_row",
        input="padding",
    ),
    ROW.also("padding_row_frozen", "no gradient for padding", stopped(of_padding), POSITION, SEGMENT),
    ROW.bug(
        "segment_padding_row_trained",
        "Row 0 of the segment table gets a gradient.",
        option(segment_padding_row=None),
        variant="bert-pytorch",
        **OF_TABLE[SEGMENT],
        cause="segment_padding_row",
        clause="EMB-5",
        input="padding",
    ),
    ROW.bug(
        "position_padding_row_trained",
        "The row that padding takes of the position table gets a gradient.",
        option(position_padding_row=None),
        variant="roberta",
        **OF_TABLE[POSITION],
        cause="position_padding_row",
        clause="POS-7",
        input="padding",
    ),
    TABLE.bug(
        "embedding_gradient_by_frequency",
        "The gradient of a row is divided by how often its id occurs.",
        weighted(by_frequency),
        TOKEN,
        **OF_TABLE[TOKEN],
        input=OCCURS_TWICE,
        cause="gradient_by_frequency",
    ),
    ROW.also(
        "gradient_by_frequency",
        "the mean over a row's occurrences instead of their sum",
        weighted(by_frequency),
        POSITION,
        SEGMENT,
        clause="GRD-1",
    ),
    TABLE.bug(
        "embedding_gradient_of_last_alone",
        "Of an id that occurs several times, the last occurrence overwrites the others' gradients.",
        weighted(last_alone),
        TOKEN,
        **OF_TABLE[TOKEN],
        input=OCCURS_TWICE,
        cause="gradient_overwritten",
    ),
    ROW.also(
        "gradient_overwritten",
        "the last occurrence of a row alone",
        weighted(last_alone),
        POSITION,
        SEGMENT,
        clause="GRD-1",
    ),
    ROW.also(
        "gradient_overwritten",
        "the first occurrence of a row alone",
        weighted(first_alone),
        *TABLES,
        clause="GRD-1",
    ),
    TABLE.bug(
        "position_table_frozen",
        "The learned position table gets no gradient.",
        detached,
        POSITION,
        **OF_TABLE[POSITION],
        cause="no_gradient",
    ),
    RESIDUAL.bug(
        "residual_detached",
        "No gradient flows through the residual.",
        residual_detached,
        *RESIDUALS,
        first=("gradients.taps.layers.1.norm1", BEFORE_LAST),
        cause="detached_residual",
    ),
    RESIDUAL.also(
        "detached_residual",
        "a first residual that no gradient flows through",
        instead(lambda m, y: m.source("result")),
        RESIDUALS[0],
    ),
    *(
        RESIDUAL.also(
            "detached_sublayer or no_gradient",
            f"a sublayer{words} that no gradient flows through",
            as_it_is,
            *taps,
        )
        for words, taps in HALVES.items()
    ),
    SOFTMAX.bug(
        "attention_weights_detached",
        "No gradient flows through the attention weights.",
        detached,
        first=OF_WEIGHTS,
        input="more than one token",
        cause="detached_weights or no_gradient",
    ),
    SOFTMAX.bug(
        "softmax_gradient_without_row_term",
        "The softmax is differentiated as if it were an elementwise function.",
        without_row_term,
        first=OF_WEIGHTS,
    ),
    *QUERY.forms(
        "score_scale_in_gradient",
        "a gradient {}",
        {
            "without the score scale": times(root),
            "with the score scale twice": times(lambda m: 1 / root(m)),
        },
        SCORES,
    ),
    *(
        each.also(
            f"detached_{name} or no_gradient",
            f"a {name} that no gradient flows through",
            detached,
            clause="ATT-1",
        )
        for name, each in (("query", QUERY), ("key", KEY))
    ),
    SOFTMAX.also(
        "query_mask_in_gradient",
        "gradients that flow through overwritten weights",
        instead(lambda m, y: m.beside("weights")),
        "*attention.masked_weights",
        clause="MSK-8",
    ),
    TABLE.bug(
        "encoder_detached",
        "The head alone is trained: no gradient flows into the encoder.",
        detached,
        "pooling",
        first=("gradients.taps.layers.1.norm2", "gradients.layers.1.norm2.bias"),
        cause="no_gradient",
        clause="HED-1",
    ),
    OF_PADDING.bug(
        "padding_detached",
        "No gradient flows back into padded rows, though padded queries are computed.",
        padding_detached(last_too=False),
        input="a row of padding only",
        cause="detached_padding",
    ),
    OF_PADDING.also(
        "detached_padding",
        "padded rows that no gradient flows back into, of the last layer too",
        padding_detached(last_too=True),
    ),
    ACTIVATION.also("activation_in_gradient", "an activation that gradients pass as they are", as_it_is),
    *ACTIVATION.forms(
        "activation_slope",
        "the slope of {}",
        {
            "the quick GELU, x sigmoid(1.702 x)": of_gate(1.702),
            "x sigmoid(x)": of_gate(1.0),
            "the GELU without the term of its tanh": slope(lambda m, x: of_tanh_form(m, x, 0.0)),
            "the GELU whose second term lacks x": slope(lambda m, x: share(m, x) + bell(m, x)),
            "a logistic function, taken for it": slope(lambda m, x: m.o.sigmoid(x)),
            "a ReLU that lets 0.1 through": one_sided(0.1),
            "a ReLU that lets 0.2 through": one_sided(0.2),
            "the GELU taken at the result instead of what went in": slope_at_result(
                lambda m, y: share(m, y) + y * bell(m, y)
            ),
            "the GELU with tanh taken at the result": slope_at_result(of_tanh_form),
            "tanh": slope(lambda m, x: 1.0 - square_of_tanh(m, x)),
        },
    ),
    *SOFTMAX.forms(
        "softmax_slope",
        "a softmax whose derivative {}",
        {
            "takes half the sum over the row off": taken_off(lambda m, g, w: m.o.sum(g * w, 3) * 0.5),
            "takes twice the sum over the row off": taken_off(lambda m, g, w: m.o.sum(g * w, 3) * 2.0),
            "takes the mean over the row off, not the sum": taken_off(lambda m, g, w: m.o.mean(g * w, 3)),
            "adds the sum over the row": taken_off(lambda m, g, w: -m.o.sum(g * w, 3)),
            "sums over heads": taken_off(lambda m, g, w: m.o.sum(g * w, 1)),
            "sums gradients without their weights": taken_off(lambda m, g, w: m.o.sum(g, 3)),
            "takes the mean gradient off": taken_off(lambda m, g, w: m.o.mean(g, 3)),
            "takes the largest of the row off, not the sum": taken_off(lambda m, g, w: m.o.max(g * w, 3)),
            "goes element by element, with w (1 - w)": of_softmax(lambda m, g, w: g * w * (1.0 - w)),
        },
    ),
    *POOLER.forms(
        "tanh_slope",
        "a tanh whose slope is {}",
        {
            words: where(slope_at_result(made), pooler="tanh")
            for words, made in (
                ("1 less itself, not its square", lambda m, y: 1.0 - y),
                ("its square", lambda m, y: y * y),
                ("that of a logistic function", lambda m, y: y * (1.0 - y)),
                ("taken at the result", lambda m, y: 1.0 - square_of_tanh(m, y)),
            )
        },
    ),
    POOLER.also("pooler_in_gradient", "a pooler's function that gradients pass as they are", as_it_is),
    LOGITS.also(
        "softmax_in_gradient",
        "a log-softmax that gradients pass as they are",
        as_it_is,
        "log_probabilities",
    ),
    *LOGITS.forms(
        "loss_slope",
        "a loss whose derivative is {}",
        {
            **{f"of labels that are smoothed by {share}": of_loss(share) for share in (0.1, 0.05, 0.2)},
            "the probabilities, without the labels": of_loss(1.0),
        },
    ),
    LENGTH.also(
        "detached_length",
        "a length that is taken for a constant",
        lambda m, y: m.source() / m.o.stop_gradient(rightly(m, m.source())),
    ),
    LENGTH.also("length_in_gradient", "a division by the length that gradients pass as they are", as_it_is),
    LOSS.bug(
        "loss_gradient_of_sum",
        "The gradient is that of the sum over samples, while the mean is reported.",
        instead(lambda m, y: m.o.sum(m.source())),
        first=("gradients.taps.losses", LAST),
        input="more than one sample",
        cause="gradient_of_sum",
    ),
    HANDED_OUT.bug(
        "gradients_clipped",
        "Gradients are clipped to norm 1 before they are handed out.",
        handed_out(clipped),
        input="gradients above norm 1",
        cause="gradient_clipped",
    ),
    HANDED_OUT.bug(
        "gradients_accumulated",
        "Gradients of an earlier step were not reset.",
        handed_out(lambda gradients: {name: gradient * 2 for name, gradient in gradients.items()}),
        cause="gradient_accumulated",
    ),
    KEY.bug(
        "key_bias_without_gradient",
        "The bias of the keys gets no gradient.",
        instead(lambda m, y: m.o.reshape(m.source() @ m.weight(f"{m.tap}.weight"), tuple(y.shape))),
        first=(),
        equivalent={"float64": SHIFT, "float32": SHIFT},
        cause=None,
        clause="",
    ),
    ACTIVATION.bug(
        "gelu_gradient_by_tanh",
        "GELU with erf is differentiated as its approximation.",
        instead(lambda m, y: m.activation(m.source(), "gelu_tanh")),
        cause="activation",
        source="flagos-ai/FlagGems/pull/159",
    ),
    ACTIVATION.bug(
        "gelu_gradient_without_density",
        "The derivative of GELU lacks its second term.",
        slope(share),
        cause="activation_slope",
        source="flagos-ai/FlagGems/pull/159",
    ),
    ACTIVATION.bug(
        "gelu_gradient_halved_density",
        "The second term of GELU's derivative has half its size.",
        slope(lambda m, x: share(m, x) + x * bell(m, x) * 0.5),
        source="huggingface/candle/pull/1160",
    ),
    ACTIVATION.bug(
        "gelu_gradient_of_relu",
        "GELU is differentiated as a ReLU.",
        one_sided(0.0),
        cause="activation or activation_slope",
        source="karpathy/llm.c/pull/307",
    ),
    ACTIVATION.bug(
        "relu_gradient_guided",
        "The ReLU lets positive gradients through alone.",
        lambda m, y: m.o.with_gradient(y, m.o.relu),
        variant="vanilla-encoder",
        source="jax-ml/jax/pull/2342",
    ),
    ACTIVATION.bug(
        "relu_gradient_leaky",
        "The ReLU lets a hundredth of the gradient through where it is closed.",
        one_sided(0.01),
        variant="vanilla-encoder",
        cause="activation_slope",
        source="jax-ml/jax/issues/37821",
    ),
    POOLER.bug(
        "tanh_gradient_sign",
        "The derivative of tanh is 1 + y² instead of 1 - y².",
        slope(lambda m, x: square_of_tanh(m, x) + 1.0),
        source="gy910210/neural-network-from-scratch/issues/2",
    ),
    POOLER.bug(
        "tanh_gradient_without_square",
        "The derivative of tanh is 1 - |y| instead of 1 - y².",
        slope(lambda m, x: 1.0 - (m.o.abs(m.o.tanh(x)))),
        cause="tanh_slope",
        source="microsoft/knossos-ksc/pull/505",
    ),
    POOLER.bug(
        "tanh_gradient_of_rounded",
        "The derivative of tanh is taken of a value in bfloat16.",
        slope(lambda m, x: 1.0 - m.o.rounded(m.o.tanh(x), "bfloat16") * m.o.rounded(m.o.tanh(x), "bfloat16")),
        source="tenstorrent/tt-metal/issues/55349",
    ),
    SOFTMAX.bug(
        "softmax_gradient_over_queries",
        "The sum in the softmax's derivative runs over queries.",
        taken_off(lambda m, g, w: m.o.sum(g * w, 2)),
        cause="softmax_slope",
        source="pocketpy/cTensor/pull/31",
    ),
    SOFTMAX.bug(
        "softmax_gradient_passed",
        "Gradients pass the softmax as they are.",
        instead(lambda m, y: m.unnormalised),
        cause="softmax_in_gradient",
        source="pjreddie/darknet/pull/96",
    ),
    SOFTMAX.bug(
        "softmax_gradient_without_sum",
        "The softmax is differentiated with its sum for a constant.",
        instead(maximum_differentiated),
        source="PaddlePaddle/Paddle/pull/57905",
    ),
    SOFTMAX.bug(
        "softmax_gradient_of_real_queries",
        "No gradient flows through the softmax of padded queries.",
        stopped(lambda m, y: ~m.real[:, None, :, None]),
        input="padding",
        cause="softmax_gradient_of_real_queries or detached_padding",
        source="XunhaoLai/native-sparse-attention-triton/issues/27",
    ),
    QUERY.bug(
        "query_gradient_unscaled",
        "The gradient of the query is not multiplied by the scale of the scores.",
        times(root),
        cause="score_scale_in_gradient",
        source="NVIDIA/TransformerEngine/issues/3216",
    ),
    KEY.bug(
        "key_gradient_scaled_twice",
        "The gradient of the key is multiplied by the scale of the scores twice.",
        times(lambda m: 1 / root(m)),
        cause="score_scale_in_gradient",
        source="Dao-AILab/flash-attention/issues/498",
    ),
    VALUE.bug(
        "value_gradient_tail_dropped",
        "The gradient of the value is zero in features that a vector of four does not fill.",
        stopped(tail),
        source="Dao-AILab/flash-attention/issues/2552",
    ),
    QUERY.bug(
        "query_gradient_last_row_dropped",
        "The last query has no gradient.",
        stopped(lambda m, y: m.flags(y, 1, -1)),
        first=shows_in(*(f"layers.{i}.attention.query{end}" for i in (1, 0) for end in ("", ".*"))),
        input="a last token that others depend on",
        source="Dao-AILab/flash-attention/pull/2896",
    ),
    KEY.bug(
        "key_gradient_of_first_head",
        "The key has a gradient in the first head alone.",
        stopped(lambda m, y: ~m.flags(y, 2, 0)),
        clause="ATT-2",
        source="fla-org/flash-linear-attention/pull/384",
    ),
    VALUE.bug(
        "value_detached",
        "No gradient flows through the value.",
        detached,
        first=(*VALUE.common["first"], REFUSED),
        cause="detached_value or no_gradient",
        source="Dao-AILab/flash-attention/issues/2541",
    ),
    NORM.bug(
        "norm_gradient_without_gain",
        "The gradient of a norm's input lacks the gain.",
        instead(without_gain),
        source="flagos-ai/FlagGems/pull/59",
    ),
    NORM.bug(
        "norm_gradient_unbiased",
        "The derivative of the variance divides by D - 1.",
        normed(variance=unbiased),
        clause="NRM-4",
        source="pytorch/pytorch/issues/141425",
    ),
    NORM.bug(
        "norm_gradient_of_some_rows",
        "The last rows, which do not fill a block, do not count in the gradients of gain and offset.",
        rows_dropped,
        first=shows_in("layers.*.norm*", "embeddings.norm.*"),
        source="karpathy/llm.c/pull/408",
    ),
    NORM.bug(
        "norm_gradient_of_mean_offset",
        "The gradient of a norm's offset is a mean over rows.",
        offset_of_mean,
        first=shows_in("layers.1.norm2.b*"),
        source="state-spaces/mamba/pull/1023",
    ),
    SHARED.bug(
        "norm_shared_counted_twice",
        "The second use of a shared norm counts twice in the gradients of its gain and offset.",
        normed(gain=twice, offset=twice),
        variant="nndl-paddle",
        source="NVIDIA/TransformerEngine/issues/3437",
    ),
    RESIDUAL.bug(
        "residual_gradient_halved",
        "Half of the gradient flows through the second residual.",
        instead(lambda m, y: m.source() * 0.5 + m.source("result")),
        source="state-spaces/mamba/pull/1023",
    ),
    RESIDUAL.bug(
        "residual_gradient_twice",
        "The gradient of the first residual is added twice.",
        instead(lambda m, y: m.source() * 2.0 + m.source("result")),
        "*.residual1",
        first=shows_in("layers.0.norm2", "layers.0.norm2.*"),
        source="NVIDIA/Megatron-LM/pull/7582",
    ),
    RESIDUAL.bug(
        "residual_second_detached",
        "No gradient flows through the second residual.",
        instead(residual_detached),
        cause="detached_residual",
        source="aws-neuron/nki-samples/pull/81",
    ),
    TABLE.bug(
        "bias_gradient_twice",
        "The gradient of a bias is added once for each of two devices.",
        bias_twice,
        "*.feed_forward.outer",
        clause="FFN-1",
        first=shows_in("layers.1.feed_forward.outer.b*"),
        cause="gradient_accumulated",
        source="EleutherAI/gpt-neox/issues/615",
    ),
    TABLE.bug(
        "embedding_gradient_of_first_use",
        "An id that a sample has twice counts once.",
        stopped(later_uses),
        TOKEN,
        first=shows_in(TOKEN, f"{TOKEN}.*"),
        input="an id that a sample has twice",
        source="PaddlePaddle/Paddle/pull/9120",
    ),
    TABLE.bug(
        "embedding_gradient_without_first",
        "The first token's embedding has no gradient.",
        stopped(lambda m, y: m.flags(y, 1, 0)),
        "embeddings.sum",
        first=OF_ROWS,
        source="NVIDIA/TransformerEngine/pull/545",
    ),
    TABLE.bug(
        "embedding_gradient_of_last_lost",
        "The last sample has no gradient in the embeddings.",
        stopped(lambda m, y: m.flags(y, 0, -1)),
        "embeddings.sum",
        first=OF_ROWS,
        source="NVIDIA/TransformerEngine/issues/3216",
    ),
    TABLE.bug(
        "loss_scale_kept",
        "Gradients keep the factor 1024 that they were scaled by.",
        times(lambda m: 1024.0),
        "loss",
        first=("gradients.classifier.*", "gradients.taps.loss", "gradients.taps.losses"),
        source="NVIDIA/Megatron-LM/issues/1446",
    ),
)
