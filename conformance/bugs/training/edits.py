"""Edits of training steps, by place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from concord.backends.update_rules import Optimizer
from concord.conformance.bugs.bug import Change, StepEdit, rule
from concord.conformance.bugs.training.edited_step import (
    Batches,
    DropoutSite,
    Tensor,
    Tensors,
    TrainingStep,
)
from concord.spec.batch import Batch
from concord.spec.training.dropout import kept
from concord.spec.training.schedules import learning_rate

TABLES = ("embedding", "positions")


# Moments and parameter updates (SPEC OPT-2 to OPT-5, OPT-8).


def corrections_apart(o: Optimizer, right: StepEdit, *inputs: Any) -> Any:
    first, second = o.corrections(inputs[0])
    numbers = right(*inputs)
    return numbers | {"height": numbers["rate"], "root": 1.0, "one": first, "two": second}


def moved(o: Optimizer, n: Tensors, first: Tensor, second: Tensor) -> Tensor:
    return n["height"] * first / o.denominator(second, n)


def corrected_in_place(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    right(name, gradient, n)
    first, second = f"first_moment.{name}", f"second_moment.{name}"
    o.state[first], o.state[second] = o.state[first] / n["one"], o.state[second] / n["two"]
    return moved(o, n, o.state[first], o.state[second])


def amsgrad_of_corrected(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    key, two = f"largest_second_moment.{name}", n["root"] * n["root"]
    largest, usual = o.state.get(key), right(name, gradient, n)
    if largest is None:
        return usual
    o.state[key] = o.operations.larger(largest, o.state[f"second_moment.{name}"] / two)
    return moved(o, n, o.state[f"first_moment.{name}"], o.state[key] * two)


def rmsprop_divides_by_average_before(
    o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors
) -> Tensor:
    average = o.state[f"second_moment.{name}"]
    o.average("second_moment", name, gradient * gradient, o.recipe.beta2)
    step = gradient / (o.operations.square_root(average) + o.recipe.epsilon)
    return o.with_momentum(name, step, n) if o.recipe.momentum else n["rate"] * step


def nesterov_behind(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    velocity, usual = o.recipe.momentum * o.state[f"momentum.{name}"], right(name, gradient, n)
    if not o.recipe.nesterov:
        return usual
    inside = o.recipe.momentum_form == "displacement"
    return velocity + n["rate"] * gradient if inside else n["rate"] * (gradient + velocity)


def forgetting(o: Optimizer, right: StepEdit, *inputs: Any) -> None:
    o.state = {name: o.operations.zeros_like(tensor) for name, tensor in o.state.items()}
    right(*inputs)


def in_bfloat16(m: TrainingStep, tensors: Tensors, *inputs: Any) -> dict[str, Tensor]:
    return {name: m.shortened(tensor, "bfloat16") for name, tensor in tensors.items()}


def undecayed_frozen(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *inputs: Any) -> Tensor:
    updated = right(name, parameter, *inputs)  # the moments are still updated
    return parameter if o.kinds[name] in o.recipe.undecayed else updated


# Weight decay (SPEC OPT-6).


def decays(o: Optimizer, name: str) -> bool:
    return o.recipe.weight_decay > 0 and o.kinds[name] not in o.recipe.undecayed


def decoupled(decayed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> StepEdit:
    """Edit decoupled decay, given a parameter before and after its step, and the decay."""

    def updated(
        o: Optimizer, right: StepEdit, name: str, parameter: Tensor, gradient: Tensor, n: Tensors
    ) -> Tensor:
        if not decays(o, name) or o.recipe.decay_form == "coupled":
            return right(name, parameter, gradient, n)
        return decayed(parameter, parameter - o.rule(name, gradient, n), n["decay"])

    return updated


# Gradient clipping (SPEC OPT-7).

Squares = Callable[[str], Tensor]
Clipped = tuple[dict[str, Tensor], Tensor]


def each(group: Callable[[TrainingStep, str], Any]) -> StepEdit:
    """Clip each parameter group by its own norm."""

    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        clipped: dict[str, Tensor] = {}
        for kind in dict.fromkeys(group(m, name) for name in gradients):
            part = {name: gradients[name] for name in gradients if group(m, name) == kind}
            clipped |= m.scaled(part, m.norm(part, squares))
        return {name: clipped[name] for name in gradients}, right[1]

    return clip


def by_norm(norm: Callable[[TrainingStep, Tensors, Squares], Tensor]) -> StepEdit:
    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        length = norm(m, gradients, squares)
        return m.scaled(gradients, length), length

    return clip


def of_tables(m: TrainingStep, gradients: Tensors, tables: bool) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in gradients.items() if (m.kinds[name] in TABLES) == tables}


def clip_each_batch(
    m: TrainingStep, right: Tensors, total: Tensors, piece: Tensors, weight: float
) -> dict[str, Tensor]:
    limited = m.scaled(piece, m.norm(piece), m.limit * weight) if m.limit else piece
    return {name: total[name] + gradient if name in total else gradient for name, gradient in limited.items()}


# Learning rate of a step (SPEC OPT-9).


def rate_of(m: TrainingStep, right: float, times: int = 1, ahead: int = 0) -> float:
    return m.rate(times * m.number + ahead)


def cosine_full_wave(m: TrainingStep, right: float) -> float:
    recipe, step = m.recipe, m.number + m.recipe.first_step
    if recipe.total_steps is None or step < recipe.warmup_steps:
        return right
    progress = min((step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps), 1.0)
    height = (1 + math.cos(2 * math.pi * progress)) / 2
    return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * height)


# Accumulation of a step's gradients (SPEC OPT-10).


def gradients_not_reset(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    previous = m.memory.get("gradients", {})
    m.memory["gradients"] = {
        name: gradient + previous[name] if name in previous else gradient for name, gradient in total.items()
    }
    return dict(m.memory["gradients"])


# Dropout masks in training (SPEC DRP-1 to DRP-3).


def drawn(site: DropoutSite) -> Any:
    return kept(site.seed, site.step, site.number, site.name, site.shape, site.rate)


def otherwise(m: TrainingStep, right: Any, site: DropoutSite, **fields: Any) -> Any:
    return np.broadcast_to(drawn(replace(site, **fields)), site.shape), right[1]


def kept_in_other_step(m: TrainingStep, right: Any, site: DropoutSite, by: int) -> Any:
    return otherwise(m, right, site, step=max(site.step + by, 0))


# Batches of a step (SPEC OPT-10).


def of_step(steps: Sequence[Batches], number: int) -> Batches:
    """Another step's batches; past the end, those of the last step."""
    return steps[min(number, len(steps) - 1)]


