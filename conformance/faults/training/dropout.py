"""Bugs in what dropout drops while a model is trained (SPEC DRP-1 to DRP-3)."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance.faults.training.fault import HUB, Change, Place, Site, TrainingFault
from concord.spec.training.dropout import kept
from concord.spec.training.recipe import RATES, Recipe

Drawn = tuple[NDArray[np.bool_], float]


def fault(
    name: str, what: str, change: Change, source: str, clause: str = "DRP-3", **fields: Any
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group="dropout",
        what=what,
        clause=clause,
        change=change,
        run="dropout",
        source=source and HUB + source,
        **fields,
    )


def drawn(site: Site) -> Drawn:
    """Return what the specification keeps."""
    return kept(site.seed, site.step, site.number, site.name, site.shape, site.rate), site.rate


def otherwise(**fields: Callable[[Site], Any]) -> Change:
    """Return the change to what another site, step, batch or seed would keep."""
    return Change(
        masks=lambda m, site: drawn(
            dataclasses.replace(site, **{name: of(site) for name, of in fields.items()})
        )
    )


def rescaled(rate: Callable[[float], float]) -> Change:
    """Return the change to the same elements, scaled as another rate asks for."""
    return Change(masks=lambda m, site: (drawn(site)[0], rate(site.rate)))


def rates(change: Callable[[Recipe], dict[str, float]]) -> Change:
    return Change(recipe=lambda given: given.replace(**change(given)))


def each(change: Callable[[float], float]) -> Callable[[Recipe], dict[str, float]]:
    return lambda given: {name: change(getattr(given, name)) for name in RATES}


def one_for_all_samples(m: Place, site: Site) -> Drawn:
    keep, rate = drawn(dataclasses.replace(site, shape=site.shape[1:]))
    return np.broadcast_to(keep, site.shape), rate


def one_for_all_positions(m: Place, site: Site) -> Drawn:
    """Whole vectors are dropped: each sample has one draw for all of its rows."""
    keep, rate = drawn(
        dataclasses.replace(
            site, shape=(*site.shape[:-2], 1, site.shape[-1]) if len(site.shape) > 2 else site.shape
        )
    )
    return np.broadcast_to(keep, site.shape), rate


def reversed_choice(m: Place, site: Site) -> Drawn:
    keep, rate = drawn(site)
    return ~keep, rate


def column_by_column(m: Place, site: Site) -> Drawn:
    keep, rate = drawn(dataclasses.replace(site, shape=site.shape[::-1]))
    return keep.transpose(), rate


def generator(m: Place, site: Site) -> Drawn:
    """A framework's own generator takes the place of the specification's."""
    draw = np.random.default_rng(
        [site.seed & 0xFFFFFFFF, site.step, site.number, zlib.crc32(site.name.encode())]
    ).random(site.shape)
    return draw >= site.rate, site.rate


def swapped(one: str, other: str) -> Callable[[Recipe], dict[str, float]]:
    return lambda given: {one: getattr(given, other), other: getattr(given, one)}


FAULTS = (
    fault(
        "dropout_off",
        "Nothing is dropped: the model is still in the mode of the evaluation before.",
        rates(each(lambda rate: 0.0)),
        "MILVLG/mcan-vqa/issues/26",
        "DRP-2",
    ),
    fault(
        "dropout_same_each_step",
        "Every step drops the elements of the first: the key is a constant of the compiled step.",
        otherwise(step=lambda site: 0),
        "google/flax/pull/2593",
    ),
    fault(
        "dropout_same_each_batch",
        "All batches of a step drop the same elements.",
        otherwise(number=lambda site: 0),
        "google/flax/pull/2631",
    ),
    fault(
        "dropout_same_each_site",
        "All sites draw the same numbers: the key is not split between layers.",
        otherwise(name=lambda site: site.names[0]),
        "google/flax/issues/3115",
    ),
    fault(
        "dropout_same_each_sample",
        "All samples of a batch drop the same elements.",
        Change(masks=one_for_all_samples),
        "patrick-kidger/equinox/pull/316",
    ),
    fault(
        "dropout_same_each_row",
        "All rows of a sample drop the same elements.",
        Change(masks=one_for_all_positions),
        "",
    ),
    fault(
        "dropout_seed_ignored",
        "The seed is not that of the recipe but zero.",
        otherwise(seed=lambda site: 0),
        "ai2cm/ace/issues/690",
    ),
    fault(
        "dropout_seed_cut_off",
        "The seed is cut off to 32 bits.",
        otherwise(seed=lambda site: site.seed & 0xFFFFFFFF),
        "",
    ),
    fault("dropout_step_ahead", "Steps are counted from 1.", otherwise(step=lambda site: site.step + 1), ""),
    fault(
        "dropout_counts_batches",
        "Every batch is counted as a step of its own.",
        otherwise(step=lambda site: 2 * site.step + site.number, number=lambda site: 0),
        "",
    ),
    fault(
        "dropout_of_framework",
        "The framework's own generator drops other elements.",
        Change(masks=generator),
        "",
    ),
    fault(
        "dropout_column_by_column",
        "Elements are numbered column by column.",
        Change(masks=column_by_column),
        "",
    ),
    fault(
        "dropout_unscaled",
        "What is kept is not scaled up.",
        rescaled(lambda rate: 0.0),
        "rbgirshick/py-faster-rcnn/issues/211",
        "DRP-1",
    ),
    fault(
        "dropout_scaled_by_rate",
        "What is kept is scaled by 1 / rate, not by 1 / (1 - rate).",
        rescaled(lambda rate: 1 - rate),
        "rasbt/LLMs-from-scratch/issues/431",
        "DRP-1",
    ),
    fault(
        "dropout_scaled_down",
        "What is kept is scaled by 1 - rate, as at inference.",
        rescaled(lambda rate: 1 - 1 / (1 - rate)),
        "clab/dynet/issues/186",
        "DRP-1",
    ),
    fault(
        "dropout_reversed",
        "What should be dropped is kept, and the other way round.",
        Change(masks=reversed_choice),
        "",
        "DRP-1",
    ),
    fault(
        "dropout_keeps_rate",
        "The rate is taken for the share that is kept.",
        rates(each(lambda rate: 1 - rate if rate else 0.0)),
        "karpathy/convnetjs/pull/106",
        "DRP-2",
    ),
    fault(
        "dropout_rate_of_other_site",
        "Attention weights are dropped at the rate of the feed-forward network, and the other way round.",
        rates(swapped("dropout_weights", "dropout_feed_forward")),
        "",
        "DRP-2",
    ),
    fault(
        "dropout_weights_left_out",
        "Attention weights are not dropped.",
        rates(lambda given: {"dropout_weights": 0.0}),
        "",
        "DRP-2",
    ),
    fault(
        "dropout_head_left_out",
        "Nothing is dropped before the classifier.",
        rates(lambda given: {"dropout_head": 0.0}),
        "",
        "DRP-2",
    ),
)
