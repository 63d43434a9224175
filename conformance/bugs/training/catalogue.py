"""Every bug of training, group by group."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from concord.backends.optimizers import Optimizer
from concord.conformance.bugs.bug import HUB, Bug, Change, StepEdit
from concord.conformance.bugs.bug import TRAINING as OF_TRAINING
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
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.schedules import learning_rate

TABLES = ("embedding", "positions")
FIRST = ("where the reference shows it",)
PLACES, FIELDS, SAID = ({one.name for one in dataclasses.fields(each)} for each in (Change, Recipe, Bug))

TRAINING: dict[str, Bug] = {}
"""Every bug of training by name."""


def entries(group: str, clause: str, run: str = "adamw", only: str = "") -> Callable[..., None]:
    """Return what enters bugs of a group, with the clause, the run and the algorithm that most of them have.

    What a bug edits is named by places of a step, methods of the optimizer, or fields of the recipe.
    """

    def bug(name: str, what: str, source: str = "", **given: Any) -> None:
        places, said, fields = (
            {key: given.pop(key) for key in of & given.keys()} for of in (PLACES, SAID, FIELDS)
        )
        places |= {"recipe": recipe(**fields)} if fields else {}
        places |= {"optimizer": rule(**given)} if given else {}
        said = {"clause": clause, "scenario": run, "only": only, **said}
        TRAINING[name] = Bug(
            name=name,
            group=group,
            what=what,
            change=Change(**places),
            variant=OF_TRAINING,
            first=FIRST,
            input=f"run {said['scenario']}",
            cause=name,
            source=source and HUB + source,
            **said,
        )

    return bug


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


SMALL = {"epsilon": 1e-3}
bug = entries("optimizer", "OPT-3")
adam = entries("optimizer", "OPT-3", only="adam")
amsgrad = entries("optimizer", "OPT-4", "adam-l2", only="adam")
rmsprop = entries("optimizer", "OPT-5", "rmsprop", only="rmsprop")
momentum = entries("optimizer", "OPT-2", "sgd")
nesterov = entries("optimizer", "OPT-2", "nesterov")
adam(
    "adam_epsilon_hat",
    "Epsilon is added to the root of the second moment before its bias is corrected.",
    "tensorflow/tensorflow/issues/35102",
    epsilon_placement="uncorrected",
    options=SMALL,
)
adam(
    "adam_epsilon_after_correction",
    "Epsilon is added after the bias is corrected, where the recipe's is epsilon hat.",
    "keras-team/keras/pull/14035",
    scenario="keras-adam",
    epsilon_placement="corrected",
)
adam(
    "adam_epsilon_inside_root",
    "Epsilon is added inside of the root.",
    "CyberZHG/keras-radam/issues/29",
    denominator=lambda o, right, second, n: o.operations.square_root(
        second / (n["root"] * n["root"]) + o.recipe.epsilon
    ),
    options=SMALL,
)
adam(
    "adam_epsilon_of_keras",
    "Epsilon is 1e-7, another framework's default, instead of 1e-3.",
    epsilon=1e-07,
    options=SMALL,
)
adam(
    "adam_bias_uncorrected",
    "Neither moment is corrected for its bias.",
    "BVLC/caffe/issues/4224",
    bias_correction=False,
)
adam(
    "adam_first_moment_uncorrected",
    "The first moment is not corrected for its bias, the second is.",
    "online-ml/river/pull/185",
    corrections=lambda o, right, step: (1.0, right(step)[1]),
)
adam(
    "adam_second_moment_uncorrected",
    "The second moment is not corrected for its bias, the first is.",
    corrections=lambda o, right, step: (right(step)[0], 1.0),
)
adam(
    "adam_step_ahead",
    "Powers of beta are those of the next step.",
    "MansMeg/IntroML/pull/24",
    corrections=lambda o, right, step: right(step + 1),
)
adam(
    "adam_correction_constant",
    "The correction is 1 - beta at every step, not 1 - beta^t.",
    "eriklindernoren/ML-From-Scratch/issues/35",
    corrections=lambda o, right, step: right(0),
)
adam(
    "adam_corrected_in_place",
    "The corrected moments are kept, so that corrections pile up.",
    "frgfm/holocron/issues/1",
    numbers=corrections_apart,
    adam=corrected_in_place,
)
adam(
    "adam_correction_without_root",
    "The root of the second moment is corrected by 1 - beta2^t, without the root of that.",
    "pytorch/pytorch/pull/23737",
    numbers=without_root,
)
adam(
    "adam_betas_swapped",
    "The two betas are swapped.",
    recipe=lambda r: r.replace(beta1=r.beta2, beta2=r.beta1),
)
adam("adam_beta2_short", "Beta2 is 0.99 instead of 0.999.", beta2=0.99)
bug(
    "averages_reversed",
    "Averages weigh what is new by beta, and what was there by 1 - beta.",
    average=lambda o, right, key, name, value, beta: right(key, name, value, 1 - beta),
)
adam(
    "adam_first_moment_unweighted",
    "The gradient goes into the first moment whole, not times 1 - beta1.",
    average=lambda o, right, key, name, value, beta: right(
        key, name, value / (1 - beta) if key == "first_moment" else value, beta
    ),
)
adam(
    "adam_second_moment_of_first",
    "The second moment averages squares of the first moment instead of the gradient's.",
    average=squares_of_first,
)
adam(
    "adam_first_moment_unused",
    "The gradient moves the parameter, not its average.",
    adam=by_gradient,
)
adam(
    "adam_moments_bfloat16",
    "Moments are kept in bfloat16.",
    "pytorch/torchtitan/pull/2732",
    keeps=in_bfloat16,
)
amsgrad(
    "amsgrad_ignored",
    "The option amsgrad is ignored.",
    adam=largest_unused,
)
amsgrad(
    "amsgrad_of_corrected",
    "The largest is taken of second moments that are corrected for their bias.",
    "google-deepmind/optax/pull/1423",
    adam=largest_of_corrected,
)
amsgrad(
    "amsgrad_in_place",
    "The largest second moment takes the place of the average too.",
    adam=largest_in_place,
)
bug(
    "positions_frozen",
    "A learnt position table is not among what the optimizer updates.",
    updated=positions_frozen,
)
bug(
    "positions_detached",
    "No gradient reaches a learnt position table.",
    clause="GRD-1",
    gradients=without_positions,
)
bug(
    "lazy_as_dense",
    "Rows that no batch looked up decay and move too.",
    "keras-team/keras/issues/19992",
    clause="OPT-8",
    scenario="lazy-adam",
    embedding_updates="dense",
)
bug(
    "dense_as_lazy",
    "Rows that no batch looked up keep value and moments.",
    "tensorflow/tensorflow/issues/6460",
    clause="OPT-8",
    embedding_updates="lazy",
)
nesterov(
    "momentum_with_rate_inside",
    "The rate is part of what momentum keeps.",
    "pytorch/pytorch/issues/1099",
    recipe=lambda r: r.replace(momentum_form="displacement", dampening=0.0),
)
momentum(
    "momentum_as_average",
    "Momentum weighs each gradient by 1 - momentum.",
    "HIPS/autograd/issues/289",
    recipe=lambda r: r.replace(dampening=r.momentum),
)
momentum("momentum_undampened", "Gradients are not dampened.", dampening=0.0)
momentum(
    "momentum_dampened_from_first",
    "The first gradient is dampened too.",
    "ml-explore/mlx/pull/87",
    numbers=lambda o, right, *given: right(*given) | {"damping": 1 - o.recipe.dampening},
)
momentum(
    "momentum_missing",
    "There is no momentum.",
    recipe=lambda r: r.replace(momentum=0.0, dampening=0.0, nesterov=False),
)
bug(
    "optimizer_made_anew",
    "The optimizer is made anew at each step, and has forgotten what it kept.",
    "OpenNMT/OpenNMT-py/issues/617",
    numbers=of_first_step,
    step=forgetting,
)
nesterov("nesterov_ignored", "The option nesterov is ignored.", nesterov=False)
nesterov(
    "nesterov_behind",
    "Nesterov's step takes the momentum as it was before the gradient.",
    "pytorch/pytorch/issues/14465",
    with_momentum=nesterov_behind,
)
nesterov(
    "nesterov_without_gradient",
    "Nesterov's step takes momentum times what is kept, without the gradient.",
    "pytorch/pytorch/pull/5920",
    with_momentum=nesterov_alone,
)
rmsprop(
    "rmsprop_epsilon_inside",
    "Epsilon is added inside of the root.",
    "pytorch/pytorch/issues/23796",
    epsilon_placement="inside",
)
rmsprop(
    "rmsprop_epsilon_outside",
    "Epsilon is added outside of the root.",
    "chainer/chainer/issues/4754",
    epsilon_placement="uncorrected",
    options={"epsilon_placement": "inside"},
)
rmsprop(
    "rmsprop_share_of_keras",
    "The average keeps 0.9 of what was there, another framework's default, instead of 0.99.",
    beta2=0.9,
)
rmsprop(
    "rmsprop_not_centered",
    "The option centered is ignored.",
    centered=False,
)
rmsprop(
    "rmsprop_divides_by_average_before",
    "The gradient is divided by the average as it was before it.",
    rmsprop=before_its_square,
    options={"centered": False, "epsilon": 0.1},
)
rmsprop(
    "rmsprop_momentum_with_rate_inside",
    "The rate is part of what momentum keeps.",
    clause="OPT-2",
    momentum_form="displacement",
)


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


bug = entries("decay", "OPT-6")
bug(
    "decay_coupled",
    "Decay is added to the gradient, and goes through the moments.",
    "pytorch/pytorch/pull/4429",
    decay_form="coupled",
)
bug(
    "decay_decoupled",
    "Decay is taken off besides the step, where the recipe adds it to the gradient.",
    "deeplearning4j/deeplearning4j/issues/5843",
    scenario="adam-l2",
    decay_form="times_rate",
)
bug(
    "decay_not_times_rate",
    "Decay is not multiplied by the learning rate.",
    "tensorflow/addons/issues/2282",
    decay_form="alone",
)
bug(
    "decay_by_full_rate",
    "Decay is multiplied by the full rate, not by the schedule's.",
    "PaddlePaddle/Paddle/pull/30130",
    numbers=by_full_rate,
)
bug("decay_missing", "Nothing decays.", "PaddlePaddle/Paddle/issues/29794", weight_decay=0.0)
bug(
    "decay_everywhere",
    "Biases, gains and offsets decay too.",
    "huggingface/transformers/issues/4360",
    undecayed=(),
)
bug("decay_of_biases", "Biases decay too; gains and offsets do not.", undecayed=("gamma", "beta"))
bug(
    "decay_of_norms",
    "Gains and offsets of norms decay too, since names of another model are left out.",
    "huggingface/transformers/issues/16908",
    undecayed=("bias",),
)
bug(
    "decay_of_offsets",
    "Offsets of norms decay too.",
    "huggingface/transformers/issues/4832",
    undecayed=("bias", "gamma"),
)
bug(
    "decay_not_of_tables",
    "Embedding tables do not decay.",
    "Lightning-AI/lit-llama/issues/254",
    undecayed=("bias", "gamma", "beta", "embedding", "positions"),
)
bug(
    "decay_not_of_positions",
    "Learnt positions do not decay; other tables do.",
    undecayed=("bias", "gamma", "beta", "positions"),
)
bug(
    "decay_of_biases_alone",
    "What is to be left out decays, and the rest does not.",
    undecayed=("embedding", "positions", "kernel"),
)
bug(
    "decay_after_step",
    "The parameter decays after its step, not before.",
    "bitsandbytes-foundation/bitsandbytes/issues/2010",
    updated=decoupled(lambda before, moved, share: moved - share * moved),
)
bug(
    "decay_reversed",
    "Decay makes parameters larger.",
    "egg-west/AdamW-pytorch/issues/1",
    updated=decoupled(lambda before, moved, share: moved + share * before),
)
bug(
    "decay_constant",
    "Decay takes a constant off, not a share of the parameter.",
    "e-sensing/torchopt/pull/14",
    updated=decoupled(lambda before, moved, share: moved - share),
)
bug(
    "undecayed_frozen",
    "What is left out of decay is not updated at all.",
    "PaddlePaddle/PaddleCustomDevice/pull/1202",
    updated=undecayed_frozen,
)
bug(
    "decay_twice",
    "Decay counts twice: in the loss, and in the optimizer.",
    scenario="adam-l2",
    recipe=lambda r: r.replace(weight_decay=2 * r.weight_decay),
)
bug(
    "decay_not_in_moments",
    "Decay does not go through the moments, which see the gradient alone: it is taken off besides the step.",
    scenario="sgd",
    updated=not_in_moments,
)
bug("decay_where_looked_up", "Rows of tables decay only in steps that look them up.", updated=where_looked_up)


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


bug = entries("clipping", "OPT-7")
bug(
    "clip_missing",
    "Nothing is clipped: gradients are clipped before they are there.",
    "simchowitzlabpublic/nano-world-model/pull/22",
    clip=lambda m, right, gradients, squares: (dict(gradients), right[1]),
)
bug("clip_each_tensor", "Each gradient is clipped by its own norm.", clip=each_tensor)
bug(
    "clip_each_group",
    "Parameters that decay and those that do not are clipped by a norm each.",
    "huggingface/transformers/pull/614",
    clip=each_group,
)
bug(
    "clip_each_element",
    "Each element is bounded, where the norm is to be.",
    clip=lambda m, right, gradients, squares: (
        {name: m.operations.bounded(one, m.limit) for name, one in gradients.items()},
        right[1],
    ),
    options={"clip_at": 0.05},
)
bug(
    "clip_always",
    "Gradients are scaled to the limit even where their norm is below it.",
    clip=always,
    options={"clip_at": 5.0},
)
bug(
    "clip_by_square",
    "The root of the sum of squares is left out.",
    clip=by_norm(lambda m, gradients, squares: sum(squares(name) for name in gradients)),
)
bug(
    "clip_by_sum_of_norms",
    "The norms of all gradients are added, not their squares.",
    clip=by_norm(
        lambda m, gradients, squares: sum(m.operations.square_root(squares(name)) for name in gradients)
    ),
)
bug(
    "clip_norm_without_tables",
    "The norm leaves out embedding tables.",
    "ooples/AiDotNet/pull/1526",
    clip=by_norm(lambda m, gradients, squares: m.norm(of_tables(m, gradients, False), squares)),
)
bug(
    "clip_not_of_tables",
    "Embedding tables are not clipped.",
    "PaddlePaddle/Paddle/issues/9048",
    clip=lambda m, right, gradients, squares: (right[0] | of_tables(m, gradients, True), right[1]),
)
bug(
    "clip_of_scaled_gradients",
    "The norm is that of gradients that are still multiplied by the loss scale.",
    "rwth-i6/returnn/issues/1590",
    clip=by_norm(lambda m, gradients, squares: 1024.0 * m.norm(gradients, squares)),
)
bug(
    "clip_twice",
    "The share by which gradients are clipped is applied twice.",
    clip=lambda m, right, gradients, squares: (m.scaled(right[0], right[1]), right[1]),
)
bug(
    "clip_each_batch",
    "Each batch's gradient is clipped before it is accumulated.",
    "huggingface/transformers/issues/1563",
    added=each_batch,
)
bug(
    "clip_running_sum",
    "The sum so far is clipped after each batch.",
    "huggingface/transformers/issues/986",
    added=lambda m, right, *given: m.scaled(right, m.norm(right)) if m.limit else right,
)
bug(
    "clip_epsilon_added",
    "1e-6 is added to the norm.",
    "goodfire-ai/spd/issues/643",
    clip_epsilon=1e-06,
    equivalent={"float32": "1e-6 beside a norm of 1 is a few roundings"},
)
bug(
    "clip_epsilon_missing",
    "The recipe's epsilon is not added to the norm.",
    "goodfire-ai/spd/pull/821",
    clip_epsilon=0.0,
    options={"clip_epsilon": 0.01},
)
bug(
    "clip_norm_of_summed_rows",
    "The norm sees a table's gradient after rows of one id are summed.",
    scenario="lazy-adam",
    embedding_gradients="dense",
)


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


bug = entries("schedule", "OPT-9")
bug(
    "warmup_from_zero",
    "The first step is counted as step 0, and its rate is zero.",
    "meta-pytorch/torchtune/issues/2010",
    first_step=0,
)
bug(
    "schedule_step_ahead",
    "The schedule moves on before the optimizer's step, and its first value is skipped.",
    "facebookresearch/ParlAI/issues/2042",
    rate=lambda m, right: m.rate(m.number + 1),
)
bug(
    "schedule_counts_batches",
    "The schedule moves on with each batch, not with each step.",
    "huggingface/accelerate/issues/963",
    rate=lambda m, right: m.rate(m.number * m.recipe.accumulation),
)
bug(
    "schedule_counts_processes",
    "The schedule moves on once for each of four processes.",
    "huggingface/transformers/pull/24088",
    rate=lambda m, right: m.rate(m.number * 4),
    options={"total_steps": 23},
)
bug(
    "schedule_never_moves",
    "The schedule is never moved on: every step has the rate of the first.",
    rate=lambda m, right: m.rate(0),
)
bug(
    "schedule_ignored",
    "The rate is constant, as if there were no schedule.",
    schedule="constant",
    total_steps=None,
    warmup_steps=0,
)
bug("warmup_missing", "There is no warm-up.", warmup_steps=0, decay_start="warmup_end")
bug(
    "decay_counted_from_first_step",
    "The schedule's decay is counted from the first step, not from the end of warm-up.",
    "huggingface/pytorch-image-models/issues/1242",
    decay_start="first_step",
)
bug("warmup_times_decay", "Warm-up is multiplied by a decay that has begun already.", rate=warmed_and_decayed)
bug(
    "schedule_ends_early",
    "The schedule ends one step early.",
    "goodfire-ai/spd/pull/821",
    recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) - 1),
)
bug(
    "schedule_ends_late",
    "The schedule ends one step late.",
    recipe=lambda r: r.replace(total_steps=(r.total_steps or 0) + 1),
)
bug("schedule_down_to_zero", "The schedule goes down to zero, not to the final share.", final_share=0.0)
bug(
    "schedule_share_added", "The final share is added to a schedule that goes down to zero.", rate=added_share
)
bug(
    "cosine_full_wave",
    "The cosine runs through its whole period, and comes up again.",
    "lightly-ai/lightly/pull/1842",
    scenario="nesterov",
    rate=full_wave,
)
bug(
    "cosine_as_linear",
    "The rate goes down in a line, not as a cosine.",
    scenario="nesterov",
    schedule="linear",
)
bug("linear_as_cosine", "The rate goes down as a cosine, not in a line.", schedule="cosine")
bug(
    "inverse_root_unscaled",
    "The inverse root is that of the step's number, not of its share of warm-up.",
    scenario="noam",
    rate=inverse_root,
)
bug(
    "rate_times_batches",
    "The rate is scaled by the number of batches that a step accumulates.",
    rate=lambda m, right: right * m.recipe.accumulation,
)
bug(
    "schedule_moves_twice",
    "The schedule moves on twice in each step.",
    rate=lambda m, right: m.rate(2 * m.number),
    options={"accumulation": 3},
)


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


SHORT = {"accumulation_mean": "batches"}
bug = entries("accumulation", "OPT-10")
bug(
    "mean_of_means",
    "Every batch counts alike, however many labels it has.",
    "huggingface/transformers/issues/37766",
    accumulation_mean="batches",
)
bug(
    "mean_by_samples",
    "A batch counts by its samples, those whose labels do not count among them.",
    "unslothai/unsloth-zoo/issues/6",
    accumulation_mean="samples",
)
bug(
    "mean_by_labels",
    "A batch counts by its labels, where it should count by its samples.",
    "OpenNMT/OpenNMT-py/issues/2209",
    accumulation_mean="labels",
    options={"accumulation_mean": "samples"},
)
bug(
    "short_accumulation_divided_by_all",
    "A short last accumulation is divided by as many batches as a full one has.",
    "Lightning-AI/pytorch-lightning/issues/19987",
    accumulation_mean="configured",
    options=SHORT,
)
bug(
    "short_accumulation_divided_by_its_own",
    "A short last accumulation is divided by its own batches, not by those of a full one.",
    accumulation_mean="batches",
    options={"accumulation_mean": "configured"},
)
bug(
    "short_accumulation_dropped",
    "A short last accumulation updates nothing.",
    "NVIDIA-NeMo/Automodel/pull/2257",
    skips=lambda m, right, batches: batches < m.recipe.accumulation,
)
bug(
    "sum_of_batches",
    "Gradients are added, and not divided at all.",
    "karpathy/nanoGPT/issues/206",
    weights=lambda m, right, counts: [1.0] * len(counts),
)
bug(
    "sum_of_samples",
    "Gradients are added, each times its batch's samples.",
    "huggingface/blog/pull/2414",
    weights=lambda m, right, counts: [float(samples) for samples, _ in counts],
)
bug(
    "divided_twice",
    "The mean is divided by the number of batches once more.",
    "OpenNMT/OpenNMT-py/issues/2209",
    weights=lambda m, right, counts: [weight / len(counts) for weight in right],
)
bug(
    "divided_by_configured_too",
    "The mean is divided by the configured number of batches once more.",
    weights=lambda m, right, counts: [weight / m.recipe.accumulation for weight in right],
)
bug(
    "last_batch_alone",
    "Each batch overwrites the gradient of the one before.",
    "allenai/open-instruct/pull/1498",
    weights=lambda m, right, counts: [0.0] * (len(counts) - 1) + [1.0],
)
bug(
    "last_batch_alone_by_its_share",
    "Each batch overwrites the gradient of the one before; the last still counts by its share.",
    "tatsu-lab/alpaca_farm/issues/57",
    weights=lambda m, right, counts: [0.0] * (len(counts) - 1) + right[-1:],
)
bug(
    "last_batch_left_out",
    "The step is made before the last batch's gradient is added.",
    "cofe-ai/MSG/issues/3",
    weights=lambda m, right, counts: [*right[:-1], 0.0] if len(right) > 1 else right,
)
bug(
    "first_batch_counted_twice",
    "The first batch's gradient is added twice.",
    "karpathy/llm.c/pull/548",
    weights=lambda m, right, counts: [2 * right[0], *right[1:]],
)
bug(
    "weights_by_first_batch",
    "All batches count as if they had as many labels as the first.",
    weights=lambda m, right, counts: [counted / (counts[0][1] * len(counts)) for _, counted in counts],
)
bug(
    "gradients_not_reset",
    "Gradients are not reset between steps.",
    "tenstorrent/tt-blacksmith/pull/711",
    gradients=not_reset,
)
bug("gradients_of_step_before", "A step takes the gradients of the step before.", gradients=of_step_before)
bug(
    "loss_scale_left",
    "Gradients are still multiplied by the loss scale.",
    "deepspeedai/DeepSpeed/pull/8588",
    clause="GRD-1",
    gradients=lambda m, right: {name: gradient * 1024.0 for name, gradient in right.items()},
)
bug("accumulated_in_bfloat16", "Gradients are added up in bfloat16.", added=in_bfloat16)


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


bug = entries("dropout", "DRP-3", "dropout")
scaling = entries("dropout", "DRP-1", "dropout")
rating = entries("dropout", "DRP-2", "dropout")
rating(
    "dropout_off",
    "Nothing is dropped: the model is still in the mode of the evaluation before.",
    "MILVLG/mcan-vqa/issues/26",
    **dict.fromkeys(RATES, 0.0),
)
bug(
    "dropout_same_each_step",
    "Every step drops the elements of the first: the key is a constant of the compiled step.",
    "google/flax/pull/2593",
    masks=otherwise(step=lambda m, site: 0),
)
bug(
    "dropout_same_each_batch",
    "All batches of a step drop the same elements.",
    "google/flax/pull/2631",
    masks=otherwise(number=lambda m, site: 0),
)
bug(
    "dropout_same_each_site",
    "All sites draw the same numbers: the key is not split between layers.",
    "google/flax/issues/3115",
    masks=otherwise(name=lambda m, site: site.names[0]),
)
bug(
    "dropout_same_each_sample",
    "All samples of a batch drop the same elements.",
    "patrick-kidger/equinox/pull/316",
    masks=otherwise(shape=lambda m, site: site.shape[1:]),
)
bug(
    "dropout_same_each_row",
    "All rows of a sample drop the same elements.",
    masks=otherwise(
        shape=lambda m, site: (*site.shape[:-2], 1, site.shape[-1]) if len(site.shape) > 2 else site.shape
    ),
)
bug(
    "dropout_seed_ignored",
    "The seed is not that of the recipe but zero.",
    "ai2cm/ace/issues/690",
    masks=otherwise(seed=lambda m, site: 0),
)
bug(
    "dropout_seed_cut_off",
    "The seed is cut off to 32 bits.",
    masks=otherwise(seed=lambda m, site: site.seed & 4294967295),
)
bug("dropout_step_ahead", "Steps are counted from 1.", masks=otherwise(step=lambda m, site: site.step + 1))
bug(
    "dropout_counts_batches",
    "Every batch is counted as a step of its own.",
    masks=otherwise(step=lambda m, site: 2 * site.step + site.number, number=lambda m, site: 0),
)
bug("dropout_of_framework", "The framework's own generator drops other elements.", masks=generator)
bug("dropout_column_by_column", "Elements are numbered column by column.", masks=column_by_column)
scaling(
    "dropout_unscaled",
    "What is kept is not scaled up.",
    "rbgirshick/py-faster-rcnn/issues/211",
    masks=rescaled(lambda rate: 0.0),
)
scaling(
    "dropout_scaled_by_rate",
    "What is kept is scaled by 1 / rate, not by 1 / (1 - rate).",
    "rasbt/LLMs-from-scratch/issues/431",
    masks=rescaled(lambda rate: 1 - rate),
)
scaling(
    "dropout_scaled_down",
    "What is kept is scaled by 1 - rate, as at inference.",
    "clab/dynet/issues/186",
    masks=rescaled(lambda rate: 1 - 1 / (1 - rate)),
)
scaling(
    "dropout_reversed",
    "What should be dropped is kept, and the other way round.",
    masks=lambda m, right, site: (~right[0], right[1]),
)
rating(
    "dropout_keeps_rate",
    "The rate is taken for the share that is kept.",
    "karpathy/convnetjs/pull/106",
    recipe=lambda r: r.replace(**{name: 1 - getattr(r, name) for name in RATES if getattr(r, name)}),
)
rating(
    "dropout_rate_of_other_site",
    "Attention weights are dropped at the rate of the feed-forward network, and the other way round.",
    recipe=lambda r: r.replace(
        dropout_weights=r.dropout_feed_forward, dropout_feed_forward=r.dropout_weights
    ),
)
rating(
    "dropout_weights_left_out",
    "Attention weights are not dropped.",
    dropout_weights=0.0,
)
rating(
    "dropout_head_left_out",
    "Nothing is dropped before the classifier.",
    dropout_head=0.0,
)


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


bug = entries("data", "OPT-10")
bug(
    "epoch_order_repeated",
    "Every epoch has the order of the first: the sampler is not told which epoch it is.",
    "pytorch/pytorch/issues/31771",
    scenario="epochs",
    batches=of_step(lambda m: m.number % 2),
)
bug(
    "data_one_step_ahead",
    "The first step's batches are skipped, and each step has those of the next.",
    "wyim-pgl/transgenic/issues/59",
    batches=of_step(lambda m: m.number + 1),
)
bug(
    "data_one_step_behind",
    "A step has the batches of the step before once more.",
    batches=of_step(lambda m: max(m.number - 1, 0)),
)
bug(
    "data_of_first_step", "Every step has the batches of the first.", batches=lambda m, right, steps: steps[0]
)
bug(
    "first_batch_repeated",
    "All batches of a step are its first.",
    batches=lambda m, right, steps: [right[0]] * len(right),
)
bug(
    "batches_in_reverse",
    "The batches of a step come in reverse.",
    scenario="dropout",
    batches=lambda m, right, steps: right[::-1],
)
bug(
    "last_batch_dropped",
    "The last batch of a step is dropped.",
    "huggingface/transformers/issues/14309",
    batches=lambda m, right, steps: right[:-1] or right,
)
bug(
    "small_batch_filled_up",
    "A smaller batch is filled up with its own samples once more.",
    "huggingface/accelerate/issues/1382",
    batches=filled_up,
)
bug("last_sample_dropped", "The last sample of each batch is dropped.", batches=of_each(without_last_sample))
bug("labels_not_shuffled", "Labels are one sample behind their texts.", batches=of_each(labels_in_order))


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


bug = entries("resume", "OPT-3", "resumed")
bug(
    "resumed_without_moments",
    "Training goes on without the moments of the checkpoint.",
    "KempnerInstitute/KempnerForge/pull/115",
    load=lost(*MOMENTS),
)
bug(
    "resumed_without_first_moment",
    "Training goes on without the first moment.",
    load=lost("first_moment"),
)
bug(
    "resumed_without_second_moment",
    "Training goes on without the second moment.",
    load=lost("second_moment"),
)
bug(
    "resumed_without_largest",
    "Training goes on without the largest second moment.",
    clause="OPT-4",
    load=lost("largest_second_moment"),
)
bug(
    "resumed_weights_bfloat16",
    "Weights were written down in bfloat16.",
    "vllm-project/speculators/issues/1027",
    clause="PRC-3",
    load=shortened("parameters"),
)
bug(
    "resumed_moments_bfloat16",
    "Moments were written down in bfloat16.",
    "NVIDIA-NeMo/Automodel/pull/2419",
    load=shortened(*MOMENTS),
)
bug(
    "resumed_correction_from_start",
    "The powers of beta begin anew, the moments do not.",
    "deepspeedai/DeepSpeed/pull/564",
    load=lost(counted=lambda steps: 0),
)
bug(
    "resumed_correction_one_behind",
    "The powers of beta are one step behind.",
    "goodfire-ai/spd/issues/616",
    load=lost(counted=lambda steps: steps - 1),
)
bug(
    "resumed_optimizer_anew",
    "The optimizer begins anew: neither its moments nor how many steps it has made are read.",
    "TrenTorch/TrenTorch/pull/187",
    load=lost(*MOMENTS, counted=lambda steps: 0),
)
bug(
    "resumed_schedule_from_start",
    "The schedule begins anew, and warms up again.",
    "NVIDIA-NeMo/Automodel/issues/763",
    clause="OPT-9",
    rate=lambda m, right: m.rate(m.number - m.resumed),
)
bug(
    "resumed_schedule_one_behind",
    "The schedule is one step behind: it was written down before it moved on.",
    "allenai/allennlp/pull/1650",
    clause="OPT-9",
    rate=lambda m, right: m.rate(m.number - (m.resumed > 0)),
)
bug(
    "resumed_masks_from_start",
    "Dropout begins anew with the masks of the first step.",
    "huggingface/transformers/issues/17032",
    clause="DRP-3",
    masks=otherwise(step=lambda m, site: site.step - m.resumed),
)
bug(
    "resumed_masks_of_other_seed",
    "Dropout goes on with another seed.",
    "modelscope/ms-swift/pull/9935",
    clause="DRP-3",
    masks=otherwise(seed=lambda m, site: site.seed + (m.resumed > 0)),
)
bug(
    "resumed_data_from_start",
    "The data begin anew.",
    "huggingface/accelerate/pull/4232",
    clause="OPT-10",
    batches=of_step(lambda m: m.number - m.resumed),
)
bug(
    "resumed_data_one_behind",
    "The last step before the checkpoint is made once more.",
    "AI-Hypercomputer/maxdiffusion/pull/484",
    clause="OPT-10",
    batches=of_step(lambda m: m.number - (m.resumed > 0)),
)
bug(
    "resumed_data_one_ahead",
    "A step's batches are skipped.",
    "huggingface/transformers/pull/46628",
    clause="OPT-10",
    batches=of_step(lambda m: m.number + (m.resumed > 0)),
)
