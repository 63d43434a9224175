"""Every mutant by name."""

from __future__ import annotations

from concord.conformance.faults import (
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
from concord.conformance.faults.fault import GROUPS, Fault
from concord.conformance.faults.training.catalogue import TRAINING
from concord.conformance.faults.training.fault import TrainingFault

ALL: tuple[Fault, ...] = tuple(
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
    for mutant in group.FAULTS
)
"""Every mutant, group by group."""

FAULTS: dict[str, Fault] = {mutant.name: mutant for mutant in ALL}
"""Every mutant by name."""

KNOWN: dict[str, Fault | TrainingFault] = {**FAULTS, **TRAINING}
"""Those of training too."""

__all__ = ["ALL", "FAULTS", "GROUPS", "KNOWN", "Fault", "TrainingFault"]
