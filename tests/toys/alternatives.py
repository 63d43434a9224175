"""Allowed alternatives: ways to compute a step that no judge may flag.

Each is an edit of taps, the same for NumPy and the four frameworks. :mod:`tests.toys.algorithms` has those of
every sum, product or division.

Shapes: B batch, T tokens, Q queries, S keys, D d_model, H heads, K head_dim.
"""

import functools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from concord.backends.interface import Run
from concord.conformance.bugs import bug
from concord.conformance.bugs.attention import CONTEXT
from concord.conformance.bugs.bug import Bug, Change, where, with_constants
from concord.conformance.bugs.edited_model import Edited, Value
from concord.conformance.bugs.gradients import of_softmax, with_gradient_of
from concord.spec.arithmetic import Arithmetic
from concord.spec.encoder import Model
from concord.spec.reference import compute
from tests.toys import algorithms
from tests.toys.rounded import with_edits

# Entries of a block: few, so that small cases have several blocks.
BLOCK = 4


# Attention.


def size(x, axis):
    return int(tuple(x.shape)[axis])


def largest_of(m, x, axis=3, through=False):
    # With `through`, the derivative flows through the largest entry.
    maximum = m.max(x, axis)
    return maximum if through else m.stop_gradient(maximum)


def powers(m, x):
    return m.exp(x - largest_of(m, x))


def running(m, values=None, through=False, order=1):
    """Softmax in blocks of keys (B, H, Q, S), or with values their weighted sum (B, H, Q, K)."""
    scores, largest = m.unnormalised, None
    total = None
    result = None
    for first in range(0, size(scores, 3), BLOCK)[::order]:
        part = scores[:, :, :, first : first + BLOCK]
        top = largest_of(m, part, through=through)
        now = top if largest is None else m.where(top > largest, top, largest)
        exponentials = m.exp(part - now)
        summed = m.sum(exponentials, 3)
        new = exponentials
        if values is not None:
            new = m.einsum("bhqs,bshk->bhqk", exponentials, values[:, first : first + BLOCK])
        if largest is None:
            total, result = summed, new
        else:
            shrunk = m.exp(largest - now)
            total, result = total * shrunk + summed, result * shrunk
            result = m.concat([result, new][::order], 3) if values is None else result + new
        largest = now
    return result / total


def softmax_by_reciprocal(m):
    exponentials = powers(m, m.unnormalised)
    return exponentials * (1.0 / m.sum(exponentials, 3))


def log_sum_exp(m, x, axis=3, through=False):
    largest = largest_of(m, x, axis, through)
    return largest + m.log(m.sum(m.exp(x - largest), axis))


def sees(m):
    # Whether a query sees a key, (B, 1 or H, 1 or Q, 1).
    if m.batch.input_ids is None and m.batch.key_mask is None:  # attention alone, without a mask
        return np.ones((1, 1, 1, 1), bool)
    return m.visible.any(-1, keepdims=True)


def recomputed(m, weights):
    # The weights stay, and their derivative uses those from the log-sum-exp. Rows that see no key keep their
    # own.
    scores = m.unnormalised
    again = m.value_of(weights, m.exp(scores - log_sum_exp(m, scores)))
    return m.where(sees(m), again, weights)


def through_largest(m, share):
    # The derivative also flows through the subtracted maximum; `share` is the part of it for each entry.
    scores = m.stop_gradient(m.unnormalised)
    exponentials, shares = powers(m, scores), share(m, scores)
    total = m.sum(exponentials, 3)

    def pull(gradient, weights):
        shifted = (gradient / total - m.sum(gradient * weights / total, 3)) * exponentials
        return shifted - shares * m.sum(shifted, 3)

    return of_softmax(m, pull)


def are_largest(m, x):
    return m.where(x < m.max(x, 3), x * 0.0, x * 0.0 + 1.0)


def in_equal_shares(m, x):
    return are_largest(m, x) / m.sum(are_largest(m, x), 3)


