"""Bugs in the loss (SPEC LOS-1 to LOS-4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.conformance.bugs.bug import Bug, Change, edited, inputs, option
from concord.conformance.bugs.context import Context
from concord.conformance.bugs.operations import Array


def smoothed(m: Context, y: Array) -> Array:
    """Give a tenth of the weight to all classes alike."""
    return y * 0.9 - m.o.mean(m.source(), 1)[:, 0] * 0.1


def sigmoid_for_softmax(m: Context, y: Array) -> Array:
    """Sum the binary cross-entropies of all classes."""
    return m.o.sum(m.binary_losses(m.now["logits"], np.arange(m.config.num_classes) == m.labels[:, None]), 1)[
        :, 0
    ]


def every_sample_for_every_label(m: Context, y: Array) -> Array:
    """Return the mean over labels for each sample: what (B, 1) against (B,) broadcasts to."""
    share = (m.labels[:, None] == np.arange(m.config.num_classes)).mean(axis=0)
    return -m.o.sum(m.source() * m.o.constant(share[None], m.source()), 1)[:, 0]


def of_probability(m: Context, y: Array) -> Array:
    """Take the probability of the only class for its logit."""
    return m.binary_losses(m.o.sigmoid(m.source())[:, 0], m.labels == 1)


def penalised(*parts: str, factor: float = 1.0) -> Change:
    """Return the change to an L2 term of these parameters of the classifier, times a factor."""
    return edited(
        lambda m, y: m.total_loss(m.source()) / float(m.counted.sum()) + m.penalty(*parts) * factor, "loss"
    )


def mutant(name: str, what: str, **fields: Any) -> Bug:
    return Bug(
        **{"name": name, "group": "loss", "what": what, "variant": "bert", "first": ("loss",), **fields}
    )


def of_one_class(name: str, what: str, **fields: Any) -> Bug:
    return mutant(name, what, **{"variant": "tf1-text-classifier", "scenario": "sigmoid", **fields})


BUGS = (
    mutant(
        "loss_label_smoothing",
        "Labels are smoothed by 0.1, as in training.",
        first=("losses",),
        change=edited(smoothed, "losses"),
        cause="label_smoothing",
        clause="LOS-1",
    ),
    mutant(
        "loss_sum_for_mean",
        "Losses are summed over samples.",
        input="more than one sample",
        change=edited(lambda m, y: m.o.sum(m.source()), "loss"),
        cause="loss_sum",
        clause="LOS-2",
    ),
    mutant(
        "loss_sigmoid_for_softmax",
        "Each class has a binary cross-entropy of its own.",
        first=("losses",),
        change=edited(sigmoid_for_softmax, "losses"),
        cause="sigmoid_for_softmax",
        clause="LOS-1",
    ),
    mutant(
        "loss_softmax_twice",
        "The cross-entropy from logits is given probabilities.",
        first=("log_probabilities",),
        change=edited(lambda m, y: m.o.log_softmax(m.o.softmax(m.source(), 1), 1), "log_probabilities"),
        cause="softmax_twice",
        clause="LOS-1",
    ),
    mutant(
        "loss_epsilon_in_logarithm",
        "1e-8 is added to probabilities before their logarithm is taken.",
        first=("log_probabilities",),
        input="any, in float64",
        change=edited(lambda m, y: m.o.log(m.o.softmax(m.source(), 1) + 1e-8), "log_probabilities"),
        cause="loss_epsilon_in_logarithm",
        tried=True,
        clause="LOS-1",
    ),
    mutant(
        "loss_broadcast",
        "Labels of shape (B, 1) meet losses of shape (B,): every label is held against every sample.",
        first=("losses",),
        input="more than one sample",
        change=edited(every_sample_for_every_label, "losses"),
        cause="labels_of_other_samples",
        clause="LOS-1",
    ),
    mutant(
        "loss_labels_from_one",
        "Labels are numbered from 1, and the last wraps around.",
        first=("losses",),
        change=inputs(lambda config, batch: {"labels": (batch.required("labels") + 1) % config.num_classes}),
        cause="labels_shifted",
        clause="LOS-1",
    ),
    mutant(
        "loss_ignored_label_counted",
        "Samples with the label to be ignored are not left out.",
        variant="bert-pytorch",
        scenario="ignored-label",
        input="a label to be ignored",
        alone=True,
        change=option(ignore_label=None),
        cause="ignore_label",
        clause="LOS-3",
    ),
    mutant(
        "loss_divided_by_all",
        "Ignored samples are left out of the sum, but not of the count.",
        variant="bert-pytorch",
        scenario="ignored-label",
        input="a label to be ignored",
        change=edited(lambda m, y: m.total_loss(m.source()) / float(len(m.labels)), "loss"),
        cause="loss_divided_by_all",
        clause="LOS-3",
    ),
    of_one_class(
        "loss_l2_missing",
        "The L2 term is left out.",
        input="an L2 term",
        alone=True,
        change=option(l2_weight=0.0),
        cause="l2_weight",
        clause="LOS-4",
    ),
    of_one_class(
        "loss_l2_without_bias",
        "The L2 term has the weight alone, not the bias.",
        input="an L2 term",
        change=penalised("weight"),
        cause="l2_parameters",
        clause="LOS-4",
    ),
    of_one_class(
        "loss_l2_not_halved",
        "The L2 term is not halved.",
        input="an L2 term",
        change=penalised(factor=2.0),
        cause="l2_weight",
        clause="LOS-4",
    ),
    of_one_class(
        "loss_sigmoid_twice",
        "The cross-entropy from logits is given probabilities.",
        first=("losses",),
        input="one class",
        change=edited(of_probability, "losses"),
        cause="sigmoid_twice",
        clause="LOS-1",
    ),
    of_one_class(
        "loss_labels_inverted",
        "The logit is taken for that of class 0.",
        first=("losses",),
        input="one class",
        change=inputs(lambda config, batch: {"labels": 1 - batch.required("labels")}),
        cause="labels_reversed",
        clause="LOS-1",
    ),
)
