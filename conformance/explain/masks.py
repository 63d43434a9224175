"""Mistakes in masks (SPEC MSK-1 to MSK-8)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Step
from concord.spec.masks import mask_constant, visible_keys
from concord.spec.tape import Node
from concord.spec.tensors import OF_IDS

Flags = NDArray[np.bool_]

LOWEST = -3.4028234663852886e38
CONSTANTS = (
    -1e4,
    -1e5,
    -1e6,
    -1e9,
    -1e10,
    -1e12,
    -4294967295.0,
    -4294967296.0,
    -65504.0,
    -1e30,
    -100.0,
    -1000.0,
    LOWEST,
)


def masked(
    m: Step,
    tap: str,
    visible: Flags | None = None,
    fill: Callable[[Step, Node, Flags, float], Node] | None = None,
) -> Node:
    """Return masked scores, by another mask or another way to apply it."""
    scores = m.beside(tap, "scores")
    if visible is None:
        visible = visible_keys(m.config, m.key_mask(), scores.shape[1])
    return (fill or filled)(m, scores, visible, mask_constant(m.config, m.dtype))


def filled(m: Step, scores: Node, visible: Flags, constant: float) -> Node:
    """MSK-3."""
    if m.config.mask_fill == "replace":
        return m.a.replace(scores, visible, constant)
    return m.a.add_where(scores, visible, constant, rounded=m.dtype)


def of_masked_scores(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with masked scores."""
    config = question.config
    yield from options(config, "mask_value", CONSTANTS, "MSK-2")
    yield from options(config, "mask_fill", ("replace", "add"), "MSK-3")
    yield from options(config, "mask_assignment", ("per_sample", "batch_major"), "MSK-7")
    if question.case.part in (*OF_IDS, "stack"):
        yield from of_pad_id(question)
        yield from by_ids()
    yield from by_other_masks()
    yield from by_other_filling(question)