def of_the_first(m, x):
    return are_largest(m, are_largest(m, x) * m.constant(np.arange(size(x, 3), 0.0, -1.0), x))


def joined(m, context):
    return m.reshape(m.transpose(context, (0, 2, 1, 3)), tuple(m.y.shape))


def divided_last(m, exponentials):
    """The derivative uses row sums of the context times its gradient."""
    summed = m.einsum("bhqs,bshk->bhqk", exponentials, m.beside("value"))
    return summed / m.sum(exponentials, 3)


def attention_fused(m):
    """Forward in blocks, and backward from the log-sum-exp where a query sees a key."""
    scores, visible = m.unnormalised, sees(m)
    shift = m.stop_gradient(m.where(visible, log_sum_exp(m, scores), m.max(scores, 3)))
    backward = divided_last(m, m.exp(scores - shift))
    return joined(m, m.value_of(running(m, m.beside("value")), backward))


def scaled(m, of_query, of_key):
    # The powers of the head's width by which query and key are multiplied.
    q, k = m.beside("query") * m.size(head_dim=of_query), m.beside("key") * m.size(head_dim=of_key)
    return m.scores(q, k, divisor=m.size(head_dim=of_query + of_key + 0.5))


# Layer norm.

# Each function returns the mean of rows and the sum of squared deviations from it.


def welford(m):
    x = m.x
    mean, squares = x[..., :1], x[..., :1] * 0.0
    for i in range(1, size(x, -1)):
        entry = x[..., i : i + 1]
        difference = entry - mean
        mean = mean + difference / float(i + 1)
        squares = squares + difference * (entry - mean)
    return mean, squares


def merged(m):
    x, mean, squares = m.x, None, None
    for first in range(0, size(x, -1), BLOCK):
        block = x[..., first : first + BLOCK]
        count = size(block, -1)
        own = m.mean(block, -1)
        within = m.sum((block - own) * (block - own), -1)
        if mean is None:
            mean, squares = own, within
        else:
            difference = own - mean
            squares = squares + within + difference * difference * (first * count / (first + count))
            mean = mean + difference * (count / (first + count))
    return mean, squares


def squares_about(m, mean):
    return mean, m.sum((m.x - mean) * (m.x - mean), -1)


def two_passes(m):
    return squares_about(m, m.sum(m.x * (1.0 / size(m.x, -1)), -1))


def corrected(m):
    """Subtract what rounding of the mean left in the squares."""
    mean, squares = two_passes(m)
    remainder = m.sum(m.x - mean, -1)
    return mean, squares - remainder * remainder / float(size(m.x, -1))


def one_pass(m, taken_off):
    # The mean of squares minus the square of the mean, after subtracting a number from each entry.
    deviations = m.x - taken_off
    mean = m.mean(deviations, -1)
    return taken_off + mean, (m.mean(deviations * deviations, -1) - mean * mean) * float(size(m.x, -1))


def zero_or_first(m):
    # Zero if it lies between a row's entries, otherwise the first of them.
    x = m.x
    first, lowest = x[..., :1], -m.max(-x, -1)
    return m.where(lowest > 0.0, first, m.where(m.max(x, -1) < 0.0, first, first * 0.0))


def farthest(m):
    # The entry of a row farthest from its mean.
    x = m.x
    mean = m.mean(x, -1)
    above, below = m.max(x, -1), -m.max(-x, -1)
    return m.where(above - mean > mean - below, above, below)


def times_reciprocal(x, mean, inverse, gain):
    return (x - mean) * inverse * gain


def gain_first(x, mean, inverse, gain):
    return (x - mean) * (inverse * gain)


def multiplied_out(x, mean, inverse, gain):
    # One product for both terms, as in TensorFlow's batch_normalization: their gradients cancel row by row.
    scale = inverse * gain
    return x * scale - mean * scale


