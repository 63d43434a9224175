"""Mistakes in embeddings and positions (SPEC EMB-1 to EMB-6, POS-1 to POS-7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from concord.conformance.explain.hypothesis import Hypothesis, changed, loaded, options
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Change, Step
from concord.spec.config import EncoderConfig
from concord.spec.positions import position_ids, sinusoid
from concord.spec.tape import Node

Array = NDArray[np.floating]
Rows = NDArray[np.integer]

TOKEN, POSITION, SEGMENT = "embeddings.token", "embeddings.position", "embeddings.segment"


def taken(table: str, rows: Callable[[Step], Rows]) -> Change:
    """Return what takes other rows of a table."""
    return lambda m, tap, y: m.a.take(m.weights[table], np.asarray(rows(m), np.int64))


def multiplied(factor: float) -> Change:
    """Return what multiplies a tap by a number."""
    return lambda m, tap, y: m.a.scale(y, factor)


# Tokens.


def of_tokens(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with token vectors."""
    config, name = question.config, "embeddings.token.weight"
    table = question.case.weights[name]

    yield from options(config, "embedding_scale", ("one", "sqrt_d_model"), "EMB-2")
    occurring = set(question.case.batch.required("input_ids").reshape(-1).tolist())
    row = config.pad_id if config.token_padding_row is None else config.token_padding_row
    yield from options(config, "token_padding_forward", ("stored", "zero"), "EMB-3", token_padding_row=row)
    if config.token_padding_forward == "zero":
        yield from options(config, "token_padding_row", sorted(occurring & {0, 1, 2, 3}), "EMB-3")
    else:
        for other in sorted(occurring & {0, 1} - {row}):
            fields = {"token_padding_forward": "zero", "token_padding_row": other}
            yield Hypothesis(
                name="token_padding_forward",
                text=f"a zero vector for token {other}",
                clause="EMB-3",
                fields=fields,
            )
    root = math.sqrt(config.d_model)
    if config.embedding_scale == "sqrt_d_model":
        yield changed(
            "embedding_scale_inverted",
            "a division by sqrt(D) instead of a multiplication",
            "EMB-2",
            multiplied(1 / root**2),
        )
        yield changed(
            "embedding_scale_twice", "a multiplication by D instead of sqrt(D)", "EMB-2", multiplied(root)
        )
    for shift in (1, -1, 2, -2):
        text = f"ids that are {abs(shift)} too {'low' if shift > 0 else 'high'} for the table's rows"
        yield loaded("token_ids_shifted", text, "EMB-1", {name: partial(np.roll, table, shift, axis=0)})
    yield loaded(
        "token_rows_renormalised",
        "rows of the table that were shortened to length 1",
        "EMB-1",
        {name: partial(_shortened, table)},
    )


def _shortened(table: Array) -> Array:
    length = np.sqrt(np.square(table).sum(-1, keepdims=True))
    return np.where(length > 1, table / np.maximum(length, 1), table)


# Segments, and the sum.


