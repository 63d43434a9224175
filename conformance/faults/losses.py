"""Bugs in the loss (SPEC LOS-1 to LOS-4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from conformance.faults.fault import Fault, inputs, option, steps
from conformance.faults.operations import Array
from conformance.mutants.rewrites import Loss, SigmoidLosses, SoftmaxLosses
from conformance.mutants.surgery import Steps


def smoothed(family: Steps, log_probabilities: Array, labels: Array) -> Array:
    """Give a tenth of the weight to all classes alike."""
    return family.o.pick(log_probabilities, labels) * 0.9 + family.o.mean(log_probabilities, -1)[:, 0] * 0.1


def sigmoid_for_softmax(family: Steps, logits: Array, labels: Array, tap: Any) -> Array:
    """Sum the binary cross-entropies of all classes."""
    o = family.o
    tap("log_probabilities", o.log_softmax(logits, -1))
    wanted = o.constant(np.arange(tuple(logits.shape)[1]) == o.numpy(labels)[:, None])
    return -o.sum(o.log(o.sigmoid(o.where(wanted, logits, -logits))), -1)[:, 0]


def every_sample_for_every_label(family: Steps, log_probabilities: Array, labels: Array) -> Array:
    """Return the mean over labels for each sample: what (B, 1) against (B,) broadcasts to."""
    given = family.o.numpy(labels)
    share = np.stack([given == c for c in range(tuple(log_probabilities.shape)[1])], axis=-1).mean(axis=0)
    return family.o.sum(log_probabilities * family.o.constant(share[None], log_probabilities), -1)[:, 0]


def bias_left_out(family: Steps, factor: float, classifier: Any) -> Array:
    weight = family.o.weight(classifier)
    return family.o.sum(weight * weight) * (0.5 * factor)


def not_halved(family: Steps, factor: float, classifier: Any) -> Array:
    weight, bias = family.o.weight(classifier), family.o.bias(classifier)
    return (family.o.sum(weight * weight) + family.o.sum(bias * bias)) * factor


def mutant(name: str, what: str, **fields: Any) -> Fault:
    return Fault(**{"name": name, "group": "loss", "what": what, "variant": "bert", "first": ("loss",), **fields})


def of_one_class(name: str, what: str, **fields: Any) -> Fault:
    return mutant(name, what, **{"variant": "tf1-text-classifier", "scenario": "sigmoid", **fields})


FAULTS = (
    mutant(
        "loss_label_smoothing", "Labels are smoothed by 0.1, as in training.", first=("losses",), change=steps(SoftmaxLosses, pick=smoothed)
    ),
    mutant(
        "loss_sum_for_mean",
        "Losses are summed over samples.",
        input="more than one sample",
        change=steps(Loss, reduce=lambda family, losses, counted, count: family.o.sum(losses)),
    ),
    mutant(
        "loss_sigmoid_for_softmax",
        "Each class has a binary cross-entropy of its own.",
        first=("losses",),
        change=steps(SoftmaxLosses, run=sigmoid_for_softmax),
    ),
    mutant(
        "loss_softmax_twice",
        "The cross-entropy from logits is given probabilities.",
        first=("log_probabilities",),
        change=steps(SoftmaxLosses, log_softmax=lambda family, logits: family.o.log_softmax(family.o.softmax(logits, -1), -1)),
    ),
    mutant(
        "loss_epsilon_in_logarithm",
        "1e-8 is added to probabilities before their logarithm is taken.",
        first=("log_probabilities",),
        input="any, in float64",
        change=steps(SoftmaxLosses, log_softmax=lambda family, logits: family.o.log(family.o.softmax(logits, -1) + 1e-8)),
    ),
    mutant(
        "loss_broadcast",
        "Labels of shape (B, 1) meet losses of shape (B,): every label is held against every sample.",
        first=("losses",),
        input="more than one sample",
        change=steps(SoftmaxLosses, pick=every_sample_for_every_label),
    ),
    mutant(
        "loss_labels_from_one",
        "Labels are numbered from 1, and the last wraps around.",
        first=("losses",),
        change=inputs(lambda config, batch: {"labels": (batch.required("labels") + 1) % config.num_classes}),
    ),
    mutant(
        "loss_ignored_label_counted",
        "Samples with the label to be ignored are not left out.",
        variant="bert-pytorch",
        scenario="ignored-label",
        input="a label to be ignored",
        alone=True,
        change=option(ignore_label=None),
    ),
    mutant(
        "loss_divided_by_all",
        "Ignored samples are left out of the sum, but not of the count.",
        variant="bert-pytorch",
        scenario="ignored-label",
        input="a label to be ignored",
        change=steps(
            Loss, reduce=lambda family, losses, counted, count: family.o.sum(family.o.where(counted, losses, 0.0)) / float(len(losses))
        ),
    ),
    of_one_class("loss_l2_missing", "The L2 term is left out.", input="an L2 term", alone=True, change=option(l2_weight=0.0)),
    of_one_class(
        "loss_l2_without_bias",
        "The L2 term has the weight alone, not the bias.",
        input="an L2 term",
        change=steps(Loss, penalty=bias_left_out),
    ),
    of_one_class("loss_l2_not_halved", "The L2 term is not halved.", input="an L2 term", change=steps(Loss, penalty=not_halved)),
    of_one_class(
        "loss_sigmoid_twice",
        "The cross-entropy from logits is given probabilities.",
        first=("losses",),
        input="one class",
        change=steps(SigmoidLosses, run=lambda family, logits, labels, tap: family.original(family.o.sigmoid(logits), labels, tap)),
    ),
    of_one_class(
        "loss_labels_inverted",
        "The logit is taken for that of class 0.",
        first=("losses",),
        input="one class",
        change=inputs(lambda config, batch: {"labels": 1 - batch.required("labels")}),
    ),
)
