"""Mistakes in gradients of parameters: what became of them afterwards, and which rows of a table count (SPEC GRD-1, GRD-2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.flow import multiplied, of_flow, unpadded
from concord.conformance.explain.hypothesis import Gradients, Hypothesis, changed, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Step
from concord.spec.masks import real_tokens
from concord.spec.parameters import trainable
from concord.spec.positions import position_ids
from concord.spec.tape import Node

Array = NDArray[np.floating]
Ids = NDArray[np.integer]

TOKEN, POSITION, SEGMENT = "embeddings.token", "embeddings.position", "embeddings.segment"

SMALL = 1e-6
"""How small a gradient beside another passes for none."""

DECAYS = (0.1, 0.05, 0.01, 5e-3, 1e-3, 5e-4, 1e-4, 1e-5)
LIMITS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0)


def of_gradient(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the gradient of a parameter."""
    yield from of_factor(question, parameter)
    yield from of_clipping(question, parameter)
    yield from of_others(question, parameter)
    if parameter in ("embeddings.token.weight", "embeddings.position.weight", "embeddings.segment.weight"):
        yield from of_rows(question, parameter.removesuffix(".weight"))
    yield from of_flow(question)


def made(name: str, text: str, gradient: Callable[[Gradients], Array], clause: str = "GRD-1") -> Hypothesis:
    """Return the hypothesis of a gradient that is made of right ones."""
    return Hypothesis(name=name, text=text, clause=clause, gradient=gradient)


def scaled(parameter: str, factor: float) -> Callable[[Gradients], Array]:
    """Return what multiplies a gradient."""
    return lambda of: factor * of(parameter)


def of_factor(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that are multiplied by something."""
    batch = len(next(iter(question.case.batch.arrays().values())))
    yield made("no_gradient", "no gradient at all", scaled(parameter, 0.0))
    yield made(
        "gradient_of_sum",
        f"the gradient of the sum over {batch} samples instead of the mean",
        scaled(parameter, batch),
        "LOS-2",
    )
    yield made(
        "gradient_divided_twice",
        f"a gradient that is divided by the {batch} samples twice",
        scaled(parameter, 1 / batch),
        "LOS-2",
    )
    yield made("gradient_accumulated", "a gradient that was counted twice", scaled(parameter, 2.0))
    yield made("gradient_halved", "half the gradient", scaled(parameter, 0.5))
    yield made("gradient_sign", "a gradient of the wrong sign", scaled(parameter, -1.0))


def of_clipping(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that were clipped."""
    every = [question.exact.gradient(name) for name in trainable(question.config, question.case.part)]
    together = math.sqrt(sum(float(np.square(gradient).sum()) for gradient in every))
    alone = float(np.sqrt(np.square(question.right.value).sum()))

    def within(limit: float) -> Callable[[Gradients], Array]:
        return lambda of: np.clip(of(parameter), -limit, limit)

    for limit in LIMITS:
        for length, how in ((together, "together"), (alone, "one by one")):
            if length > limit:
                yield made(
                    "gradient_clipped",
                    f"gradients that were clipped to the norm {limit:g} {how}",
                    scaled(parameter, limit / length),
                )
        yield made(
            "gradient_clipped", f"gradients that were clipped to {limit:g} element by element", within(limit)
        )


def of_others(question: Question, parameter: str) -> Iterator[Hypothesis]:
    """Yield gradients that something was added to, or that are those of something else."""

    def turned(of: Gradients) -> Array:
        return of(parameter).swapaxes(-1, -2)

    def of_another(other: str) -> Callable[[Gradients], Array]:
        return lambda of: of(other)

    def decayed(added: Array) -> Callable[[Gradients], Array]:
        return lambda of: of(parameter) + added

    right, weights = question.right.value, question.case.weights
    if right.ndim == 2 and right.shape[0] == right.shape[1]:
        yield made("transposed_gradient", "a gradient that is transposed", turned, "WGT-2")
    if parameter not in weights:
        return
    for share in DECAYS:
        text = f"a gradient that {share:g} times the weight was added to"
        yield made("weight_decay", text, decayed(share * weights[parameter].astype(np.float64)))
    for other in trainable(question.config, question.case.part):
        alike = other != parameter and other in weights and weights[other].shape == right.shape
        if alike and abs(question.exact.gradient(other)).max() > SMALL * abs(right).max():
            yield made("gradient_of_another", f"the gradient of `{other}` instead", of_another(other))


def of_rows(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield gradients of a table that are wrong in some rows."""
    config = question.config
    if tap == TOKEN:
        yield from options(config, "token_padding_row", (None, *sorted({0, 1, config.pad_id})), "EMB-4")
        if config.embedding_scale == "sqrt_d_model":
            root = math.sqrt(config.d_model)
            for text, factor in (
                ("not multiplied by sqrt(D)", 1 / root),
                ("multiplied by sqrt(D) twice", root),
            ):
                yield changed(
                    "embedding_scale_in_gradient",
                    f"a gradient that is {text}",
                    "EMB-2",
                    multiplied(factor),
                    TOKEN,
                )
    else:  # for tokens it is the same as token_padding_row
        yield changed("padding_row_frozen", "no gradient for padding", "EMB-4", unpadded, tap)
    if tap == POSITION:
        yield from options(config, "position_padding_row", (None, *sorted({0, 1, config.pad_id})), "POS-7")
    if tap == SEGMENT:
        yield from options(config, "segment_padding_row", (None, *range(config.num_segments)), "EMB-5")
    yield weighed(
        tap, "gradient_by_frequency", "the mean over a row's occurrences instead of their sum", by_frequency
    )
    yield weighed(
        tap,
        "gradient_overwritten",
        "the last occurrence of a row alone, which overwrites the others",
        last_alone,
    )
    yield weighed(
        tap,
        "gradient_overwritten",
        "the first occurrence of a row alone",
        lambda ids: last_alone(ids[::-1, ::-1])[::-1, ::-1],
    )


def weighed(tap: str, name: str, text: str, share: Callable[[Ids], Array]) -> Hypothesis:
    """Return the hypothesis of a table to whose gradient each use of a row counts by a share, made of the rows, (B, T)."""

    def change(m: Step, tap: str, y: Node) -> Node:
        ids = m.batch.required("segment_ids" if tap == SEGMENT else "input_ids")
        rows = position_ids(m.config, real_tokens(m.config, ids)) if tap == POSITION else ids
        return m.straight(y, m.a.multiply(y, m.constant(share(rows)[..., None])))

    return changed(name, text, "GRD-1", change, tap)


def by_frequency(ids: Ids) -> Array:
    """Divide by how often an id occurs."""
    return np.asarray(1 / np.bincount(ids.reshape(-1))[ids], np.float64)


def last_alone(ids: Ids) -> Array:
    """Count the last occurrence of an id alone."""
    flat = ids.reshape(-1).tolist()
    last = {value: place for place, value in enumerate(flat)}
    return np.array([last[value] == place for place, value in enumerate(flat)], np.float64).reshape(ids.shape)