def norm(
    m,
    mean,
    squares,
    normed=times_reciprocal,
):
    # `normed` gets rows, their mean, the reciprocal of their deviation, and the gain.
    count = float(m.config.d_model - (m.config.norm_variance == "unbiased"))
    gained = normed(m.x, mean, 1.0 / m.deviation(squares / count), m.weight(f"{m.owner}.weight"))
    return gained + m.weight(f"{m.owner}.bias")


def norm_closed_form(m):
    gain, offset = m.weight(f"{m.owner}.weight"), m.weight(f"{m.owner}.bias")
    centered = m.x - m.mean(m.x, -1)
    count = float(m.config.d_model - (m.config.norm_variance == "unbiased"))
    deviation = m.stop_gradient(m.deviation(m.sum(centered * centered, -1) / count))
    row = m.stop_gradient(centered) / deviation

    def pull(gradient):
        inside = m.config.norm_epsilon_placement == "inside"
        root = deviation if inside else deviation - m.config.norm_epsilon
        along = m.sum(gradient * row, -1) / count * (deviation / root)
        return (gradient - m.mean(gradient, -1) - row * along) / deviation

    through = m.with_gradient(m.x, pull)
    return with_gradient_of(m, through * m.stop_gradient(gain) + row * gain + offset)


# Other steps.


def embeddings_position_first(m):
    first = m.beside("position")
    return (m.beside("segment") + first if m.config.num_segments else first) + m.beside("token")


def gelu_sigmoid(m):
    x = m.x
    return x * m.sigmoid(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)))


def gelu_exponential(m):
    # The tanh by one exponential: 1 - 2 / (exp(2 z) + 1).
    x = m.x
    twice = m.within(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)), -80.0, 80.0)
    return x * 0.5 * (2.0 - 2.0 / (m.exp(twice) + 1.0))


def bias_first(m):
    """Starts a layer's sum with the bias, then adds both halves of the products."""
    x, weight = m.x, m.weight(f"{m.tap}.weight")
    half = size(x, -1) // 2
    return (m.weight(f"{m.tap}.bias") + x[..., :half] @ weight[:half]) + x[..., half:] @ weight[half:]


def log_softmax_fused(m):
    # The derivative is one step: what flows back, minus softmax times its sum.
    logits, chance = m.now["logits"], m.stop_gradient(m.softmax(m.now["logits"], 1))
    return m.value_of(m.y, m.with_gradient(logits, lambda gradient: gradient - chance * m.sum(gradient, 1)))


def from_normalizer(m, through=False):
    return m.now["logits"] - log_sum_exp(m, m.now["logits"], 1, through)


EDITS = {
    "softmax_by_logarithm": lambda m: m.exp(m.log_softmax(m.unnormalised, 3)),
    "softmax_backward_multiplied_out": lambda m: of_softmax(m, lambda g, w: g * w - w * m.sum(g * w, 3)),
    "softmax_through_largest": lambda m: through_largest(m, in_equal_shares),
    "softmax_through_each_largest": lambda m: through_largest(m, are_largest),
    "softmax_through_first_largest": lambda m: through_largest(m, of_the_first),
    "softmax_recomputed": lambda m: recomputed(m, m.y),
    "attention_recomputed": lambda m: m.context(recomputed(m, m.beside("weights"))),
    "attention_in_blocks": lambda m: joined(m, running(m, m.beside("value"))),
    "attention_row_sums_of_context": lambda m: joined(m, divided_last(m, powers(m, m.unnormalised))),
    "norm_two_passes": lambda m: norm(m, *two_passes(m)),
    "norm_corrected": lambda m: norm(m, *corrected(m)),
    "norm_welford": lambda m: norm(m, *welford(m)),
    "norm_merged": lambda m: norm(m, *merged(m)),
    "norm_one_pass": lambda m: norm(m, *one_pass(m, zero_or_first(m))),
    "norm_one_pass_from_farthest": lambda m: norm(m, *one_pass(m, farthest(m))),
    "norm_times_reciprocal": lambda m: norm(m, *squares_about(m, m.mean(m.x, -1))),
    "norm_gain_first": lambda m: norm(m, *welford(m), gain_first),
    "norm_multiplied_out": lambda m: norm(m, *two_passes(m), multiplied_out),
    "sums_sequential": algorithms.sums(algorithms.total_sequential),
    "sums_backwards": algorithms.sums(algorithms.total_sequential, -1),
    "sums_in_blocks": algorithms.sums(algorithms.total_in_blocks),
    "sums_pairwise": algorithms.sums(algorithms.total_pairwise),
    "sums_compensated": algorithms.sums(algorithms.total_compensated),
    "tables_one_hot": algorithms.tables(algorithms.added_by_products),
    "tables_sorted": algorithms.tables(algorithms.added_by_row),
    "tables_scattered": algorithms.tables(algorithms.added_in_reverse),
    "scale_of_scores": lambda m: m.scores(divisor=1.0) * m.config.head_dim**-0.5,
}


