"""What bugs of training make of the places of a step."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer
from concord.conformance.bugs.bug import Change, StepEdit, recipe, rule
from concord.conformance.bugs.training.step import (
    Batches,
    DropoutSite,
    Tensor,
    Tensors,
    TrainingStep,
)
from concord.spec.batch import Batch
from concord.spec.training.dropout import kept
from concord.spec.training.recipe import RATES
from concord.spec.training.schedules import learning_rate

TABLES = ("embedding", "positions")


# How moments are kept and parameters moved (SPEC OPT-2 to OPT-5, OPT-8).


def adam_correction_without_root(o: Optimizer, right: StepEdit, *given: Any) -> Any:
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


def adam_second_moment_of_first(
    o: Optimizer, right: StepEdit, key: str, name: str, value: Tensor, beta: float
) -> Tensor:
    first = o.state.get(f"first_moment.{name}")
    return right(key, name, first * first if key == "second_moment" and first is not None else value, beta)


def adam_first_moment_unused(
    o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors
) -> Tensor:
    right(name, gradient, n)
    return moved(o, n, gradient, o.state[f"{'largest_' if o.recipe.amsgrad else ''}second_moment.{name}"])


def amsgrad_ignored(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    right(name, gradient, n)
    return moved(o, n, o.state[f"first_moment.{name}"], o.state[f"second_moment.{name}"])


def amsgrad_of_corrected(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    key, two = f"largest_second_moment.{name}", n["root"] * n["root"]
    before, usual = o.state.get(key), right(name, gradient, n)
    if before is None:
        return usual
    o.state[key] = o.operations.larger(before, o.state[f"second_moment.{name}"] / two)
    return moved(o, n, o.state[f"first_moment.{name}"], o.state[key] * two)


def amsgrad_in_place(o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors) -> Tensor:
    usual, key = right(name, gradient, n), f"largest_second_moment.{name}"
    if key in o.state:
        o.state[f"second_moment.{name}"] = o.state[key]
    return usual


def rmsprop_divides_by_average_before(
    o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors
) -> Tensor:
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


def nesterov_without_gradient(
    o: Optimizer, right: StepEdit, name: str, gradient: Tensor, n: Tensors
) -> Tensor:
    usual = right(name, gradient, n)
    if not o.recipe.nesterov:
        return usual
    ahead = o.recipe.momentum * o.state[f"momentum.{name}"]
    return ahead if o.recipe.momentum_form == "displacement" else n["rate"] * ahead


def rows_without_gradient(
    o: Optimizer,
    right: StepEdit,
    gradients: Tensors,
    n: Tensors,
    rows: Tensors,
    move: bool,
    decay: bool,
) -> None:
    """Move rows of tables that no batch looked up, or have their moments decay, but not both."""
    tables = [name for name in o.variables if o.kinds[name] in TABLES]
    held = {name: o.operations.value(o.variables[name]) for name in tables}
    before, chosen = dict(o.state), o.operations.chosen
    right(gradients, n, {})
    for name in tables:
        size = o.operations.larger(gradients[name], -gradients[name])
        used = rows.get(name, size > 0.0)
        if not move:
            now = o.operations.value(o.variables[name])
            o.operations.assign(o.variables[name], chosen(used, now, held[name]))
        for key in before if not decay else ():
            if key.partition(".")[2] == name:
                o.state[key] = chosen(used, o.state[key], before[key])


def clipping_missed() -> Change:
    """Report clipped gradients, and move parameters by those before clipping."""
    unclipped: dict[str, Tensor] = {}

    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        unclipped.update(gradients)
        return right

    moved = rule(
        updated=lambda o, right, name, parameter, gradient, n: right(
            name, parameter, unclipped.get(name, gradient), n
        )
    )
    return dataclasses.replace(moved, clip=clip)


def forgetting(o: Optimizer, right: StepEdit, *given: Any) -> None:
    o.state = {name: o.operations.zeros_like(tensor) for name, tensor in o.state.items()}
    right(*given)


def in_bfloat16(m: TrainingStep, tensors: Tensors, *given: Any) -> dict[str, Tensor]:
    return {name: m.shortened(tensor, "bfloat16") for name, tensor in tensors.items()}


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


def decay_where_looked_up(
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


def each(group: Callable[[TrainingStep, str], Any]) -> StepEdit:
    """Return the edit of clipping parameters by a norm for each group, which is made of their names."""

    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        found: dict[str, Tensor] = {}
        for one in dict.fromkeys(group(m, name) for name in gradients):
            part = {name: gradients[name] for name in gradients if group(m, name) == one}
            found |= m.scaled(part, m.norm(part, squares))
        return {name: found[name] for name in gradients}, right[1]

    return clip


def by_norm(norm: Callable[[TrainingStep, Tensors, Squares], Tensor]) -> StepEdit:
    """Return the edit of clipping by another norm."""

    def clip(m: TrainingStep, right: Clipped, gradients: Tensors, squares: Squares) -> Clipped:
        found = norm(m, gradients, squares)
        return m.scaled(gradients, found), found

    return clip


def of_tables(m: TrainingStep, gradients: Tensors, tables: bool) -> dict[str, Tensor]:
    return {name: one for name, one in gradients.items() if (m.kinds[name] in TABLES) == tables}


def clip_each_batch(
    m: TrainingStep, right: Tensors, total: Tensors, piece: Tensors, weight: float
) -> dict[str, Tensor]:
    limited = m.scaled(piece, m.norm(piece), m.limit * weight) if m.limit else piece
    return {name: total[name] + gradient if name in total else gradient for name, gradient in limited.items()}


# The learning rate of a step (SPEC OPT-9).


def rate_of(m: TrainingStep, right: float, times: int = 1, ahead: int = 0) -> float:
    """Return the rate of another step."""
    return m.rate(times * m.number + ahead)


def cosine_full_wave(m: TrainingStep, right: float) -> float:
    recipe, step = m.recipe, m.number + m.recipe.first_step
    if recipe.total_steps is None or step < recipe.warmup_steps:
        return right
    passed = min((step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps), 1.0)
    height = (1 + math.cos(2 * math.pi * passed)) / 2
    return recipe.learning_rate * (recipe.final_share + (1 - recipe.final_share) * height)


def warmup_times_decay(m: TrainingStep, right: float) -> float:
    """Warm-up lies over a decay that is counted from the first step."""
    recipe = m.recipe
    bare = recipe.replace(warmup_steps=0, decay_start="first_step")
    height = learning_rate(bare, m.number) if recipe.total_steps else right
    return height * min(1.0, (m.number + recipe.first_step) / max(recipe.warmup_steps, 1))


# How the gradients of a step's batches become one (SPEC OPT-10).


def gradients_not_reset(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    """Gradients of all steps so far, where those of this one alone should be."""
    before = m.memory.get("gradients", {})
    m.memory["gradients"] = {
        name: gradient + before[name] if name in before else gradient for name, gradient in total.items()
    }
    return dict(m.memory["gradients"])


def gradients_of_step_before(m: TrainingStep, total: Tensors) -> dict[str, Tensor]:
    before = m.memory.get("gradients", total)
    m.memory["gradients"] = dict(total)
    return dict(before)


# What dropout drops while a model is trained (SPEC DRP-1 to DRP-3).


def drawn(site: DropoutSite) -> Any:
    """Return which elements the specification keeps."""
    return kept(site.seed, site.step, site.number, site.name, site.shape, site.rate)


def otherwise(m: TrainingStep, right: Any, site: DropoutSite, **fields: Any) -> Any:
    """Return what another site, step, batch, shape or seed would keep."""
    return np.broadcast_to(drawn(dataclasses.replace(site, **fields)), site.shape), right[1]


def dropout_same_each_row(m: TrainingStep, right: Any, site: DropoutSite) -> Any:
    if len(site.shape) < 3:
        return right
    return otherwise(m, right, site, shape=(*site.shape[:-2], 1, site.shape[-1]))


def dropout_of_framework(m: TrainingStep, right: Any, site: DropoutSite) -> Any:
    key = [site.seed & 0xFFFFFFFF, site.step, site.number, zlib.crc32(site.name.encode())]
    return np.random.default_rng(key).random(site.shape) >= site.rate, site.rate


# Which batches a step is given (SPEC OPT-10).


def of_step(steps: Sequence[Batches], number: int) -> Batches:
    """Return the batches of another step; there are none after the last."""
    return steps[min(number, len(steps) - 1)]


def samples(batch: Batch, chosen: Sequence[int]) -> Batch:
    """Return some samples of a batch, in an order."""
    return dataclasses.replace(batch, **{name: array[list(chosen)] for name, array in batch.arrays().items()})


def small_batch_filled_up(m: TrainingStep, right: Batches, steps: Sequence[Batches]) -> Batches:
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


def lost(m: TrainingStep, right: Any, *sections: str) -> Any:
    """Return what is read without some sections."""
    return {name: one for name, one in right[0].items() if name.partition(".")[0] not in sections}, right[1]


def shortened(m: TrainingStep, right: Any, *sections: str) -> Any:
    """Return some sections in bfloat16."""
    short = {
        name: m.shortened(one, "bfloat16")
        for name, one in right[0].items()
        if name.partition(".")[0] in sections
    }
    return right[0] | short, right[1]


EDITS: Mapping[str, StepEdit | Change] = {
    "adam_epsilon_inside_root": lambda o, right, second, n: o.operations.square_root(
        second / (n["root"] * n["root"]) + o.recipe.epsilon
    ),
    "adam_first_moment_uncorrected": lambda o, right, step: (1.0, right(step)[1]),
    "adam_second_moment_uncorrected": lambda o, right, step: (right(step)[0], 1.0),
    "clipping_missed": clipping_missed(),
    "adam_step_ahead": lambda o, right, step: right(step + 1),
    "adam_correction_constant": lambda o, right, step: right(0),
    "adam_corrected_in_place": rule(numbers=corrections_apart, adam=corrected_in_place),
    "adam_betas_swapped": lambda r: r.replace(beta1=r.beta2, beta2=r.beta1),
    "averages_reversed": lambda o, right, key, name, value, beta: right(key, name, value, 1 - beta),
    "adam_first_moment_unweighted": lambda o, right, key, name, value, beta: right(
        key, name, value / (1 - beta) if key == "first_moment" else value, beta
    ),
    "positions_frozen": lambda o, right, name, parameter, *given: (
        parameter if o.kinds[name] == "positions" else right(name, parameter, *given)
    ),
    "positions_detached": lambda m, total: {
        name: 0.0 * gradient if m.kinds[name] == "positions" else gradient for name, gradient in total.items()
    },
    "momentum_with_rate_inside": lambda r: r.replace(momentum_form="displacement", dampening=0.0),
    "momentum_as_average": lambda r: r.replace(dampening=r.momentum),
    "momentum_dampened_from_first": lambda o, right, *given: (
        right(*given) | {"damping": 1 - o.recipe.dampening}
    ),
    "momentum_missing": lambda r: r.replace(momentum=0.0, dampening=0.0, nesterov=False),
    "optimizer_made_anew": rule(
        numbers=lambda o, right, step, rate=None: right(
            0, learning_rate(o.recipe, step) if rate is None else rate
        ),
        step=forgetting,
    ),
    "decay_by_full_rate": lambda o, right, *given: (
        right(*given)
        | (
            {"decay": o.recipe.weight_decay * o.recipe.learning_rate}
            if o.recipe.decay_form == "times_rate"
            else {}
        )
    ),
    "decay_after_step": decoupled(lambda before, moved, share: moved - share * moved),
    "decay_reversed": decoupled(lambda before, moved, share: moved + share * before),
    "decay_constant": decoupled(lambda before, moved, share: moved - share),
    "decay_twice": lambda r: r.replace(weight_decay=2 * r.weight_decay),
    "decay_not_in_moments": lambda o, right, name, parameter, gradient, n: (
        parameter - n["rate"] * o.recipe.weight_decay * parameter - o.rule(name, gradient, n)
        if decays(o, name) and o.recipe.decay_form == "coupled"
        else right(name, parameter, gradient, n)
    ),
    "clip_missing": lambda m, right, gradients, squares: (dict(gradients), right[1]),
    "clip_each_tensor": each(lambda m, name: name),
    "clip_each_group": each(lambda m, name: m.kinds[name] in m.recipe.undecayed),
    "clip_each_element": lambda m, right, gradients, squares: (
        {name: m.operations.bounded(one, m.limit) for name, one in gradients.items()},
        right[1],
    ),
    "clip_always": lambda m, right, gradients, squares: (
        {
            name: gradient * (m.limit / (right[1] + m.recipe.clip_epsilon))
            for name, gradient in gradients.items()
        },
        right[1],
    ),
    "clip_by_square": by_norm(lambda m, gradients, squares: sum(squares(name) for name in gradients)),
    "clip_by_sum_of_norms": by_norm(
        lambda m, gradients, squares: sum(m.operations.square_root(squares(name)) for name in gradients)
    ),
    "clip_norm_without_tables": by_norm(
        lambda m, gradients, squares: m.norm(of_tables(m, gradients, False), squares)
    ),
    "clip_not_of_tables": lambda m, right, gradients, squares: (
        right[0] | of_tables(m, gradients, True),
        right[1],
    ),
    "clip_of_scaled_gradients": by_norm(lambda m, gradients, squares: 1024.0 * m.norm(gradients, squares)),
    "clip_twice": lambda m, right, gradients, squares: (m.scaled(right[0], right[1]), right[1]),
    "clip_running_sum": lambda m, right, *given: m.scaled(right, m.norm(right)) if m.limit else right,
    "schedule_counts_batches": lambda m, right: m.rate(m.number * m.recipe.accumulation),
    "schedule_ignored": recipe(schedule="constant", total_steps=None, warmup_steps=0),
    "schedule_ends_early": lambda r: r.replace(total_steps=(r.total_steps or 0) - 1),
    "schedule_ends_late": lambda r: r.replace(total_steps=(r.total_steps or 0) + 1),
    "schedule_share_added": lambda m, right: (
        learning_rate(m.recipe.replace(final_share=0.0), m.number)
        + m.recipe.final_share * m.recipe.learning_rate
    ),
    "inverse_root_unscaled": lambda m, right: (
        right / math.sqrt(m.recipe.warmup_steps) if m.recipe.schedule == "inverse_square_root" else right
    ),
    "rate_times_batches": lambda m, right: right * m.recipe.accumulation,
    "short_accumulation_dropped": lambda m, right, batches: batches < m.recipe.accumulation,
    "sum_of_batches": lambda m, right, counts: [1.0] * len(counts),
    "sum_of_samples": lambda m, right, counts: [float(samples) for samples, _ in counts],
    "divided_twice": lambda m, right, counts: [weight / len(counts) for weight in right],
    "divided_by_configured_too": lambda m, right, counts: [
        weight / m.recipe.accumulation for weight in right
    ],
    "last_batch_alone": lambda m, right, counts: [0.0] * (len(counts) - 1) + [1.0],
    "last_batch_alone_by_its_share": lambda m, right, counts: [0.0] * (len(counts) - 1) + right[-1:],
    "last_batch_left_out": lambda m, right, counts: [*right[:-1], 0.0] if len(right) > 1 else right,
    "first_batch_counted_twice": lambda m, right, counts: [2 * right[0], *right[1:]],
    "weights_by_first_batch": lambda m, right, counts: [
        counted / (counts[0][1] * len(counts)) for _, counted in counts
    ],
    "loss_scale_left": lambda m, right: {name: gradient * 1024.0 for name, gradient in right.items()},
    "dropout_same_each_site": lambda m, right, site: otherwise(m, right, site, name=site.names[0]),
    "dropout_same_each_sample": lambda m, right, site: otherwise(m, right, site, shape=site.shape[1:]),
    "dropout_seed_cut_off": lambda m, right, site: otherwise(m, right, site, seed=site.seed & 0xFFFFFFFF),
    "dropout_step_ahead": lambda m, right, site: otherwise(m, right, site, step=site.step + 1),
    "dropout_counts_batches": lambda m, right, site: otherwise(
        m, right, site, step=2 * site.step + site.number, number=0
    ),
    "dropout_column_by_column": lambda m, right, site: (
        drawn(dataclasses.replace(site, shape=site.shape[::-1])).transpose(),
        site.rate,
    ),
    "dropout_unscaled": lambda m, right, site: (right[0], 0.0),
    "dropout_scaled_by_rate": lambda m, right, site: (right[0], 1 - right[1]),
    "dropout_scaled_down": lambda m, right, site: (right[0], 1 - 1 / (1 - right[1])),
    "dropout_reversed": lambda m, right, site: (~right[0], right[1]),
    "dropout_keeps_rate": lambda r: r.replace(
        **{name: 1 - getattr(r, name) for name in RATES if getattr(r, name)}
    ),
    "dropout_rate_of_other_site": lambda r: r.replace(
        dropout_weights=r.dropout_feed_forward, dropout_feed_forward=r.dropout_weights
    ),
    "epoch_order_repeated": lambda m, right, steps: of_step(steps, m.number % 2),
    "data_one_step_ahead": lambda m, right, steps: of_step(steps, m.number + 1),
    "data_one_step_behind": lambda m, right, steps: of_step(steps, max(m.number - 1, 0)),
    "data_of_first_step": lambda m, right, steps: steps[0],
    "first_batch_repeated": lambda m, right, steps: [right[0]] * len(right),
    "batches_in_reverse": lambda m, right, steps: right[::-1],
    "last_batch_dropped": lambda m, right, steps: right[:-1] or right,
    "last_sample_dropped": lambda m, right, steps: [without_last_sample(batch) for batch in right],
    "labels_not_shuffled": lambda m, right, steps: [
        dataclasses.replace(batch, labels=np.roll(batch.required("labels"), 1)) for batch in right
    ],
    "resumed_without_moments": lambda m, right: lost(m, right, *MOMENTS),
    "resumed_moments_bfloat16": lambda m, right: shortened(m, right, *MOMENTS),
    "resumed_correction_from_start": lambda m, right: (right[0], 0),
    "resumed_correction_one_behind": lambda m, right: (right[0], right[1] - 1),
    "resumed_optimizer_anew": lambda m, right: (lost(m, right, *MOMENTS)[0], 0),
    "resumed_schedule_from_start": lambda m, right: m.rate(m.number - m.resumed),
    "resumed_schedule_one_behind": lambda m, right: m.rate(m.number - (m.resumed > 0)),
    "resumed_masks_from_start": lambda m, right, site: otherwise(m, right, site, step=site.step - m.resumed),
    "resumed_masks_of_other_seed": lambda m, right, site: otherwise(
        m, right, site, seed=site.seed + (m.resumed > 0)
    ),
    "resumed_data_from_start": lambda m, right, steps: of_step(steps, m.number - m.resumed),
    "resumed_data_one_behind": lambda m, right, steps: of_step(steps, m.number - (m.resumed > 0)),
    "resumed_data_one_ahead": lambda m, right, steps: of_step(steps, m.number + (m.resumed > 0)),
}