def of_other_step(m: TrainingStep, right: Batches, steps: Sequence[Batches], by: int) -> Batches:
    return of_step(steps, max(m.number + by, 0))


def samples(batch: Batch, indices: Sequence[int]) -> Batch:
    return replace(batch, **{name: array[list(indices)] for name, array in batch.arrays().items()})


def small_batch_filled_up(m: TrainingStep, right: Batches, steps: Sequence[Batches]) -> Batches:
    batches, size = list[Batch](), 0
    for batch in right:
        count = len(batch.required("labels"))
        size = max(size, count)
        batches.append(samples(batch, [number % count for number in range(size)]))
    return batches


# State from which training resumes.

MOMENTS = ("first_moment", "second_moment", "largest_second_moment", "momentum")


def lost(m: TrainingStep, right: Any, *sections: str) -> Any:
    return {
        name: tensor for name, tensor in right[0].items() if name.partition(".")[0] not in sections
    }, right[1]


def shortened(m: TrainingStep, right: Any, *sections: str) -> Any:
    rounded = {
        name: m.shortened(tensor, "bfloat16")
        for name, tensor in right[0].items()
        if name.partition(".")[0] in sections
    }
    return right[0] | rounded, right[1]


EDITS: Mapping[str, StepEdit | Change] = {
    "adam_epsilon_inside_root": lambda o, right, second, n: o.operations.square_root(
        second / (n["root"] * n["root"]) + o.recipe.epsilon
    ),
    "adam_first_moment_uncorrected": lambda o, right, step: (1.0, right(step)[1]),
    "adam_step_ahead": lambda o, right, step: right(step + 1),
    "adam_corrected_in_place": rule(numbers=corrections_apart, adam=corrected_in_place),
    "momentum_dampened_from_first": lambda o, right, *inputs: (
        right(*inputs) | {"damping": 1 - o.recipe.dampening}
    ),
    "optimizer_made_anew": rule(
        numbers=lambda o, right, step, rate=None: right(
            0, learning_rate(o.recipe, step) if rate is None else rate
        ),
        step=forgetting,
    ),
    "decay_by_full_rate": lambda o, right, *inputs: (
        right(*inputs)
        | (
            {"decay": o.recipe.weight_decay * o.recipe.learning_rate}
            if o.recipe.decay_form == "times_rate"
            else {}
        )
    ),
    "decay_after_step": decoupled(lambda before, moved, share: moved - share * moved),
    "decay_reversed": decoupled(lambda before, moved, share: moved + share * before),
    "clip_missing": lambda m, right, gradients, squares: (dict(gradients), right[1]),
    "clip_each_group": each(lambda m, name: m.kinds[name] in m.recipe.undecayed),
    "clip_norm_without_tables": by_norm(
        lambda m, gradients, squares: m.norm(of_tables(m, gradients, False), squares)
    ),
    "clip_of_scaled_gradients": by_norm(lambda m, gradients, squares: 1024.0 * m.norm(gradients, squares)),
    "schedule_counts_batches": lambda m, right: m.rate(m.number * m.recipe.accumulation),
    "short_accumulation_dropped": lambda m, right, batches: batches < m.recipe.accumulation,
    "sum_of_batches": lambda m, right, counts: [1.0] * len(counts),
    "divided_twice": lambda m, right, counts: [weight / len(counts) for weight in right],
    "last_batch_alone": lambda m, right, counts: [0.0] * (len(counts) - 1) + [1.0],
    "last_batch_left_out": lambda m, right, counts: [*right[:-1], 0.0] if len(right) > 1 else right,
    "first_batch_counted_twice": lambda m, right, counts: [2 * right[0], *right[1:]],
    "loss_scale_left": lambda m, right: {name: gradient * 1024.0 for name, gradient in right.items()},
    "dropout_same_each_site": lambda m, right, site: otherwise(m, right, site, name=site.names[0]),
    "dropout_unscaled": lambda m, right, site: (right[0], 0.0),
    "epoch_order_repeated": lambda m, right, steps: of_step(steps, m.number % 2),
    "last_batch_dropped": lambda m, right, steps: right[:-1] or right,
    "resumed_without_moments": lambda m, right: lost(m, right, *MOMENTS),
    "resumed_correction_from_start": lambda m, right: (right[0], 0),
    "resumed_schedule_from_start": lambda m, right: m.rate(m.number - m.resumed),
    "resumed_masks_from_start": lambda m, right, site: otherwise(m, right, site, step=site.step - m.resumed),
    "resumed_data_from_start": lambda m, right, steps: of_step(steps, m.number - m.resumed),
}