# In NumPy, and in the frameworks.


@dataclass(frozen=True, kw_only=True)
class Algorithm(Change):
    """Edits of taps, or an arithmetic or model for NumPy only."""

    arithmetic: type[Arithmetic] = Arithmetic
    model: type[Model] | None = None


class OneStep(Edited):
    """Computes each edit as one operation: half precisions round only its result, in both directions."""

    def made(self, edit, name, tensor):
        inner = Arithmetic("float64" if self.dtype == "float64" else "float32")
        leaves = {}

        def inside(node):
            return Value(inner, leaves.setdefault(id(node), (node, inner.leaf(node.value)))[1])

        context = self.seen_by(inner, inside)
        context.tap, context.y = name, inside(tensor)
        result = edit(context).tensor
        gradients = {}

        def pulled(key, gradient):
            if not gradients:
                inner.backward(inner.sum(inner.multiply(result, inner.leaf(gradient))))
                for node_id, (node, leaf) in leaves.items():
                    gradients[node_id] = np.zeros_like(node.value) if leaf.gradient is None else leaf.gradient
            return self.a.settle(gradients[key])

        operands = [(node, functools.partial(pulled, key)) for key, (node, _) in leaves.items()]
        return self.a._record(self.a.settle(result.value), *operands)


def run(algorithm, job):
    dtype, arithmetic = job.dtype, algorithm.arithmetic(job.dtype)
    model = algorithm.model or with_edits(algorithm.at, OneStep, job.part)
    problem = (job.config, job.weights, job.batch)
    truth = compute(*problem, arithmetic, job.gradients, job.part, dtype, model=model)
    # The weights inside of a context that is computed differently are not exposed (SPEC ALG-2, ALG-3).
    hidden = "attention.weights" if algorithm.taps == (CONTEXT,) else "nothing"
    taps = {name: tap for name, tap in truth.taps.items() if not name.endswith(hidden)}
    gradients = {name: tap for name, tap in truth.tap_gradients.items() if not name.endswith(hidden)}
    info = {"device": "cpu", "not_exposed": [f"*{hidden}"]}
    return Run(
        truth.output, truth.loss, taps, truth.gradients, "alternatives", dtype, info, tap_gradients=gradients
    )


def _entries():
    namespace = {**vars(bug), **vars(algorithms), **globals(), **EDITS}
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items():
        edit, place = entry.get("edit", name), entry.get("place", "edit")
        if isinstance(edit, dict):
            ((edit, constants),) = edit.items()
            definition = with_constants(namespace[edit], constants)
        else:
            definition = namespace[edit]
        definition = where(definition, **entry["only_of"]) if "only_of" in entry else definition
        change = (
            definition
            if isinstance(definition, Change)
            else Algorithm(taps=tuple(entry.get("taps", ())), **{place: definition})
        )
        yield Bug(
            name=name, operation="alternatives", text=entry["text"], clause=entry["clause"], change=change
        )


ALTERNATIVES = {alternative.name: alternative for alternative in _entries()}
