"""Bugs in how weights decay (SPEC OPT-6)."""

from __future__ import annotations

from typing import Any

from concord.conformance.faults.training import rules
from concord.conformance.faults.training.fault import HUB, Change, TrainingFault, recipe


def fault(
    name: str, what: str, change: Change, source: str, run: str = "adamw", **fields: Any
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group="decay",
        what=what,
        clause="OPT-6",
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


FAULTS = (
    fault(
        "decay_coupled",
        "Decay is added to the gradient, and goes through the moments.",
        recipe(decay_form="coupled"),
        "pytorch/pytorch/pull/4429",
    ),
    fault(
        "decay_decoupled",
        "Decay is taken off besides the step, where the recipe adds it to the gradient.",
        recipe(decay_form="times_rate"),
        "deeplearning4j/deeplearning4j/issues/5843",
        "adam-l2",
    ),
    fault(
        "decay_not_times_rate",
        "Decay is not multiplied by the learning rate.",
        recipe(decay_form="alone"),
        "tensorflow/addons/issues/2282",
    ),
    fault(
        "decay_by_full_rate",
        "Decay is multiplied by the full rate, not by the schedule's.",
        Change(optimizer=rules.DecayByFullRate),
        "PaddlePaddle/Paddle/pull/30130",
    ),
    fault("decay_missing", "Nothing decays.", recipe(weight_decay=0.0), "PaddlePaddle/Paddle/issues/29794"),
    fault(
        "decay_everywhere",
        "Biases, gains and offsets decay too.",
        recipe(undecayed=()),
        "huggingface/transformers/issues/4360",
    ),
    fault(
        "decay_of_biases",
        "Biases decay too; gains and offsets do not.",
        recipe(undecayed=("gain", "offset")),
        "",
    ),
    fault(
        "decay_of_norms",
        "Gains and offsets of norms decay too, since names of another model are left out.",
        recipe(undecayed=("bias",)),
        "huggingface/transformers/issues/16908",
    ),
    fault(
        "decay_of_offsets",
        "Offsets of norms decay too.",
        recipe(undecayed=("bias", "gain")),
        "huggingface/transformers/issues/4832",
    ),
    fault(
        "decay_not_of_tables",
        "Embedding tables do not decay.",
        recipe(undecayed=("bias", "gain", "offset", "table", "positions")),
        "Lightning-AI/lit-llama/issues/254",
    ),
    fault(
        "decay_not_of_positions",
        "Learnt positions do not decay; other tables do.",
        recipe(undecayed=("bias", "gain", "offset", "positions")),
        "",
    ),
    fault(
        "decay_of_biases_alone",
        "What is to be left out decays, and the rest does not.",
        recipe(undecayed=("table", "positions", "kernel")),
        "",
    ),
    fault(
        "decay_after_step",
        "The parameter decays after its step, not before.",
        Change(optimizer=rules.DecayAfterStep),
        "bitsandbytes-foundation/bitsandbytes/issues/2010",
    ),
    fault(
        "decay_reversed",
        "Decay makes parameters larger.",
        Change(optimizer=rules.DecayReversed),
        "egg-west/AdamW-pytorch/issues/1",
    ),
    fault(
        "decay_constant",
        "Decay takes a constant off, not a share of the parameter.",
        Change(optimizer=rules.DecayConstant),
        "e-sensing/torchopt/pull/14",
    ),
    fault(
        "undecayed_frozen",
        "What is left out of decay is not updated at all.",
        Change(optimizer=rules.UndecayedFrozen),
        "PaddlePaddle/PaddleCustomDevice/pull/1202",
    ),
    fault(
        "decay_twice",
        "Decay counts twice: in the loss, and in the optimizer.",
        Change(recipe=lambda r: r.replace(weight_decay=2 * r.weight_decay)),
        "",
        "adam-l2",
    ),
    fault(
        "decay_not_in_moments",
        "Decay that is to go through the moments is taken off besides the step, and the moments see the gradient alone.",
        Change(optimizer=rules.DecayNotInMoments),
        "",
        "sgd",
    ),
)
