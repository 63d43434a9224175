"""Every right variation.

A way to compute a step that the specification admits, and that must not be flagged.
"""

from __future__ import annotations

from dataclasses import dataclass

from concord.conformance.variations import arithmetic as steps
from concord.conformance.variations import models
from concord.spec.arithmetic import Arithmetic
from concord.spec.model import Model


@dataclass(frozen=True)
class Variation:
    """A right way to compute a step, other than the reference's.

    Attributes:
        name: unique, in words joined by underscores.
        clause: of SPEC.md that admits it.
        what: what it does, in one sentence.
        arithmetic: the operations, in NumPy numbers of the precision.
        model: the steps that are made of several operations.
        fused: whether weights stay inside attention, and are not delivered (ALG-2, ALG-3).
    """

    name: str
    clause: str
    what: str
    arithmetic: type[Arithmetic] = Arithmetic
    model: type[Model] = Model
    fused: bool = False


ALL: tuple[Variation, ...] = (
    Variation(
        "softmax_running",
        "ALG-1",
        "Softmax in blocks of keys with a running maximum.",
        steps.softmax(steps.running),
    ),
    Variation(
        "softmax_running_backwards",
        "ALG-1",
        "The same from the last key to the first.",
        steps.softmax(steps.running_backwards),
    ),
    Variation(
        "softmax_by_logarithm",
        "ALG-1",
        "Softmax as the exponential of log-softmax.",
        steps.softmax(steps.by_logarithm),
    ),
    Variation(
        "softmax_by_reciprocal",
        "ALG-1",
        "Softmax with one reciprocal for each row.",
        steps.softmax(steps.by_reciprocal),
    ),
    Variation(
        "softmax_by_powers_of_two",
        "ALG-1",
        "Softmax from powers of two of scores times log2(e).",
        steps.softmax(steps.by_powers_of_two),
    ),
    Variation(
        "softmax_backward_multiplied_out",
        "ALG-3",
        "The derivative of softmax as g w - w sum(g w).",
        steps.softmax(backward=steps.multiplied_out),
    ),
    Variation(
        "softmax_recomputed",
        "ALG-3",
        "The backward pass computes weights again from the log-sum-exp.",
        steps.softmax(weights=steps.from_normalizer),
    ),
    Variation(
        "softmax_through_largest",
        "ALG-3",
        "The derivative flows through the largest entry too, equal ones share it.",
        steps.softmax(backward=steps.through_largest(steps.in_equal_shares)),
    ),
    Variation(
        "softmax_through_first_largest",
        "ALG-3",
        "The same, and the first of equal ones gets it.",
        steps.softmax(backward=steps.through_largest(steps.of_the_first)),
    ),
    Variation(
        "softmax_through_each_largest",
        "ALG-3",
        "The same, and every one of equal ones gets it whole.",
        steps.softmax(backward=steps.through_largest(steps.of_each)),
    ),
    Variation(
        "softmax_running_through_largest",
        "ALG-3",
        "The derivative flows through a running maximum too.",
        steps.softmax(steps.running, backward=steps.through_running),
    ),
    Variation(
        "attention_in_blocks",
        "ALG-2",
        "The context accumulates over blocks of keys, and is divided at the end.",
        steps.attention(True, False, False),
        fused=True,
    ),
    Variation(
        "attention_row_sums_of_context",
        "ALG-3",
        "Row sums of the backward pass are of the context times its gradient.",
        steps.attention(False, False, True),
        fused=True,
    ),
    Variation(
        "attention_recomputed",
        "ALG-3",
        "The backward pass of attention computes weights again from the log-sum-exp.",
        steps.attention(False, True, False),
        fused=True,
    ),
    Variation(
        "attention_fused",
        "ALG-3",
        "All three: blocks, log-sum-exp, row sums of the context.",
        steps.attention(True, True, True),
        fused=True,
    ),
    Variation(
        "log_softmax_fused",
        "ALG-4",
        "Cross-entropy as one step: its gradient is softmax less one-hot.",
        steps.log_softmax(False),
    ),
    Variation(
        "log_softmax_from_normalizer", "ALG-4", "The logit less its log-sum-exp.", steps.log_softmax(True)
    ),
    Variation(
        "log_softmax_through_largest",
        "ALG-4",
        "The derivative flows through the largest logit too.",
        steps.log_softmax(False, steps.in_equal_shares),
    ),
    Variation("cross_entropy_softplus", "ALG-4", "Binary cross-entropy as softplus.", steps.Softplus),
    Variation(
        "norm_two_passes",
        "ALG-5",
        "Layer norm as one step, forward and backward.",
        model=models.norm(models.two_passes),
    ),
    Variation(
        "norm_corrected",
        "ALG-5",
        "The variance in two passes, corrected for the mean's own rounding.",
        model=models.norm(models.corrected),
    ),
    Variation(
        "norm_welford", "ALG-5", "Mean and variance by Welford's updates.", model=models.norm(models.welford)
    ),
    Variation(
        "norm_merged", "ALG-5", "The variance in blocks that are merged.", model=models.norm(models.merged)
    ),
    Variation(
        "norm_one_pass",
        "ALG-5",
        "The sum of squares less the square of the sum; rows on one side of zero less their first entry.",
        model=models.norm(models.one_pass(models.zero_or_first)),
    ),
    Variation(
        "norm_one_pass_from_farthest",
        "ALG-5",
        "The same of rows less the entry that is farthest from their mean.",
        model=models.norm(models.one_pass(models.farthest)),
    ),
    Variation(
        "norm_times_reciprocal",
        "ALG-5",
        "The reciprocal of the deviation is multiplied with.",
        model=models.norm(models.two_passes, models.times_reciprocal),
    ),
    Variation(
        "norm_gain_first",
        "ALG-5",
        "The gain is divided by the deviation first.",
        model=models.norm(models.welford, models.gain_first),
    ),
    Variation(
        "norm_multiplied_out",
        "ALG-5",
        "Row and mean are divided by the deviation one by one, forward and backward.",
        model=models.norm(models.two_passes, models.multiplied_out, models.of_products),
    ),
    Variation(
        "norm_fused_multiply_add",
        "ALG-5",
        "Gain and offset in one rounding.",
        model=models.norm(models.two_passes, models.fused_multiply_add),
    ),
    Variation("reciprocals", "ALG-5", "Every division and root by a reciprocal.", steps.Reciprocals),
    Variation(
        "gelu_erfc",
        "ALG-6",
        "GELU from erfc, its derivative in closed form.",
        model=models.activation(gelu_erf=models.gelu_erfc),
    ),
    Variation(
        "gelu_sigmoid",
        "ALG-6",
        "The tanh of GELU from the logistic function.",
        model=models.activation(gelu_tanh=models.gelu_sigmoid),
    ),
    Variation(
        "gelu_exponential",
        "ALG-6",
        "The tanh of GELU from one exponential.",
        model=models.activation(gelu_tanh=models.gelu_exponential),
    ),
    Variation(
        "tanh_exponential",
        "ALG-6",
        "tanh from exp(2x) - 1, its derivative as (1 - y)(1 + y).",
        steps.TanhByExponential,
    ),
    Variation("sums_sequential", "ALG-7", "Every sum term by term.", steps.sums(steps.total_sequential)),
    Variation(
        "sums_backwards",
        "ALG-7",
        "Every sum term by term from its end.",
        steps.sums(steps.total_sequential, -1),
    ),
    Variation(
        "sums_in_blocks", "ALG-7", "Every sum in several running sums.", steps.sums(steps.total_in_blocks)
    ),
    Variation("sums_pairwise", "ALG-7", "Every sum by halves.", steps.sums(steps.total_pairwise)),
    Variation(
        "sums_compensated",
        "ALG-7",
        "Every sum with its losses carried along.",
        steps.sums(steps.total_compensated),
    ),
    Variation("products_fused", "ALG-7", "Products by fused multiply-add.", steps.FusedMultiplyAdd),
    Variation("products_wide", "ALG-7", "Products summed in a wider precision.", steps.Wide),
    Variation("bias_first", "ALG-7", "A linear layer's sum begins with the bias.", steps.BiasFirst),
    Variation("bias_as_a_row", "ALG-7", "The bias is one more row of the weight.", steps.BiasAsARow),
    Variation(
        "embeddings_position_first",
        "ALG-7",
        "Position and segment vectors are added first.",
        model=models.PositionFirst,
    ),
    Variation(
        "scale_of_query", "ALG-8", "The scale is folded into the query.", model=models.scale(-0.5, 0, 0)
    ),
    Variation(
        "scale_of_both",
        "ALG-8",
        "Query and key are each multiplied by the root of the scale.",
        model=models.scale(-0.25, -0.25, 0),
    ),
    Variation(
        "scale_of_scores", "ALG-8", "Scores are multiplied by the scale.", model=models.scale(0, 0, -0.5)
    ),
    Variation("tables_one_hot", "ALG-9", "Rows of tables by products with one-hot rows.", steps.OneHot),
    Variation("tables_sorted", "ALG-9", "Gradients of tables by sorted sums.", steps.SortedRows),
    Variation(
        "tables_scattered", "ALG-9", "Gradients of tables scattered in another order.", steps.ScatteredRows
    ),
)
"""Every right variation."""

VARIATIONS: dict[str, Variation] = {variation.name: variation for variation in ALL}
"""Every right variation by name."""
