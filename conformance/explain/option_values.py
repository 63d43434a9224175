"""Hypotheses about the values of options."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change, fits
from concord.conformance.bugs.lookups import table_of
from concord.conformance.bugs.norms import NORMS, RESIDUALS
from concord.conformance.explain.fitting import power
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis, options
from concord.conformance.explain.question import Question
from concord.spec import config as spec
from concord.spec.arrays import Array
from concord.spec.masks import visible_keys
from concord.spec.tensors import OF_IDS

EPSILONS = (1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
RARE_EPSILONS = tuple(factor * epsilon for epsilon in EPSILONS for factor in (2.0, 5.0))
LOWEST = -3.4028234663852886e38
CONSTANTS = (
    *(-1e4, -1e5, -1e6, -1e9, -1e10, -1e12, -4294967295.0, -4294967296.0),
    *(-65504.0, -1e30, -100.0, -1000.0, LOWEST),
)
BY_IDS = (*OF_IDS, "stack")

# Patterns of the taps that the clauses of a group may affect.
STEPS: Mapping[str, tuple[str, ...]] = {
    "EMB": ("embeddings.*",),
    "POS": ("embeddings.position",),
    "MSK": ("*.masked_scores", "*.masked_weights", "*.context"),
    "ATT": ("*attention.*",),
    "NRM": (*NORMS, *RESIDUALS, *PROJECTIONS, "*.feed_forward.inner"),
    "FFN": ("*.feed_forward.activation",),
    "HED": ("pooling", "pooler.*", "normalized", "logits"),
    "LOS": ("loss", "losses"),
}
# Configuration fields that each clause specifies.
CLAUSES = {
    "EMB-2": ("embedding_scale",),
    "EMB-3": ("token_padding_forward", "token_padding_row"),
    "POS-2": ("position_layout",),
    "POS-3": ("position_exponent",),
    "POS-4": ("position_base",),
    "POS-5": ("position_start",),
    "POS-6": ("position_of_padding",),
    "MSK-1": ("pad_id",),
    "MSK-2": ("mask_value",),
    "MSK-3": ("mask_fill",),
    "MSK-7": ("mask_assignment",),
    "MSK-8": ("query_mask",),
    "ATT-1": ("qkv_activation",),
    "NRM-1": ("norm_placement",),
    "NRM-2": ("norm_epsilon",),
    "NRM-3": ("norm_epsilon_placement",),
    "NRM-4": ("norm_variance",),
    "FFN-2": ("activation",),
    "HED-1": ("pooling",),
    "HED-2": ("pooler",),
    "HED-5": ("length_epsilon",),
    "LOS-3": ("ignore_label",),
    "LOS-4": ("l2_weight",),
}
# Fields that may have a different value in a derivative while the forward pass is correct.
DIFFERENTIATED = (
    *("norm_epsilon", "norm_epsilon_placement", "norm_variance", "qkv_activation", "mask_fill", "activation"),
    *("ignore_label", "l2_weight"),
)

FIELDS = {name: clause for clause, names in CLAUSES.items() for name in names}


def values(question: Question, name: str) -> Sequence[Any]:
    """Candidate values of a field, including the correct one."""
    config, by_ids = question.config, question.case.part in BY_IDS
    # An id that does not occur masks nothing, and therefore explains nothing.
    occurring = set(question.case.batch.required("input_ids").reshape(-1).tolist()) if by_ids else set()
    numbers: dict[str, Sequence[Any]] = {
        "norm_epsilon": EPSILONS,
        "length_epsilon": EPSILONS[:-2],
        "mask_value": CONSTANTS,
        "position_base": (100.0, 1e3, 1e4, 1e5, 5e5, 1e6),
        "position_start": (0, 1, config.pad_id, config.pad_id + 1),
        "pad_id": sorted(occurring & {0, 1, 2, 3}),
        "token_padding_row": sorted(occurring & {0, 1, 2, 3}),
        "ignore_label": (None, *range(config.num_classes if config.num_classes > 1 else 0)),
        "l2_weight": (0.0, 2 * config.l2_weight, 0.5 * config.l2_weight, 0.1, 0.01, 0.001, 1e-4),
    }
    return spec.CHOICES.get(name) or numbers[name]


def of_options(question: Question, tap: str) -> Iterator[Hypothesis]:
    config = question.config
    for name, clause in FIELDS.items():
        if fits(tap, STEPS[clause[:3]]) and (clause[:3] != "LOS" or question.case.part == "model"):
            # A row matters only if rows are zeroed, and zeroing needs a row.
            row = config.pad_id if config.token_padding_row is None else config.token_padding_row
            companions: dict[str, dict[str, Any]] = {
                "token_padding_forward": {"token_padding_row": row},
                "token_padding_row": {"token_padding_forward": "zero"},
            }
            for option in options(config, name, values(question, name), clause, **companions.get(name, {})):
                # A fixed table is stored with the weights: changing only the configuration would have no
                # effect.
                table = clause in OF_TABLE and config.positions == "sinusoidal"
                yield replace(option, fields={}, change=_with_table(option.fields)) if table else option
    if fits(tap, NORMS):
        for hypothesis in options(config, "norm_epsilon", RARE_EPSILONS, "NRM-2"):
            yield replace(hypothesis, rare=True)


# Clauses about the contents of a position table.
OF_TABLE = ("POS-2", "POS-3", "POS-4")


def _with_table(fields: Mapping[str, Any]) -> Change:
    return Change(taps=("embeddings.position",), edit=lambda m: table_of(m, **fields))


def of_derivatives(question: Question) -> Iterator[Hypothesis]:
    config = question.config
    for name in DIFFERENTIATED:
        if FIELDS[name][:3] != "LOS" or question.case.part == "model":
            yield from options(config, name, values(question, name), FIELDS[name])
    table = str(question.parameter).removesuffix(".weight")
    rows = (None, *sorted({0, 1, config.pad_id}))
    segments = (None, *range(config.num_segments or 0))
    for tap, name, choices, clause in (
        ("embeddings.token", "token_padding_row", rows, "EMB-4"),
        ("embeddings.position", "position_padding_row", rows, "POS-7"),
        ("embeddings.segment", "segment_padding_row", segments, "EMB-5"),
    ):
        if table == tap:
            yield from options(config, name, choices, clause)


def of_fitted_epsilon(question: Question) -> Iterator[Hypothesis]:
    for placement in ("inside", "outside"):

        def left(exponent: Array, placement: str = placement) -> Array:
            fields = {"norm_epsilon": 10.0 ** float(exponent[0]), "norm_epsilon_placement": placement}
            return (question.actual - question.values(Hypothesis("", "", "", fields))).reshape(-1)

        with contextlib.suppress(*INAPPLICABLE):
            value = float(f"{10.0 ** power(left):.4g}")
            for option in options(
                question.config, "norm_epsilon", (value,), "NRM-2", norm_epsilon_placement=placement
            ):
                suffix = (
                    "" if placement == question.config.norm_epsilon_placement else f" {placement} the root"
                )
                yield replace(option, text=f"{option.text}{suffix}", rare=True)


def of_other_constants(question: Question, tap: str) -> Iterator[Hypothesis]:
    exact = question.exact
    scores = exact.now[f"{tap.rpartition('.')[0]}.scores"].value
    visible = visible_keys(question.config, exact.context.real, scores.shape[1])
    hidden = ~np.broadcast_to(visible, scores.shape)
    if question.tensor != tap or not hidden.any() or not np.isfinite(question.actual).all():
        return
    for fill, constants in (("replace", question.actual), ("add", question.actual - scores)):
        # The middle element instead of a mean of two: the sum of two lowest values is infinite.
        constant, width = (
            float(np.sort(constants[hidden])[hidden.sum() // 2]),
            float(np.ptp(constants[hidden])),
        )
        # Choose the fewest digits within the spread of scores. Near the end of the range, fewer digits may
        # give infinity.
        candidates = (float(f"{constant:.{digits}g}") for digits in range(1, 18))
        value = next(
            (
                candidate
                for candidate in candidates
                if abs(candidate - constant) <= width and math.isfinite(candidate)
            ),
            constant,
        )
        for option in options(question.config, "mask_value", (value,), "MSK-2", mask_fill=fill):
            suffix = "" if fill == question.config.mask_fill else f" and mask_fill = {fill}"
            yield replace(option, text=f"{option.text}{suffix}", rare=True)
