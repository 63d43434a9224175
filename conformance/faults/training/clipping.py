"""Bugs in how gradients are clipped (SPEC OPT-7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from concord.conformance.faults.training.fault import (
    HUB,
    Change,
    Place,
    Tensor,
    Tensors,
    TrainingFault,
    recipe,
)

Squares = Callable[[str], Tensor]
Clipped = tuple[dict[str, Tensor], Tensor | None]


def fault(
    name: str, what: str, change: Change, source: str, run: str = "adamw", **fields: Any
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group="clipping",
        what=what,
        clause="OPT-7",
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


def clipping(clip: Callable[[Place, Tensors, Squares], Clipped]) -> Change:
    return Change(clip=clip)


def scaled(m: Place, gradients: Tensors, norm: Tensor, limit: float | None = None) -> dict[str, Tensor]:
    share = m.share(m.recipe.clip_at if limit is None else limit, norm)  # type: ignore[arg-type]
    return {name: gradient * share for name, gradient in gradients.items()}


def together(m: Place, gradients: Tensors, squares: Squares) -> Tensor:
    return m.operations.square_root(sum(squares(name) for name in gradients))


def missing(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    return dict(gradients), together(m, gradients, squares)


def each_tensor(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    found = {
        name: scaled(m, {name: gradient}, m.operations.square_root(squares(name)))[name]
        for name, gradient in gradients.items()
    }
    return found, together(m, gradients, squares)


def each_group(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    found: dict[str, Tensor] = {}
    for left_out in (False, True):
        group = {
            name: gradient
            for name, gradient in gradients.items()
            if (m.kinds[name] in m.recipe.undecayed) == left_out
        }
        found |= scaled(m, group, together(m, group, squares)) if group else {}
    return {name: found[name] for name in gradients}, together(m, gradients, squares)


def each_element(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    return {
        name: m.operations.bounded(gradient, m.recipe.clip_at or 0.0) for name, gradient in gradients.items()
    }, together(m, gradients, squares)


def always(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = together(m, gradients, squares)
    return {
        name: gradient * ((m.recipe.clip_at or 0.0) / (norm + m.recipe.clip_epsilon))
        for name, gradient in gradients.items()
    }, norm


def by_square(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = sum(squares(name) for name in gradients)
    return scaled(m, gradients, norm), norm


def by_sum_of_norms(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = sum(m.operations.square_root(squares(name)) for name in gradients)
    return scaled(m, gradients, norm), norm


def without_tables(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = together(
        m,
        {
            name: gradient
            for name, gradient in gradients.items()
            if m.kinds[name] not in ("table", "positions")
        },
        squares,
    )
    return scaled(m, gradients, norm), norm


def tables_unclipped(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = together(m, gradients, squares)
    limited = scaled(m, gradients, norm)
    return {
        name: gradient if m.kinds[name] in ("table", "positions") else limited[name]
        for name, gradient in gradients.items()
    }, norm


def of_scaled(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = 1024.0 * together(m, gradients, squares)
    return scaled(m, gradients, norm), norm


def twice(m: Place, gradients: Tensors, squares: Squares) -> Clipped:
    norm = together(m, gradients, squares)
    share = m.share(m.recipe.clip_at or 0.0, norm)
    return {name: gradient * share * share for name, gradient in gradients.items()}, norm


def each_batch(m: Place, total: Tensors, piece: Tensors, share: float) -> dict[str, Tensor]:
    limited = (
        scaled(m, piece, m.norm(piece), (m.recipe.clip_at or 0.0) * share) if m.recipe.clip_at else piece
    )
    return {name: total[name] + gradient if name in total else gradient for name, gradient in limited.items()}


def running(m: Place, total: Tensors, piece: Tensors, share: float) -> dict[str, Tensor]:
    added = {name: total[name] + gradient if name in total else gradient for name, gradient in piece.items()}
    return scaled(m, added, m.norm(added)) if m.recipe.clip_at else added


FAULTS = (
    fault(
        "clip_missing",
        "Nothing is clipped: gradients are clipped before they are there.",
        clipping(missing),
        "simchowitzlabpublic/nano-world-model/pull/22",
    ),
    fault("clip_each_tensor", "Each gradient is clipped by its own norm.", clipping(each_tensor), ""),
    fault(
        "clip_each_group",
        "Parameters that decay and those that do not are clipped by a norm each.",
        clipping(each_group),
        "huggingface/transformers/pull/614",
    ),
    fault(
        "clip_each_element",
        "Each element is bounded, where the norm is to be.",
        clipping(each_element),
        "",
        options={"clip_at": 0.05},
    ),
    fault(
        "clip_always",
        "Gradients are scaled to the limit even where their norm is below it.",
        clipping(always),
        "",
        options={"clip_at": 5.0},
    ),
    fault("clip_by_square", "The root of the sum of squares is left out.", clipping(by_square), ""),
    fault(
        "clip_by_sum_of_norms",
        "The norms of all gradients are added, not their squares.",
        clipping(by_sum_of_norms),
        "",
    ),
    fault(
        "clip_norm_without_tables",
        "The norm leaves out embedding tables.",
        clipping(without_tables),
        "ooples/AiDotNet/pull/1526",
    ),
    fault(
        "clip_not_of_tables",
        "Embedding tables are not clipped.",
        clipping(tables_unclipped),
        "PaddlePaddle/Paddle/issues/9048",
    ),
    fault(
        "clip_of_scaled_gradients",
        "The norm is that of gradients that are still multiplied by the loss scale.",
        clipping(of_scaled),
        "rwth-i6/returnn/issues/1590",
    ),
    fault("clip_twice", "The share by which gradients are clipped is applied twice.", clipping(twice), ""),
    fault(
        "clip_each_batch",
        "Each batch's gradient is clipped before it is accumulated.",
        Change(added=each_batch),
        "huggingface/transformers/issues/1563",
    ),
    fault(
        "clip_running_sum",
        "The sum so far is clipped after each batch.",
        Change(added=running),
        "huggingface/transformers/issues/986",
    ),
    fault(
        "clip_epsilon_added",
        "1e-6 is added to the norm.",
        recipe(clip_epsilon=1e-6),
        "goodfire-ai/spd/issues/643",
        equivalent={"float32": "1e-6 beside a norm of 1 is a few roundings"},
    ),
    fault(
        "clip_epsilon_missing",
        "The recipe's epsilon is not added to the norm.",
        recipe(clip_epsilon=0.0),
        "goodfire-ai/spd/pull/821",
        options={"clip_epsilon": 1e-2},
    ),
    fault(
        "clip_norm_of_summed_rows",
        "The norm sees a table's gradient after rows of one id are summed.",
        recipe(table_gradients="dense"),
        "",
        "lazy-adam",
    ),
)
