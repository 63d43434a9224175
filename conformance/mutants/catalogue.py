"""Every mutant by name."""

from __future__ import annotations

from conformance.mutants.groups import (
    activations,
    attention,
    embeddings,
    gradients,
    losses,
    masks,
    norms,
    pooling,
    positions,
    precisions,
    weights,
)
from conformance.mutants.mutant import GROUPS, Mutant

ALL: tuple[Mutant, ...] = tuple(
    mutant
    for group in (embeddings, positions, masks, attention, norms, activations, pooling, losses, gradients, precisions, weights)
    for mutant in group.MUTANTS
)
"""Every mutant, group by group."""

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in ALL}
"""Every mutant by name."""

__all__ = ["ALL", "GROUPS", "MUTANTS", "Mutant"]
