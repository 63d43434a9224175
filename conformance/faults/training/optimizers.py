"""Bugs in how moments are kept and parameters moved (SPEC OPT-2 to OPT-5, OPT-8)."""

from __future__ import annotations

from typing import Any

from concord.backends.optimizers import Optimizer
from concord.conformance.faults.training import rules
from concord.conformance.faults.training.fault import (
    HUB,
    Change,
    Place,
    Tensor,
    Tensors,
    TrainingFault,
    recipe,
)

ALGORITHMS = {"adam": "adam", "amsgrad": "adam", "rmsprop": "rmsprop"}
"""Of which algorithm a fault is, by how its name begins."""


def fault(
    name: str, what: str, clause: str, change: Change, run: str, source: str, **fields: Any
) -> TrainingFault:
    algorithm = ALGORITHMS.get(name.partition("_")[0], "")
    return TrainingFault(
        name=name,
        algorithm=algorithm,
        group="optimizer",
        what=what,
        clause=clause,
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


def rule(optimizer: type[Optimizer]) -> Change:
    return Change(optimizer=optimizer)


def shortened(m: Place, kept: Tensors) -> dict[str, Tensor]:
    return {name: m.shortened(tensor, "bfloat16") for name, tensor in kept.items()}


def without_positions(m: Place, total: Tensors) -> dict[str, Tensor]:
    return {
        name: 0.0 * gradient if m.kinds[name] == "positions" else gradient for name, gradient in total.items()
    }


SMALL = {"epsilon": 1e-3}

FAULTS = (
    fault(
        "adam_epsilon_hat",
        "Epsilon is added to the root of the second moment before its bias is corrected.",
        "OPT-3",
        recipe(epsilon_placement="uncorrected"),
        "adamw",
        "tensorflow/tensorflow/issues/35102",
        options=SMALL,
    ),
    fault(
        "adam_epsilon_after_correction",
        "Epsilon is added after the bias is corrected, where the recipe's is epsilon hat.",
        "OPT-3",
        recipe(epsilon_placement="corrected"),
        "keras-adam",
        "keras-team/keras/pull/14035",
    ),
    fault(
        "adam_epsilon_inside_root",
        "Epsilon is added inside of the root.",
        "OPT-3",
        rule(rules.EpsilonInside),
        "adamw",
        "CyberZHG/keras-radam/issues/29",
        options=SMALL,
    ),
    fault(
        "adam_epsilon_of_keras",
        "Epsilon is 1e-7, another framework's default, instead of 1e-3.",
        "OPT-3",
        recipe(epsilon=1e-7),
        "adamw",
        "",
        options=SMALL,
    ),
    fault(
        "adam_bias_uncorrected",
        "Neither moment is corrected for its bias.",
        "OPT-3",
        recipe(bias_correction=False),
        "adamw",
        "BVLC/caffe/issues/4224",
    ),
    fault(
        "adam_first_moment_uncorrected",
        "The first moment is not corrected for its bias, the second is.",
        "OPT-3",
        rule(rules.FirstUncorrected),
        "adamw",
        "online-ml/river/pull/185",
    ),
    fault(
        "adam_second_moment_uncorrected",
        "The second moment is not corrected for its bias, the first is.",
        "OPT-3",
        rule(rules.SecondUncorrected),
        "adamw",
        "",
    ),
    fault(
        "adam_step_ahead",
        "Powers of beta are those of the next step.",
        "OPT-3",
        rule(rules.StepAhead),
        "adamw",
        "MansMeg/IntroML/pull/24",
    ),
    fault(
        "adam_correction_constant",
        "The correction is 1 - beta at every step, not 1 - beta^t.",
        "OPT-3",
        rule(rules.ConstantCorrection),
        "adamw",
        "eriklindernoren/ML-From-Scratch/issues/35",
    ),
    fault(
        "adam_corrected_in_place",
        "The corrected moments are kept, so that corrections pile up.",
        "OPT-3",
        rule(rules.CorrectedInPlace),
        "adamw",
        "frgfm/holocron/issues/1",
    ),
    fault(
        "adam_correction_without_root",
        "The root of the second moment is corrected by 1 - beta2^t, without the root of that.",
        "OPT-3",
        rule(rules.CorrectionWithoutRoot),
        "adamw",
        "pytorch/pytorch/pull/23737",
    ),
    fault(
        "adam_betas_swapped",
        "The two betas are swapped.",
        "OPT-3",
        Change(recipe=lambda r: r.replace(beta1=r.beta2, beta2=r.beta1)),
        "adamw",
        "",
    ),
    fault("adam_beta2_short", "Beta2 is 0.99 instead of 0.999.", "OPT-3", recipe(beta2=0.99), "adamw", ""),
    fault(
        "averages_reversed",
        "Averages weigh what is new by beta, and what was there by 1 - beta.",
        "OPT-3",
        rule(rules.AverageReversed),
        "adamw",
        "",
    ),
    fault(
        "adam_first_moment_unweighted",
        "The gradient goes into the first moment whole, not times 1 - beta1.",
        "OPT-3",
        rule(rules.FirstUnweighted),
        "adamw",
        "",
    ),
    fault(
        "adam_second_moment_of_first",
        "The second moment averages squares of the first moment instead of the gradient's.",
        "OPT-3",
        rule(rules.SecondOfFirst),
        "adamw",
        "",
    ),
    fault(
        "adam_first_moment_unused",
        "The gradient moves the parameter, not its average.",
        "OPT-3",
        rule(rules.GradientInsteadOfFirst),
        "adamw",
        "",
    ),
    fault(
        "adam_moments_bfloat16",
        "Moments are kept in bfloat16.",
        "OPT-3",
        Change(keeps=shortened),
        "adamw",
        "pytorch/torchtitan/pull/2732",
    ),
    fault(
        "amsgrad_ignored", "The option amsgrad is ignored.", "OPT-4", rule(rules.LargestUnused), "adam-l2", ""
    ),
    fault(
        "amsgrad_of_corrected",
        "The largest is taken of second moments that are corrected for their bias.",
        "OPT-4",
        rule(rules.LargestOfCorrected),
        "adam-l2",
        "google-deepmind/optax/pull/1423",
    ),
    fault(
        "amsgrad_in_place",
        "The largest second moment takes the place of the average too.",
        "OPT-4",
        rule(rules.LargestInPlace),
        "adam-l2",
        "",
    ),
    fault(
        "positions_frozen",
        "A learnt position table is not among what the optimizer updates.",
        "OPT-3",
        rule(rules.PositionsFrozen),
        "adamw",
        "",
    ),
    fault(
        "positions_detached",
        "No gradient reaches a learnt position table.",
        "GRD-1",
        Change(gradients=without_positions),
        "adamw",
        "",
    ),
    fault(
        "lazy_as_dense",
        "Rows that no batch looked up decay and move too.",
        "OPT-8",
        recipe(table_updates="dense"),
        "lazy-adam",
        "keras-team/keras/issues/19992",
    ),
    fault(
        "dense_as_lazy",
        "Rows that no batch looked up keep value and moments.",
        "OPT-8",
        recipe(table_updates="lazy"),
        "adamw",
        "tensorflow/tensorflow/issues/6460",
    ),
    fault(
        "momentum_with_rate_inside",
        "The rate is part of what momentum keeps.",
        "OPT-2",
        Change(recipe=lambda r: r.replace(momentum_form="displacement", dampening=0.0)),
        "nesterov",
        "pytorch/pytorch/issues/1099",
    ),
    fault(
        "momentum_as_average",
        "Momentum weighs each gradient by 1 - momentum.",
        "OPT-2",
        Change(recipe=lambda r: r.replace(dampening=r.momentum)),
        "sgd",
        "HIPS/autograd/issues/289",
    ),
    fault("momentum_undampened", "Gradients are not dampened.", "OPT-2", recipe(dampening=0.0), "sgd", ""),
    fault(
        "momentum_dampened_from_first",
        "The first gradient is dampened too.",
        "OPT-2",
        rule(rules.DampenedFirst),
        "sgd",
        "ml-explore/mlx/pull/87",
    ),
    fault(
        "momentum_missing",
        "There is no momentum.",
        "OPT-2",
        Change(recipe=lambda r: r.replace(momentum=0.0, dampening=0.0, nesterov=False)),
        "sgd",
        "",
    ),
    fault(
        "optimizer_made_anew",
        "The optimizer is made anew at each step, and has forgotten what it kept.",
        "OPT-3",
        rule(rules.MadeAnew),
        "adamw",
        "OpenNMT/OpenNMT-py/issues/617",
    ),
    fault(
        "nesterov_ignored", "The option nesterov is ignored.", "OPT-2", recipe(nesterov=False), "nesterov", ""
    ),
    fault(
        "nesterov_behind",
        "Nesterov's step takes the momentum as it was before the gradient.",
        "OPT-2",
        rule(rules.NesterovBehind),
        "nesterov",
        "pytorch/pytorch/issues/14465",
    ),
    fault(
        "nesterov_without_gradient",
        "Nesterov's step takes momentum times what is kept, without the gradient.",
        "OPT-2",
        rule(rules.NesterovWithoutGradient),
        "nesterov",
        "pytorch/pytorch/pull/5920",
    ),
    fault(
        "rmsprop_epsilon_inside",
        "Epsilon is added inside of the root.",
        "OPT-5",
        recipe(epsilon_placement="inside"),
        "rmsprop",
        "pytorch/pytorch/issues/23796",
    ),
    fault(
        "rmsprop_epsilon_outside",
        "Epsilon is added outside of the root.",
        "OPT-5",
        recipe(epsilon_placement="uncorrected"),
        "rmsprop",
        "chainer/chainer/issues/4754",
        options={"epsilon_placement": "inside"},
    ),
    fault(
        "rmsprop_share_of_keras",
        "The average keeps 0.9 of what was there, another framework's default, instead of 0.99.",
        "OPT-5",
        recipe(beta2=0.9),
        "rmsprop",
        "",
    ),
    fault(
        "rmsprop_not_centered",
        "The option centered is ignored.",
        "OPT-5",
        recipe(centered=False),
        "rmsprop",
        "",
    ),
    fault(
        "rmsprop_divides_by_average_before",
        "The gradient is divided by the average as it was before it.",
        "OPT-5",
        rule(rules.BeforeItsSquare),
        "rmsprop",
        "",
        options={"centered": False, "epsilon": 0.1},
    ),
    fault(
        "rmsprop_momentum_with_rate_inside",
        "The rate is part of what momentum keeps.",
        "OPT-2",
        recipe(momentum_form="displacement"),
        "rmsprop",
        "",
    ),
)