def of_other_constants(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what mask_value must have been, read off the masked scores themselves."""
    scores = question.exact.beside(tap, "scores").value
    hidden = ~np.broadcast_to(
        visible_keys(question.config, question.exact.key_mask(), scores.shape[1]), scores.shape
    )
    if question.tensor != tap or not hidden.any() or not np.isfinite(question.actual).all():
        return
    for fill, shown in (("replace", question.actual), ("add", question.actual - scores)):
        middle = np.sort(shown[hidden])[
            hidden.sum() // 2
        ]  # no mean of two: of the lowest numbers it is infinite
        constant, width = float(middle), float(np.ptp(shown[hidden]))
        # The shortest number that all of them may have been made of; near the end of the range a shorter one may be infinite.
        shorter = (float(f"{constant:.{digits}g}") for digits in range(1, 18))
        value = next(
            (short for short in shorter if abs(short - constant) <= width and math.isfinite(short)), constant
        )
        for option in options(question.config, "mask_value", (value,), "MSK-2", mask_fill=fill):
            text = (
                option.text if fill == question.config.mask_fill else f"{option.text} and mask_fill = {fill}"
            )
            yield dataclasses.replace(option, text=text, rare=True)


def mask(name: str, text: str, visible: Callable[[Step, Flags], Flags], clause: str = "MSK-4") -> Hypothesis:
    """Return the hypothesis of another mask, made of the right one: (B, S) or (B, Q, S)."""

    def change(m: Step, tap: str, y: Node) -> Node:
        heads = m.beside(tap, "scores").shape[1]
        return masked(m, tap, visible_keys(m.config, visible(m, m.key_mask()), heads))

    return changed(name, text, clause, change)


def by_other_masks() -> Iterator[Hypothesis]:
    """Yield other masks."""

    def square(flags: Flags, queries: int) -> Flags:
        """Return (B, Q, S)."""
        return np.broadcast_to(
            flags[:, None] if flags.ndim == 2 else flags, (len(flags), queries, flags.shape[-1])
        )

    def queries(m: Step) -> int:
        return int(m.query_mask().shape[1])

    def causal(m: Step, flags: Flags) -> Flags:
        whole = square(flags, queries(m))
        return whole & (np.tri(*whole.shape[1:]) > 0)

    def on_queries(m: Step, flags: Flags) -> Flags:
        return np.broadcast_to(m.query_mask()[:, :, None], (len(flags), queries(m), flags.shape[-1]))

    yield mask("mask_ignored", "no mask at all", lambda m, flags: np.ones_like(flags), "MSK-1")
    yield mask("mask_inverted", "a mask that hides what is visible", lambda m, flags: ~flags, "MSK-1")
    for shift, side in ((1, "right"), (-1, "left")):
        yield mask("mask_shifted", f"a mask that stands one token too far to the {side}", _rolled(shift))
        yield mask(
            "mask_shifted",
            f"a mask that stands one token too far to the {side}, and shows what it leaves free",
            _shifted(shift, True),
        )
        yield mask(
            "mask_shifted",
            f"a mask that stands one token too far to the {side}, and hides what it leaves free",
            _shifted(shift, False),
        )
    yield mask("mask_causal", "a mask that hides later tokens too", causal)
    yield mask(
        "mask_causal",
        "a mask that hides later tokens instead of padding",
        lambda m, flags: causal(m, np.ones_like(flags)),
    )
    yield mask("mask_on_queries", "a mask of queries instead of keys", on_queries)
    yield mask(
        "mask_on_queries",
        "a mask of queries as well as keys",
        lambda m, flags: on_queries(m, flags) & square(flags, queries(m)),
    )
    yield mask(
        "mask_of_other_sample",
        "the mask of the first sample for all",
        lambda m, flags: np.broadcast_to(flags[:1], flags.shape),
        "MSK-7",
    )
    yield mask(
        "mask_of_other_sample",
        "the mask of the sample before",
        lambda m, flags: np.roll(flags, 1, axis=0),
        "MSK-7",
    )
    yield mask(
        "mask_of_other_sample",
        "the mask of the sample after",
        lambda m, flags: np.roll(flags, -1, axis=0),
        "MSK-7",
    )
    yield mask("mask_reversed", "a mask of the tokens in reverse order", lambda m, flags: flags[..., ::-1])


def _rolled(shift: int) -> Callable[[Step, Flags], Flags]:
    return lambda m, flags: np.roll(flags, shift, axis=-1)


def _shifted(shift: int, free: bool) -> Callable[[Step, Flags], Flags]:
    def shifted(m: Step, flags: Flags) -> Flags:
        moved = np.roll(flags, shift, axis=-1)
        moved[..., 0 if shift > 0 else -1] = free
        return moved

    return shifted


def of_pad_id(question: Question) -> Iterator[Hypothesis]:
    """Yield other ids of padding; one that does not occur would mask nothing."""
    occurring = set(question.case.batch.required("input_ids").reshape(-1).tolist())
    yield from options(question.config, "pad_id", sorted(occurring & {0, 1, 2, 3}), "MSK-1")


def by_ids() -> Iterator[Hypothesis]:
    """Yield masks that are made of ids in another way."""

    def by_length(m: Step, flags: Flags) -> Flags:
        shorter: Flags = np.arange(flags.shape[1]) < flags.sum(axis=1, keepdims=True)
        return shorter

    def to_last(m: Step, flags: Flags) -> Flags:
        return np.maximum.accumulate(flags[:, ::-1], axis=1)[:, ::-1]

    def to_first_padding(m: Step, flags: Flags) -> Flags:
        return np.minimum.accumulate(flags, axis=1)

    yield mask("mask_by_length", "a mask by the number of real tokens instead of ids", by_length, "MSK-1")
    yield mask("mask_by_length", "a mask that ends at the last real token", to_last, "MSK-1")
    yield mask("mask_by_length", "a mask that ends at the first padding", to_first_padding, "MSK-1")
    yield mask(
        "mask_by_id",
        "a mask of ids above that of padding",
        lambda m, flags: m.batch.required("input_ids") > m.config.pad_id,
        "MSK-1",
    )


def by_other_filling(question: Question) -> Iterator[Hypothesis]:
    """Yield other ways to apply the mask."""

    def filling(
        name: str, text: str, fill: Callable[[Step, Node, Flags, float], Node], clause: str = "MSK-3"
    ) -> Hypothesis:
        return changed(name, text, clause, lambda m, tap, y: masked(m, tap, fill=fill))

    def divided(m: Step, scores: Node, visible: Flags, constant: float) -> Node:
        root = float(np.sqrt(m.config.head_dim))
        return m.a.divide_by(filled(m, m.a.scale(scores, root), visible, constant), root)

    yield filling(
        "mask_value_infinite",
        "minus infinity instead of mask_value",
        lambda m, s, v, c: m.a.replace(s, v, float("-inf")),
        "MSK-6",
    )
    yield filling(
        "mask_multiplied", "scores that are multiplied by the mask", lambda m, s, v, c: m.a.replace(s, v, 0.0)
    )
    yield filling(
        "mask_value_positive",
        "a mask_value without its sign",
        lambda m, s, v, c: filled(m, s, v, -c),
        "MSK-2",
    )
    yield filling(
        "mask_added_twice",
        "a mask that is added twice",
        lambda m, s, v, c: filled(m, filled(m, s, v, c), v, c),
    )
    yield filling("scale_after_mask", "a mask that is applied before the scores are scaled", divided, "ATT-4")
    yield changed(
        "mask_everywhere",
        "mask_value added to every score",
        "MSK-3",
        lambda m, tap, y: m.a.shift(m.beside(tap, "scores"), mask_constant(m.config, m.dtype)),
    )


def of_masked_weights(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the overwritten weights of padded queries."""

    def weights(name: str, text: str, made: Callable[[Step, Node, Flags, float], Node]) -> Hypothesis:
        def change(m: Step, tap: str, y: Node) -> Node:
            return made(
                m,
                m.beside(tap, "weights"),
                m.query_mask()[:, None, :, None],
                mask_constant(m.config, m.dtype),
            )

        return changed(name, text, "MSK-8", change)

    yield weights("query_mask", "query_mask = none instead of overwrite", lambda m, w, real, c: w)
    yield weights(
        "query_mask_zero",
        "0 instead of mask_value as the weights of padded queries",
        lambda m, w, real, c: m.a.replace(w, real, 0.0),
    )
    yield weights(
        "query_mask_inverted",
        "the weights of real queries overwritten",
        lambda m, w, real, c: m.a.replace(w, ~real, c),
    )
    yield weights(
        "query_mask_on_keys",
        "the weights of padded keys overwritten",
        lambda m, w, real, c: m.a.replace(w, visible_keys(m.config, m.key_mask(), w.shape[1]), c),
    )
    yield from options(question.config, "mask_value", CONSTANTS, "MSK-2")
    if question.case.part in (*OF_IDS, "stack"):
        yield from of_pad_id(question)
