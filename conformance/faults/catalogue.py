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

ALL: tuple[Fault, ...] = tuple(
    mutant
    for group in (embeddings, positions, masks, attention, norms, activations, pooling, losses, gradients, precisions, weights, kernels, places, backward, saturation, rounding)
    for mutant in group.FAULTS
)
"""Every mutant, group by group."""

FAULTS: dict[str, Fault] = {mutant.name: mutant for mutant in ALL}
"""Every mutant by name."""

__all__ = ["ALL", "FAULTS", "GROUPS", "Fault"]
