"""Every mutant by name."""

from __future__ import annotations

from concord.conformance.bugs import (
    activations,
    attention,
    backward,
    embeddings,
    gradients,
    kernels,
    losses,
    masks,
    norms,
    places,
    pooling,
    positions,
    precisions,
    rounding,
    saturation,
    weights,
)
from concord.conformance.bugs.bug import GROUPS, Bug
from concord.conformance.bugs.training.catalogue import TRAINING
from concord.conformance.bugs.training.step import TrainingBug

ALL: tuple[Bug, ...] = tuple(
    mutant
    for group in (
        embeddings,
        positions,
        masks,
        attention,
        norms,
        activations,
        pooling,
        losses,
        gradients,
        precisions,
        weights,
        kernels,
        places,
        backward,
        saturation,
        rounding,
    )
    for mutant in group.BUGS
)
"""Every mutant, group by group."""

BUGS: dict[str, Bug] = {mutant.name: mutant for mutant in ALL}
"""Every mutant by name."""

KNOWN: dict[str, Bug | TrainingBug] = {**BUGS, **TRAINING}
"""Those of training too."""

__all__ = ["ALL", "BUGS", "GROUPS", "KNOWN", "Bug", "TrainingBug"]
