"""What bugs of training make of the places of a step."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer
from concord.conformance.bugs.bug import Change, Changes, StepEdit
from concord.conformance.bugs.training.step import (
    Batches,
    DropoutSite,
    Tensor,
    Tensors,
    TrainingStep,
    recipe,
    rule,
)
from concord.spec.batch import Batch
from concord.spec.training.dropout import kept
from concord.spec.training.recipe import RATES
from concord.spec.training.schedules import learning_rate

TABLES = ("embedding", "positions")


# How moments are kept and parameters moved (SPEC OPT-2 to OPT-5, OPT-8).


def without_root(o: Optimizer, right: StepEdit, *given: Any) -> Any:
    found, (one, two) = right(*given), o.corrections(given[0])
    uncorrected = o.recipe.epsilon_placement == "uncorrected"
    return found | {"root": two, "height": found["rate"] * (two if uncorrected else 1.0) / one}


def corrections_apart(o: Optimizer, right: StepEdit, *given: Any) -> Any:
    one, two = o.corrections(given[0])
    found = right(*given)
    return found | {"height": found["rate"], "root": 1.0, "one": one, "two": two}


def moved(o: Optimizer, n: Tensors, first: Tensor, second: Tensor) -> Tensor:
    return n["height"] * first / o.denominator(second, n)


def corrected_in_place(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    right(name, gradient, n)
    one, two = f"first_moment.{name}", f"second_moment.{name}"
    o.state[one], o.state[two] = o.state[one] / n["one"], o.state[two] / n["two"]
    return moved(o, n, o.state[one], o.state[two])


def squares_of_first(
    o: Optimizer, right: StepEdit, key: str, name: str, value: Tensor, beta: float
) -> Tensor:
    first = o.state.get(f"first_moment.{name}")
    return right(key, name, first * first if key == "second_moment" and first is not None else value, beta)


def by_gradient(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    right(name, gradient, n)
    return moved(o, n, gradient, o.state[f"{'largest_' if o.recipe.amsgrad else ''}second_moment.{name}"])


def largest_unused(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    right(name, gradient, n)
    return moved(o, n, o.state[f"first_moment.{name}"], o.state[f"second_moment.{name}"])


def largest_of_corrected(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    key, two = f"largest_second_moment.{name}", n["root"] * n["root"]
    before, usual = o.state.get(key), right(name, gradient, n)
    if before is None:
        return usual
    o.state[key] = o.operations.larger(before, o.state[f"second_moment.{name}"] / two)
    return moved(o, n, o.state[f"first_moment.{name}"], o.state[key] * two)


def largest_in_place(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    usual, key = right(name, gradient, n), f"largest_second_moment.{name}"
    if key in o.state:
        o.state[f"second_moment.{name}"] = o.state[key]
    return usual


def before_its_square(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    before = o.state[f"second_moment.{name}"]
    o.average("second_moment", name, gradient * gradient, o.recipe.beta2)
    step = gradient / (o.operations.square_root(before) + o.recipe.epsilon)
    return o.with_momentum(name, step, n) if o.recipe.momentum else n["rate"] * step


def nesterov_behind(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    before, usual = o.recipe.momentum * o.state[f"momentum.{name}"], right(name, gradient, n)
    if not o.recipe.nesterov:
        return usual
    inside = o.recipe.momentum_form == "displacement"
    return before + n["rate"] * gradient if inside else n["rate"] * (gradient + before)


def nesterov_alone(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    usual = right(name, gradient, n)
    if not o.recipe.nesterov:
        return usual
    ahead = o.recipe.momentum * o.state[f"momentum.{name}"]
    return ahead if o.recipe.momentum_form == "displacement" else n["rate"] * ahead


def of_first_step(o: Optimizer, right: StepEdit, step: int, rate: float | None = None) -> Any:
    return right(0, learning_rate(o.recipe, step) if rate is None else rate)


def forgetting(o: Optimizer, right: StepEdit, *given: Any) -> None:
    o.state = {name: o.operations.zeros_like(tensor) for name, tensor in o.state.items()}
    right(*given)


def without_positions(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    return {
        name: 0.0 * gradient if m.kinds[name] == "positions" else gradient for name, gradient in total.items()
    }


def in_bfloat16(m: TrainingStep, tensors: Tensors, *given: Any) -> dict[str, Tensor]:
    return {name: m.shortened(tensor, "bfloat16") for name, tensor in tensors.items()}


def positions_frozen(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *given: Any) -> Tensor:
    return parameter if o.kinds[name] == "positions" else right(name, parameter, *given)


def undecayed_frozen(o: Optimizer, right: StepEdit, name: str, parameter: Tensor, *given: Any) -> Tensor:
    updated = right(name, parameter, *given)  # the moments go on
    return parameter if o.kinds[name] in o.recipe.undecayed else updated


# How weights decay (SPEC OPT-6).


def decays(o: Optimizer, name: str) -> bool:
    return o.recipe.weight_decay > 0 and o.kinds[name] not in o.recipe.undecayed


def decoupled(decayed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> StepEdit:
    """Return the edit of decoupled decay, given a parameter before and after its step, and its decay."""

    def updated(
        o: Optimizer, right: StepEdit, name: str, parameter: Tensor, gradient: Tensor, n: Tensors
    ) -> Tensor:
        if not decays(o, name) or o.recipe.decay_form == "coupled":
            return right(name, parameter, gradient, n)
        return decayed(parameter, parameter - o.rule(name, gradient, n), n["decay"])

    return updated


def by_full_rate(o: Optimizer, right: StepEdit, *given: Any) -> Any:
    full = {"decay": o.recipe.weight_decay * o.recipe.learning_rate}
    return right(*given) | (full if o.recipe.decay_form == "times_rate" else {})


def not_in_moments(
    o: Optimizer, right: StepEdit, name: str, parameter: Tensor, gradient: Tensor, n: Tensors
) -> Tensor:
    if not decays(o, name) or o.recipe.decay_form != "coupled":
        return right(name, parameter, gradient, n)
    return parameter - n["rate"] * o.recipe.weight_decay * parameter - o.rule(name, gradient, n)


def where_looked_up(
    o: Optimizer, right: StepEdit, name: str, parameter: Tensor, gradient: Tensor, n: Tensors
) -> Tensor:
    if not decays(o, name) or o.recipe.decay_form == "coupled" or o.kinds[name] not in TABLES:
        return right(name, parameter, gradient, n)
    moved = parameter - o.rule(name, gradient, n)
    looked_up = o.operations.larger(gradient, -gradient) > 0.0
    return o.operations.chosen(looked_up, moved - n["decay"] * parameter, moved)


# How gradients are clipped (SPEC OPT-7).

Squares = Callable[[str], Tensor]
Clipped = tuple[dict[str, Tensor], Tensor]


def each_group(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
    found: dict[str, Tensor] = {}
    for left_out in (False, True):
        group = {
            name: one for name, one in gradients.items() if (m.kinds[name] in m.recipe.undecayed) == left_out
        }
        found |= m.scaled(group, m.norm(group, squares)) if group else {}
    return {name: found[name] for name in gradients}, right[1]


def each_tensor(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        found |= m.scaled({name: gradient}, m.norm({name: gradient}, squares))
    return found, right[1]


def always(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
    factor = m.limit / (right[1] + m.recipe.clip_epsilon)
    return {name: gradient * factor for name, gradient in gradients.items()}, right[1]


def by_norm(norm: Callable[[TrainingStep, Tensors, Squares], Tensor]) -> StepEdit:
    """Return the edit of clipping by another norm."""

    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        found = norm(m, gradients, squares)
        return m.scaled(gradients, found), found

    return clip


def of_tables(m: TrainingStep, gradients: Tensors, tables: bool) -> dict[str, Tensor]:
    return {name: one for name, one in gradients.items() if (m.kinds[name] in TABLES) == tables}


def each_batch(
    m: TrainingStep, right: Tensors, total: Tensors, piece: Tensors, weight: float
) -> dict[str, Tensor]:
    limited = m.scaled(piece, m.norm(piece), m.limit * weight) if m.limit else piece
    return {name: total[name] + gradient if name in total else gradient for name, gradient in limited.items()}


# The learning rate of a step (SPEC OPT-9).


def full_wave(m: TrainingStep, right: float) -> float:
    recipe, step = m.recipe, m.number + m.recipe.first_step
    if recipe.total_steps is None or step < recipe.warmup_steps:
        return right
    passed = min((step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps), 1.0)
    height = (1 + math.cos(2 * math.pi * passed)) / 2
    return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * height)


def warmed_and_decayed(m: TrainingStep, right: float) -> float:
    """Warm-up lies over a decay that is counted from the first step."""
    recipe = m.recipe
    bare = recipe.replace(warmup_steps=0, decay_start="first_step")
    height = learning_rate(bare, m.number) if recipe.total_steps else right
    return height * min(1.0, (m.number + recipe.first_step) / max(recipe.warmup_steps, 1))


def added_share(m: TrainingStep, right: float) -> float:
    bare = learning_rate(m.recipe.replace(final_share=0.0), m.number)
    return bare + m.recipe.final_share * m.recipe.learning_rate


def inverse_root(m: TrainingStep, right: float) -> float:
    unscaled = m.recipe.schedule == "inverse_square_root"
    return right / math.sqrt(m.recipe.warmup_steps) if unscaled else right


# How the gradients of a step's batches become one (SPEC OPT-10).


def not_reset(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    """Gradients of all steps so far, where those of this one alone should be."""
    before = m.memory.get("gradients", {})
    m.memory["gradients"] = {
        name: gradient + before[name] if name in before else gradient for name, gradient in total.items()
    }
    return dict(m.memory["gradients"])


def of_step_before(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    before = m.memory.get("gradients", total)
    m.memory["gradients"] = dict(total)
    return dict(before)


# What dropout drops while a model is trained (SPEC DRP-1 to DRP-3).


def drawn(site: DropoutSite) -> Any:
    """Return which elements the specification keeps."""
    return kept(site.seed, site.step, site.number, site.name, site.shape, site.rate)


def otherwise(**fields: Callable[[TrainingStep, DropoutSite], Any]) -> StepEdit:
    """Return the edit to what another site, step, batch, shape or seed would keep."""

    def masks(m: TrainingStep, right: Any, site: DropoutSite) -> Any:
        other = dataclasses.replace(site, **{name: of(m, site) for name, of in fields.items()})
        return np.broadcast_to(drawn(other), site.shape), right[1]

    return masks


def rescaled(rate: Callable[[float], float]) -> StepEdit:
    """Return the edit to the same elements, scaled as another rate asks for."""
    return lambda m, right, site: (right[0], rate(right[1]))


def generator(m: TrainingStep, right: Any, site: DropoutSite) -> Any:
    key = [site.seed & 0xFFFFFFFF, site.step, site.number, zlib.crc32(site.name.encode())]
    return np.random.default_rng(key).random(site.shape) >= site.rate, site.rate


def column_by_column(m: TrainingStep, right: Any, site: DropoutSite) -> Any:
    return drawn(dataclasses.replace(site, shape=site.shape[::-1])).transpose(), site.rate


# Which batches a step is given (SPEC OPT-10).


def of_step(which: Callable[[TrainingStep], int]) -> StepEdit:
    """Return the edit to the batches of another step; there are none after the last."""
    return lambda m, right, steps: steps[min(which(m), len(steps) - 1)]


def of_each(function: Callable[[Batch], Batch]) -> StepEdit:
    return lambda m, right, steps: [function(batch) for batch in right]


def samples(batch: Batch, chosen: Sequence[int]) -> Batch:
    """Return some samples of a batch, in an order."""
    return dataclasses.replace(batch, **{name: array[list(chosen)] for name, array in batch.arrays().items()})


def labels_in_order(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=np.roll(batch.required("labels"), 1))


def filled_up(m: TrainingStep, right: Batches, steps: Sequence[Batches]) -> Batches:
    """A batch that is smaller than the one before is filled up with its own first samples."""
    found, size = list[Batch](), 0
    for batch in right:
        count = len(batch.required("labels"))
        size = max(size, count)
        found.append(samples(batch, [number % count for number in range(size)]))
    return found


def without_last_sample(batch: Batch) -> Batch:
    count = len(batch.required("labels"))
    return samples(batch, range(count - 1)) if count > 2 else batch


# What a resumed training goes on from.

MOMENTS = ("first_moment", "second_moment", "largest_second_moment", "momentum")


def lost(*sections: str, counted: Callable[[int], int] = lambda steps: steps) -> StepEdit:
    """Return the edit to what is read without some sections, and to how many steps the optimizer has made."""
    return lambda m, right: (
        {name: tensor for name, tensor in right[0].items() if name.partition(".")[0] not in sections},
        counted(right[1]),
    )


def shortened(*sections: str) -> StepEdit:
    """Return the edit to some sections in bfloat16."""
    return lambda m, right: (
        {
            name: m.shortened(tensor, "bfloat16") if name.partition(".")[0] in sections else tensor
            for name, tensor in right[0].items()
        },
        right[1],
    )


EDITS: Changes = {
    "adam_epsilon_inside_root": rule(
        denominator=lambda o, right, second, n: o.operations.square_root(
            second / (n["root"] * n["root"]) + o.recipe.epsilon
        )
    ),
    "adam_first_moment_uncorrected": rule(corrections=lambda o, right, step: (1.0, right(step)[1])),
    "adam_second_moment_uncorrected": rule(corrections=lambda o, right, step: (right(step)[0], 1.0)),
    "adam_step_ahead": rule(corrections=lambda o, right, step: right(step + 1)),
    "adam_correction_constant": rule(corrections=lambda o, right, step: right(0)),
    "adam_corrected_in_place": rule(numbers=corrections_apart, adam=corrected_in_place),
    "adam_correction_without_root": rule(numbers=without_root),
    "adam_betas_swapped": Change(recipe=lambda r: r.replace(beta1=r.beta2, beta2=r.beta1)),
    "averages_reversed": rule(
        average=lambda o, right, key, name, value, beta: right(key, name, value, 1 - beta)
    ),
    "adam_first_moment_unweighted": rule(
        average=lambda o, right, key, name, value, beta: right(
            key, name, value / (1 - beta) if key == "first_moment" else value, beta
        )
    ),
    "adam_second_moment_of_first": rule(average=squares_of_first),
    "adam_first_moment_unused": rule(adam=by_gradient),
    "adam_moments_bfloat16": Change(keeps=in_bfloat16),
    "amsgrad_ignored": rule(adam=largest_unused),
    "amsgrad_of_corrected": rule(adam=largest_of_corrected),
    "amsgrad_in_place": rule(adam=largest_in_place),
    "positions_frozen": rule(updated=positions_frozen),
    "positions_detached": Change(gradients=without_positions),
    "momentum_with_rate_inside": Change(
        recipe=lambda r: r.replace(momentum_form="displacement", dampening=0.0)
    ),
    "momentum_as_average": Change(recipe=lambda r: r.replace(dampening=r.momentum)),
    "momentum_dampened_from_first": rule(
        numbers=lambda o, right, *given: right(*given) | {"damping": 1 - o.recipe.dampening}
    ),
    "momentum_missing": Change(recipe=lambda r: r.replace(momentum=0.0, dampening=0.0, nesterov=False)),
    "optimizer_made_anew": rule(numbers=of_first_step, step=forgetting),
    "nesterov_behind": rule(with_momentum=nesterov_behind),
    "nesterov_without_gradient": rule(with_momentum=nesterov_alone),
    "rmsprop_divides_by_average_before": rule(rmsprop=before_its_square),
    "decay_by_full_rate": rule(numbers=by_full_rate),
    "decay_after_step": rule(updated=decoupled(lambda before, moved, share: moved - share * moved)),
    "decay_reversed": rule(updated=decoupled(lambda before, moved, share: moved + share * before)),
    "decay_constant": rule(updated=decoupled(lambda before, moved, share: moved - share)),
    "undecayed_frozen": rule(updated=undecayed_frozen),
    "decay_twice": Change(recipe=lambda r: r.replace(weight_decay=2 * r.weight_decay)),
    "decay_not_in_moments": rule(updated=not_in_moments),
    "decay_where_looked_up": rule(updated=where_looked_up),
    "clip_missing": Change(clip=lambda m, right, gradients, squares: (dict(gradients), right[1])),
    "clip_each_tensor": Change(clip=each_tensor),
    "clip_each_group": Change(clip=each_group),
    "clip_each_element": Change(
        clip=lambda m, right, gradients, squares: (
            {name: m.operations.bounded(one, m.limit) for name, one in gradients.items()},
            right[1],
        )
    ),
    "clip_always": Change(clip=always),
    "clip_by_square": Change(
        clip=by_norm(lambda m, gradients, squares: sum(squares(name) for name in gradients))
    ),
    "clip_by_sum_of_norms": Change(
        clip=by_norm(
            lambda m, gradients, squares: sum(m.operations.square_root(squares(name)) for name in gradients)
        )
    ),
    "clip_norm_without_tables": Change(
        clip=by_norm(lambda m, gradients, squares: m.norm(of_tables(m, gradients, False), squares))
    ),
    "clip_not_of_tables": Change(
        clip=lambda m, right, gradients, squares: (right[0] | of_tables(m, gradients, True), right[1])
    ),
    "clip_of_scaled_gradients": Change(
        clip=by_norm(lambda m, gradients, squares: 1024.0 * m.norm(gradients, squares))
    ),
    "clip_twice": Change(clip=lambda m, right, gradients, squares: (m.scaled(right[0], right[1]), right[1])),
    "clip_each_batch": Change(added=each_batch),
    "clip_running_sum": Change(
        added=lambda m, right, *given: m.scaled(right, m.norm(right)) if m.limit else right
    ),
    "schedule_step_ahead": Change(rate=lambda m, right: m.rate(m.number + 1)),
    "schedule_counts_batches": Change(rate=lambda m, right: m.rate(m.number * m.recipe.accumulation)),
    "schedule_counts_processes": Change(rate=lambda m, right: m.rate(m.number * 4)),
    "schedule_never_moves": Change(rate=lambda m, right: m.rate(0)),
    "schedule_ignored": Change(recipe=recipe(schedule="constant", total_steps=None, warmup_steps=0)),
    "warmup_times_decay": Change(rate=warmed_and_decayed),
    "schedule_ends_early": Change(recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) - 1)),
    "schedule_ends_late": Change(recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) + 1)),
    "schedule_share_added": Change(rate=added_share),
    "cosine_full_wave": Change(rate=full_wave),
    "inverse_root_unscaled": Change(rate=inverse_root),
    "rate_times_batches": Change(rate=lambda m, right: right * m.recipe.accumulation),
    "schedule_moves_twice": Change(rate=lambda m, right: m.rate(2 * m.number)),
    "short_accumulation_dropped": Change(skips=lambda m, right, batches: batches < m.recipe.accumulation),
    "sum_of_batches": Change(weights=lambda m, right, counts: [1.0] * len(counts)),
    "sum_of_samples": Change(weights=lambda m, right, counts: [float(samples) for samples, _ in counts]),
    "divided_twice": Change(weights=lambda m, right, counts: [weight / len(counts) for weight in right]),
    "divided_by_configured_too": Change(
        weights=lambda m, right, counts: [weight / m.recipe.accumulation for weight in right]
    ),
    "last_batch_alone": Change(weights=lambda m, right, counts: [0.0] * (len(counts) - 1) + [1.0]),
    "last_batch_alone_by_its_share": Change(
        weights=lambda m, right, counts: [0.0] * (len(counts) - 1) + right[-1:]
    ),
    "last_batch_left_out": Change(
        weights=lambda m, right, counts: [*right[:-1], 0.0] if len(right) > 1 else right
    ),
    "first_batch_counted_twice": Change(weights=lambda m, right, counts: [2 * right[0], *right[1:]]),
    "weights_by_first_batch": Change(
        weights=lambda m, right, counts: [counted / (counts[0][1] * len(counts)) for _, counted in counts]
    ),
    "gradients_not_reset": Change(gradients=not_reset),
    "gradients_of_step_before": Change(gradients=of_step_before),
    "loss_scale_left": Change(
        gradients=lambda m, right: {name: gradient * 1024.0 for name, gradient in right.items()}
    ),
    "accumulated_in_bfloat16": Change(added=in_bfloat16),
    "dropout_same_each_step": Change(masks=otherwise(step=lambda m, site: 0)),
    "dropout_same_each_batch": Change(masks=otherwise(number=lambda m, site: 0)),
    "dropout_same_each_site": Change(masks=otherwise(name=lambda m, site: site.names[0])),
    "dropout_same_each_sample": Change(masks=otherwise(shape=lambda m, site: site.shape[1:])),
    "dropout_same_each_row": Change(
        masks=otherwise(
            shape=lambda m, site: (*site.shape[:-2], 1, site.shape[-1]) if len(site.shape) > 2 else site.shape
        )
    ),
    "dropout_seed_ignored": Change(masks=otherwise(seed=lambda m, site: 0)),
    "dropout_seed_cut_off": Change(masks=otherwise(seed=lambda m, site: site.seed & 4294967295)),
    "dropout_step_ahead": Change(masks=otherwise(step=lambda m, site: site.step + 1)),
    "dropout_counts_batches": Change(
        masks=otherwise(step=lambda m, site: 2 * site.step + site.number, number=lambda m, site: 0)
    ),
    "dropout_of_framework": Change(masks=generator),
    "dropout_column_by_column": Change(masks=column_by_column),
    "dropout_unscaled": Change(masks=rescaled(lambda rate: 0.0)),
    "dropout_scaled_by_rate": Change(masks=rescaled(lambda rate: 1 - rate)),
    "dropout_scaled_down": Change(masks=rescaled(lambda rate: 1 - 1 / (1 - rate))),
    "dropout_reversed": Change(masks=lambda m, right, site: (~right[0], right[1])),
    "dropout_keeps_rate": Change(
        recipe=lambda r: r.replace(**{name: 1 - getattr(r, name) for name in RATES if getattr(r, name)})
    ),
    "dropout_rate_of_other_site": Change(
        recipe=lambda r: r.replace(
            dropout_weights=r.dropout_feed_forward, dropout_feed_forward=r.dropout_weights
        )
    ),
    "epoch_order_repeated": Change(batches=of_step(lambda m: m.number % 2)),
    "data_one_step_ahead": Change(batches=of_step(lambda m: m.number + 1)),
    "data_one_step_behind": Change(batches=of_step(lambda m: max(m.number - 1, 0))),
    "data_of_first_step": Change(batches=lambda m, right, steps: steps[0]),
    "first_batch_repeated": Change(batches=lambda m, right, steps: [right[0]] * len(right)),
    "batches_in_reverse": Change(batches=lambda m, right, steps: right[::-1]),
    "last_batch_dropped": Change(batches=lambda m, right, steps: right[:-1] or right),
    "small_batch_filled_up": Change(batches=filled_up),
    "last_sample_dropped": Change(batches=of_each(without_last_sample)),
    "labels_not_shuffled": Change(batches=of_each(labels_in_order)),
    "resumed_without_moments": Change(load=lost(*MOMENTS)),
    "resumed_without_first_moment": Change(load=lost("first_moment")),
    "resumed_without_second_moment": Change(load=lost("second_moment")),
    "resumed_without_largest": Change(load=lost("largest_second_moment")),
    "resumed_weights_bfloat16": Change(load=shortened("parameters")),
    "resumed_moments_bfloat16": Change(load=shortened(*MOMENTS)),
    "resumed_correction_from_start": Change(load=lost(counted=lambda steps: 0)),
    "resumed_correction_one_behind": Change(load=lost(counted=lambda steps: steps - 1)),
    "resumed_optimizer_anew": Change(load=lost(*MOMENTS, counted=lambda steps: 0)),
    "resumed_schedule_from_start": Change(rate=lambda m, right: m.rate(m.number - m.resumed)),
    "resumed_schedule_one_behind": Change(rate=lambda m, right: m.rate(m.number - (m.resumed > 0))),
    "resumed_masks_from_start": Change(masks=otherwise(step=lambda m, site: site.step - m.resumed)),
    "resumed_masks_of_other_seed": Change(masks=otherwise(seed=lambda m, site: site.seed + (m.resumed > 0))),
    "resumed_data_from_start": Change(batches=of_step(lambda m: m.number - m.resumed)),
    "resumed_data_one_behind": Change(batches=of_step(lambda m: m.number - (m.resumed > 0))),
    "resumed_data_one_ahead": Change(batches=of_step(lambda m: m.number + (m.resumed > 0))),
}