def of_segments(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with segment vectors."""
    table, rows, last = (
        "embeddings.segment.weight",
        question.config.num_segments,
        question.config.num_segments - 1,
    )

    def ids(names: Sequence[str], texts: Sequence[str], rows: tuple[int, ...]) -> Hypothesis:
        change = taken(table, lambda m: np.array(rows)[m.batch.required("segment_ids")])
        return changed(
            " or ".join(dict.fromkeys(names)), f"segment ids that are {' or '.join(texts)}", "EMB-5", change
        )

    yield changed("segments_ignored", "segment vectors that are zero", "EMB-5", multiplied(0.0))
    right = np.arange(rows)
    told: dict[tuple[int, ...], list[tuple[str, str]]] = {}  # of few segments two mistakes may be one
    for name, text, taken_for in (
        ("segment_ids_ignored", "all 0", 0 * right),
        ("segment_ids_inverted", "in reverse order", right[::-1]),
        ("segment_ids_shifted", "1 too low, 0 staying 0", np.maximum(right - 1, 0)),
        ("segment_ids_shifted", f"1 too high, {last} staying {last}", np.minimum(right + 1, last)),
        ("segment_ids_shifted", f"1 too low, 0 becoming {last}", np.roll(right, 1)),
        ("segment_ids_shifted", f"1 too high, {last} becoming 0", np.roll(right, -1)),
    ):
        told.setdefault(tuple(taken_for.tolist()), []).append((name, text))
    for row_of, mistakes in told.items():
        if row_of != tuple(range(rows)):
            names, texts = zip(*mistakes, strict=True)
            yield ids(names, texts, row_of)
    for row in range(rows):
        yield loaded(
            "segment_row_zero",
            f"a zero vector for segment {row}",
            "EMB-5",
            {table: partial(_without_row, question.case.weights[table], row)},
        )


def _without_row(table: Array, row: int) -> Array:
    return np.where(np.arange(len(table))[:, None] == row, 0.0, table)


def of_sum(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the sum of the embeddings."""
    parts = [TOKEN, POSITION, *([SEGMENT] if question.config.num_segments else [])]
    root = math.sqrt(question.config.d_model)

    def weighed(name: str, text: str, clause: str, **factors: float) -> Hypothesis:
        return changed(name, text, clause, _weighed_sum(parts, factors))

    for part in parts:
        word = part.rpartition(".")[2]
        yield weighed(f"{word}_left_out", f"a sum without the {word} vectors", "EMB-6", **{word: 0.0})
    yield weighed(
        "position_scaled", "position vectors that are multiplied by sqrt(D) too", "EMB-2", position=root
    )
    yield weighed(
        "sum_scaled", "a sum that is multiplied by sqrt(D)", "EMB-2", token=root, position=root, segment=root
    )
    yield weighed(
        "token_scaled_in_sum", "token vectors that are multiplied by sqrt(D) once more", "EMB-2", token=root
    )


def _weighed_sum(parts: list[str], factors: dict[str, float]) -> Change:
    def total(m: Step, tap: str, y: Node) -> Node:
        terms = [m.a.scale(m.now[part], factors.get(part.rpartition(".")[2], 1.0)) for part in parts]
        result = terms[0]
        for term in terms[1:]:
            result = m.a.add(result, term)
        return result

    return total


# Positions.


def of_positions(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield what may be wrong with position vectors."""
    start, room, pad = question.config.position_start, question.config.max_positions, question.config.pad_id

    def numbered(
        name: str, text: str, numbers: Callable[[NDArray[np.bool_]], Rows], clause: str = "POS-5"
    ) -> Hypothesis:
        return changed(
            name, text, clause, taken("embeddings.position.weight", lambda m: numbers(m.key_mask()))
        )

    def of_samples(real: NDArray[np.bool_]) -> Rows:
        return np.broadcast_to(np.arange(len(real))[:, None] % room, real.shape)

    def from_(first: int) -> Callable[[NDArray[np.bool_]], Rows]:
        return lambda real: np.broadcast_to((np.arange(real.shape[1]) + first) % room, real.shape)

    def moved(by: int) -> Callable[[NDArray[np.bool_]], Rows]:
        return lambda real: (position_ids(question.config, real) + by) % room

    counted = from_(start)
    yield changed("positions_ignored", "position vectors that are zero", "POS-5", multiplied(0.0))
    for shift in sorted({1, -1, 2, -2, -start} - {0}, key=abs):
        yield numbered("position_start", text_of_start(start, shift), moved(shift))
    yield numbered(
        "position_of_padding",
        "padding that has row 0",
        lambda real: np.where(real, moved(0)(real), 0),
        "POS-6",
    )
    yield numbered("position_of_padding", "padding that has the row of its position", counted, "POS-6")
    if question.config.position_of_padding == "pad_row":
        yield numbered(
            "position_of_padding",
            "padding that uses up a number",
            lambda real: np.where(real, counted(real), pad),
            "POS-6",
        )
        yield numbered("position_of_padding", "positions that count padding too, from 0", from_(0), "POS-6")
        yield numbered(
            "position_start",
            "positions from 0, and row 0 for padding",
            lambda real: np.where(real, real.cumsum(1) - 1, 0),
        )
    else:
        alone = "positions that count real tokens alone"
        yield numbered(
            "positions_of_real_tokens", alone, lambda real: np.where(real, real.cumsum(1) - 1 + start, 0)
        )
        yield numbered(
            "positions_of_real_tokens", alone, lambda real: np.maximum(real.cumsum(1) - 1, 0) + start
        )
    yield numbered("positions_of_samples", "positions that count samples instead of tokens", of_samples)
    yield numbered(
        "position_constant", "the same position for every token", lambda real: 0 * counted(real) + start
    )
    yield numbered(
        "positions_reversed", "positions that are counted from the end", lambda real: counted(real)[:, ::-1]
    )
    if question.config.positions == "sinusoidal":
        for hypothesis in of_table(
            question.config, question.case.weights["embeddings.position.weight"].astype(np.float64)
        ):
            yield hypothesis
            if question.case.dtype == "float64":  # a table that a framework made in its own default
                single = {name: partial(_single, made) for name, made in hypothesis.weights.items()}
                yield dataclasses.replace(hypothesis, weights=single)


def _single(made: Callable[[], Array]) -> Array:
    return made().astype(np.float32).astype(np.float64)


def text_of_start(start: int, shift: int) -> str:
    """Say that positions are counted from another number."""
    if start < 2 and start + shift in (0, 1):
        return f"position_start = {start + shift} instead of {start}"
    return f"positions that are {abs(shift)} too {'high' if shift > 0 else 'low'}"


def of_table(config: EncoderConfig, stored: Array) -> Iterator[Hypothesis]:
    """Yield other tables of sinusoids."""

    def table(name: str, text: str, clause: str, values: Array) -> Hypothesis:
        return loaded(name, text, clause, {"embeddings.position.weight": lambda: values})

    for field, values, clause in (
        ("position_layout", ("interleaved", "halves"), "POS-2"),
        ("position_exponent", ("pair", "column"), "POS-3"),
        ("position_base", (1000.0, 1e5, 5e5, 1e6), "POS-4"),
    ):
        for option in options(config, field, values, clause):
            yield table(field, option.text, clause, sinusoid(config.replace(**option.fields)))
    halved = sinusoid(config.replace(position_base=math.sqrt(config.position_base or 1.0)))
    yield table("position_exponent", "an exponent without its factor 2", "POS-3", halved)
    # Rolled, a table lacks the last rows that a longer one has.
    longer = sinusoid(config.replace(max_positions=config.max_positions + 2))
    for shift in (1, 2):
        yield table(
            "position_start",
            text_of_start(config.position_start, shift),
            "POS-5",
            longer[shift:][: config.max_positions],
        )
    yield table(
        "sine_and_cosine_swapped", "sine and cosine in each other's place", "POS-2", _swapped(stored, config)
    )
    yield table("position_row_of_padding", *_other_row_of_padding(config, stored.copy()))


def _swapped(table: Array, config: EncoderConfig) -> Array:
    if config.position_layout == "halves":
        return np.roll(table, config.d_model // 2, axis=1)
    even = config.d_model // 2 * 2
    pairs = table[:, :even].reshape(len(table), -1, 2)[..., ::-1].reshape(len(table), -1)
    return np.concatenate([pairs, table[:, even:]], axis=1)


def _other_row_of_padding(config: EncoderConfig, table: Array) -> tuple[str, str, Array]:
    if config.position_of_padding == "zero_row":
        table[0] = sinusoid(config.replace(position_of_padding="counted"))[0]
        return "a row of padding that is (sin 0, cos 0, ...) and not zero", "POS-6", table
    table[0] = 0
    return "a table whose row 0 is zero", "POS-6", table
