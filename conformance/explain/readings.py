"""Readings: causes inferred from a tensor's relation to the correct one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.context import Flags, norm_of, parameters_of
from concord.conformance.bugs.norms import NORMS, RESIDUALS, variance_by_squares
from concord.conformance.bugs.rounding import LINEAR
from concord.conformance.explain.computation import LEAST, clear, root_mean_square, within
from concord.conformance.explain.description import usual_clause
from concord.conformance.explain.hypothesis import RIGHT, Hypothesis, loaded
from concord.conformance.explain.question import SHORTER, Question, rounding
from concord.conformance.judging.estimate import R, Z
from concord.conformance.wording import few, instead_of
from concord.spec.arrays import Array
from concord.spec.parameters import trainable
from concord.spec.positions import position_ids
from concord.spec.precision import precision, round_to_bits

# Formats.

# Minimum number of distinct values, and of the bits that they lack, for fewer bits to be credible. All of 24
# values lack one bit by chance once in 2^24.
ENOUGH, FREE = 24, 4


def of_format(question: Question) -> Iterator[Hypothesis]:
    """Recognize that all values, unlike the correct ones, fit a shorter format."""
    actual, right = question.actual, question.right
    finite = np.isfinite(actual) & np.isfinite(right.value)
    for name in reversed(SHORTER.get(question.case.dtype, ())):
        actual_fits, right_fits = (
            rounding(name)(array[finite]) == array[finite] for array in (actual, right.value)
        )
        # Zero fits every format, and indicates none.
        if actual_fits.all() and (~right_fits & (actual[finite] != 0)).sum() >= 2:
            break
    else:
        yield from _of_digits(question, finite)
        return
    bits = _bits(actual[finite])
    if bits < _bits_of(name):
        yield Hypothesis("fewer_bits", f"values with {bits} significant bits", "PRC-2")
        return
    exponent = np.floor(np.log2(np.maximum(abs(actual), precision(name).smallest_normal)))
    # A value just below a power of two may have been rounded up to it, by half the larger spacing.
    half = 2.0**exponent * precision(name).unit_roundoff
    if within(np.maximum(abs(actual - right.value) - half, 0), right.sigma):
        yield Hypothesis(f"stored_in_{name}", f"values rounded to {name}", "PRC-2")
        return
    prediction = question.predict(RIGHT, name)
    # Values out of the format's range may become infinity, and then NaN.
    overflow = ~np.isfinite(actual)
    error = np.where(overflow, 0.0, actual - prediction.value)
    if (
        not (overflow & np.isfinite(question.rounded(name))).any()
        and within(error, prediction.sigma)
        and root_mean_square(error) >= LEAST * root_mean_square(prediction.sigma)
    ):
        yield Hypothesis(f"computed_in_{name}", f"a step computed in {name}", "PRC-2")


# Maximum decimals of tables written by hand.
MOST_DECIMALS = 6


def _of_digits(question: Question, finite: Flags) -> Iterator[Hypothesis]:
    actual, right = question.actual[finite], question.right.value[finite].astype(np.float64)
    sigma = question.right.sigma[finite]
    clause = "POS-4" if question.is_tap(("embeddings.position",)) else "PRC-2"
    unit = precision(question.case.dtype).unit_roundoff
    for decimals in range(1, MOST_DECIMALS + 1):
        actual_fits, right_fits = (
            abs(array - np.round(array, decimals)) <= unit * abs(array) for array in (actual, right)
        )
        # A half precision has few decimals itself.
        if actual_fits.all() and (~right_fits).sum() >= 2 and len(np.unique(actual)) >= ENOUGH:
            if within(np.maximum(abs(actual - right) - 0.5 * 10.0**-decimals, 0), sigma + unit * abs(right)):
                yield Hypothesis("decimals", f"values rounded to {decimals} decimals", clause)
            return
    if (bits := _bits(actual)) < _bits_of(question.case.dtype) - FREE:
        yield Hypothesis("fewer_bits", f"values with {bits} significant bits", clause)


def _bits(numbers: Array) -> int:
    """Number of significant bits, or 64 for too few values."""
    if len(np.unique(abs(numbers[numbers != 0]))) < ENOUGH:
        return 64
    return next((bits for bits in range(1, 53) if (round_to_bits(numbers, bits) == numbers).all()), 64)


def _bits_of(dtype: str) -> int:
    return -round(math.log2(precision(dtype).unit_roundoff))


# Limits.

# A correct value below this share of the largest one may be zero, apart from rounding.
NOTHING = 1e-6


def of_limit(question: Question) -> Iterator[Hypothesis]:
    right, actual, clause = question.right.value, question.actual, usual_clause(question)
    # At a mask constant, equal values do not indicate a limit.
    masked = question.is_tap(("*.masked_scores", "*.masked_weights"))
    if masked or not (np.isfinite(right).all() and np.isfinite(actual).all()):
        return
    limit = float(abs(actual).max())
    if np.ptp(actual) == 0:  # equal values do not indicate a limit
        return
    for text, low, high in (
        ("be at least ", float(actual.min()), math.inf),
        ("be at most ", -math.inf, float(actual.max())),
        ("", -limit, limit),
    ):
        limited = np.clip(right, low, high)
        beyond = limited != right
        if (
            beyond.sum() >= 3
            and ((~beyond).sum() >= 3 or not text)
            and clear(actual - right, actual - limited, question.right.sigma)
        ):
            bound = low if math.isfinite(low) and text else high
            yield Hypothesis("clamped", f"values clamped to {text or '±'}{bound:.6g}", clause)
            return


def of_sign(question: Question) -> Iterator[Hypothesis]:
    right, sigma = question.right.value, question.right.sigma
    negative = right < -Z * sigma
    if negative.sum() >= 3 and clear(question.actual - right, question.actual - abs(right), sigma):
        yield Hypothesis("sign_lost", "values without their sign", usual_clause(question))


def of_small(question: Question) -> Iterator[Hypothesis]:
    limits, error = limits_of_zeros(question), question.actual - question.right.value
    nonzero = question.actual != 0
    if limits and within(error[nonzero], np.broadcast_to(question.right.sigma, nonzero.shape)[nonzero]):
        clause = usual_clause(question)
        text = "zeros in place of values below a limit between {:.3g} and {:.3g}".format(*limits)
        yield Hypothesis("flushed", text, clause)


def limits_of_zeros(question: Question) -> tuple[float, float] | None:
    """Bounds of a limit below which all values or gradients are zero."""
    pairs = [(question.right.value, question.actual)]
    if question.parameter in trainable(question.config, question.case.part):
        names = [
            name
            for name in trainable(question.config, question.case.part)
            if f"gradients.{name}" in question.delivered
        ]
        pairs = [(question.exact.gradient(name), question.delivered[f"gradients.{name}"]) for name in names]
    count, lower, upper = 0, 0.0, math.inf
    for right, actual in pairs:
        zeros = abs(right[(actual == 0) & (abs(right) > NOTHING * np.max(abs(right), initial=0.0))])
        count, lower = count + zeros.size, max(lower, float(np.max(zeros, initial=0.0)))
        upper = min(upper, float(np.min(abs(actual[actual != 0]), initial=math.inf)))
    return (lower, upper) if count >= 3 and lower <= upper < math.inf else None


# Rows of tables.

# Largest product of wrong rows and table size at which all rows are compared with all.
MOST_ROWS = 10**8


def of_rows(question: Question) -> Iterator[Hypothesis]:
    if not question.is_tap(("embeddings.token", "embeddings.position", "embeddings.segment")):
        return
    config, batch = question.config, question.case.batch
    table = question.case.weights[f"{question.tensor}.weight"].astype(np.float64)
    real = question.exact.context.real
    rows, scale = {
        "token": (batch.input_ids, config.d_model**0.5 if config.embedding_scale != "one" else 1.0),
        "position": (position_ids(config, real), 1.0),
        "segment": (batch.segment_ids, 1.0),
    }[question.tensor.rpartition(".")[2]]
    right, sigma = question.right.value.astype(np.float64), question.right.sigma
    wrong = (abs(question.actual - right) > Z * sigma).any(-1)
    if rows is None or wrong.sum() * table.size > MOST_ROWS or not np.isfinite(question.actual).all():
        return
    vectors = question.actual[wrong]  # (N, D)
    nearest = np.square(vectors[:, None] - scale * table).sum(-1).argmin(-1)
    # Use the rounding of the looked-up row, since sigma belongs to the correct row.
    unit = precision(question.case.dtype).unit_roundoff
    value = scale * table[nearest]
    if not within(vectors - value, np.hypot(sigma[wrong], unit * abs(value))):
        return
    expected = rows[wrong]  # (N,)
    pairs = list(dict.fromkeys(zip(nearest.tolist(), expected.tolist(), strict=True)))
    shifts = {actual - target for actual, target in pairs}
    if len(shifts) == 1 and len(pairs) > 1:
        (step,) = shifts
        text = f"table rows {abs(step)} too {'high' if step > 0 else 'low'}"
    else:
        text = f"different table rows: {few(f'{actual} instead of {target}' for actual, target in pairs)}"
    padding = question.tensor == "embeddings.position" and not (wrong & real).any()
    clause = {"embeddings.token": "EMB-1", "embeddings.position": "POS-6" if padding else "POS-5"}
    where = "" if wrong.all() else f", in {wrong.sum()} of {wrong.size} tokens"
    yield Hypothesis("other_rows", f"{text}{where}", clause.get(question.tensor, "EMB-5"))


# Inputs of a head.


def of_tokens(question: Question) -> Iterator[Hypothesis]:
    if not question.is_tap(("pooling",)) or question.entered.ndim != 3:
        return
    entered, actual = question.entered.astype(np.float64), question.actual
    if actual.shape != entered[:, 0].shape:
        return
    unit = precision(question.case.dtype).unit_roundoff
    places = abs(entered - actual[:, None]).max(-1).argmin(1)
    vectors = entered[np.arange(len(places)), places]
    if within(actual - vectors, unit * abs(vectors)):
        same_place = len({*places.tolist()}) == 1
        text = f"token {places[0]} of every sample" if same_place else f"tokens {few(places)} of the samples"
        yield Hypothesis("other_token", text, "HED-1")


def of_labels(question: Question) -> Iterator[Hypothesis]:
    if not question.is_tap(("losses",)) or "log_probabilities" not in question.exact.now:
        return
    losses = -question.exact.now["log_probabilities"].value.astype(np.float64)  # (B, C)
    labels = question.case.batch.required("labels")
    places = abs(losses - question.actual[:, None]).argmin(1)
    if within(question.actual - losses[np.arange(len(places)), places], question.right.sigma):
        text = f"the losses of the labels {few(places)} instead of {few(labels)}"
        yield Hypothesis("other_labels", text, "LOS-1")


def of_count(question: Question) -> Iterator[Hypothesis]:
    if not question.is_tap(("loss",)) or "losses" not in question.exact.now:
        return
    context, losses = question.exact.context, question.exact.now["losses"].value.astype(np.float64)
    total, count = float(losses[context.counted].sum()), int(context.counted.sum())
    penalty = float(question.right.value) - total / max(count, 1)
    divisor = total / (float(question.actual) - penalty)
    if count and round(divisor) != count and round(divisor) > 0:
        loss = total / round(divisor) + penalty
        if within(question.actual - np.float64(loss), question.right.sigma * max(1.0, count / divisor)):
            text = f"a sum of losses divided by {round(divisor)} instead of {count}"
            yield Hypothesis("loss_count", text, "LOS-2")


# Dropout.

DROPPED = (
    "embeddings.sum",
    "embeddings.norm",
    "*.attention.weights",
    "*.attention.output",
    "*.feed_forward.activation",
    "*.feed_forward.outer",
    "pooling",
    "pooler.output",
)


def of_dropout(question: Question) -> Iterator[Hypothesis]:
    if question.is_tap(DROPPED):
        base: Array = np.zeros_like(question.actual)
    elif question.is_tap(RESIDUALS):
        base = question.entered
    else:
        return
    right, actual, sigma = question.right.value - base, question.actual - base, question.right.sigma
    if not np.isfinite(actual).all() or not np.isfinite(right).all():
        return
    visible = abs(right) > 2 * Z * sigma
    dropped = visible & (abs(actual) <= Z * sigma)
    remaining = visible & ~dropped
    if dropped.sum() < 2 or remaining.sum() < 5:
        return
    factor = float((actual[remaining] * right[remaining]).sum() / np.square(right[remaining]).sum())
    if factor > 1 and within(np.where(remaining, actual - factor * right, 0.0), factor * sigma):
        share = 1 - 1 / factor
        expected = share * visible.sum()
        # The factor and the share of zeros must match, within 5 deviations of a random draw.
        if abs(dropped.sum() - expected) <= 5 * math.sqrt(expected) + 1:
            yield Hypothesis("dropout", f"dropout of {100 * share:.3g} % left on", "DRP-1")


# Usual dropout rates.
SHARES = (0.1, 0.2, 0.5, 0.3, 0.4, 0.25, 0.15, 0.05)

# Maximum number of keys for which every combination of kept and dropped weights is tried, since there are
# 2^keys.
MOST_KEYS = 12


def of_dropped_weights(question: Question) -> Iterator[Hypothesis]:
    """Recognize contexts that use only some keys, with weights scaled up."""
    if not question.is_tap(("*attention.context",)):
        return
    tap, config, exact = question.tensor, question.config, question.exact
    prefix = tap.rpartition(".")[0]
    weights = exact.now.get(f"{prefix}.masked_weights", exact.now[f"{prefix}.weights"]).value  # (B, H, Q, S)
    values = (exact.now.get(f"{prefix}.value") or exact.given["value"]).value  # (B, S, H, K)
    batch, heads, queries, keys = weights.shape
    if keys > MOST_KEYS:
        return
    combinations = (np.arange(2**keys)[:, None] >> np.arange(keys)) % 2
    actual, sigma = (
        np.broadcast_to(x, question.actual.shape).reshape(batch, queries, heads, config.head_dim)
        for x in (question.actual, question.right.sigma)
    )
    rates, full_count = list(SHARES), 0
    for b, h, q in np.ndindex(batch, heads, queries):
        possible = combinations @ (weights[b, h, q][:, None] * values[b, :, h])  # (2^S, K)
        fits = {
            rate: (abs(actual[b, q, h] - possible / (1 - rate)) <= Z * sigma[b, q, h] / (1 - rate)).min(-1)
            for rate in rates
        }
        rates = [rate for rate in rates if fits[rate].any()]
        full_count += sum(bool(fits[rate][-1]) for rate in rates[:1])  # the last combination keeps every key
        if not rates:
            return
    if len(rates) == 1 and full_count <= batch * heads * queries - 2:
        yield Hypothesis(
            "dropout", f"dropout of {100 * rates[0]:.3g} % of the attention weights left on", "DRP-1"
        )


# A variance that loses digits.


def of_cancellation(question: Question) -> Iterator[Hypothesis]:
    """Recognize rows stretched by a factor that the rounding of E[x²] - E[x]² explains."""
    if not question.is_tap(NORMS):
        return
    text = "a variance computed as E[x²] - E[x]²"
    hypothesis = Hypothesis(
        "variance_by_squares", text, "NRM-2", change=Change(taps=(question.tensor,), edit=variance_by_squares)
    )
    prediction = question.predict(hypothesis)
    error = question.actual - question.right.value
    norm = norm_of(question.config.norm_sharing, question.tensor)
    centred = question.right.value - question.case.weights[f"{norm}.bias"].astype(np.float64)  # minus beta
    stretch = (error * centred).sum(-1, keepdims=True) / np.square(centred).sum(-1, keepdims=True)
    if (
        np.isfinite(stretch).all()
        and within(error, prediction.sigma)
        and clear(error, error - stretch * centred, question.right.sigma)
        and root_mean_square(error) >= LEAST * root_mean_square(prediction.sigma)
        # If the formula loses no digits, it is as good as any other.
        and root_mean_square(prediction.sigma) >= R * root_mean_square(question.right.sigma)
    ):
        yield hypothesis


# Weights.


def of_recovered(question: Question) -> Iterator[Hypothesis]:
    if not question.is_tap(LINEAR) or (
        question.config.qkv_activation == "relu" and question.is_tap(PROJECTIONS)
    ):
        return
    name = parameters_of(question.tensor)
    weight = question.case.weights[f"{name}.weight"].astype(np.float64)  # (in, out)
    # float64 suffices, since these errors are far above rounding; linear algebra has no wider type.
    inputs = question.entered.reshape(-1, len(weight)).astype(np.float64)
    right, sigma, error = (
        np.broadcast_to(array, question.actual.shape).reshape(len(inputs), -1).astype(np.float64)
        for array in (question.right.value, question.right.sigma, question.actual - question.right.value)
    )  # (N, out)
    if len(inputs) > 2 and np.isfinite(error).all() and np.isfinite(sigma).all():
        yield from _of_element(name, weight, inputs, right, error, sigma)
        yield from _of_order(question, name, weight, inputs, error)


def _of_element(
    name: str, weight: Array, inputs: Array, right: Array, error: Array, sigma: Array
) -> Iterator[Hypothesis]:
    wrong = [i for i in range(error.shape[1]) if not within(error[:, i], sigma[:, i])]
    if len(wrong) != 1 or not within(np.delete(error, wrong, axis=1), np.delete(sigma, wrong, axis=1)):
        return
    (column,) = wrong
    error, sigma = error[:, column], sigma[:, column]
    elements = []
    # The last two candidates represent other causes, the bias and a factor of the column: if either fits, the
    # weight is correct.
    for row, factor in enumerate((*inputs.T, np.ones(len(inputs)), right[:, column])):
        power = float(np.square(factor / sigma).sum())
        change = float((factor / sigma * (error / sigma)).sum()) / power if power > 0 else 0.0
        if power > 0 and clear(error, error - factor * change, sigma):
            elements.append((row, change))
    if len(elements) != 1 or elements[0][0] >= len(weight):
        return
    row, change = elements[0]
    if weight[row, column] + change != weight[row, column]:
        number = instead_of(float(weight[row, column] + change), float(weight[row, column]))
        yield Hypothesis("weight_element", f"`{name}.weight` at {(row, column)} being {number}", "WGT-4")


def _of_order(
    question: Question, name: str, weight: Array, inputs: Array, error: Array
) -> Iterator[Hypothesis]:
    """Yield the permutation of rows or columns nearest to the least-squares weight."""
    design = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)  # the last represents the bias
    if len(design) < 2 * design.shape[1]:
        return
    change = np.linalg.lstsq(design, error, rcond=1e-6)[0]
    for axis, word in ((0, "rows"), (1, "columns")):
        old, new = (np.moveaxis(array, axis, 0) for array in (weight, weight + change[:-1]))
        source = np.array([int(np.square(old - line).sum(1).argmin()) for line in new])
        moved = np.flatnonzero(source != np.arange(len(source)))
        if moved.size and len(set(source.tolist())) == len(source):
            text = f"{word} {few(moved)} of `{name}.weight` in a different order"
            permuted = {f"{name}.weight": partial(np.take, weight, source, axis)}
            hypothesis = loaded("weight_permuted", text, "WGT-2", permuted)
            prediction = question.predict(hypothesis)
            if within(question.actual - prediction.value, prediction.sigma):
                yield hypothesis
