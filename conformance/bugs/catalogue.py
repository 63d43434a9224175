"""Every mutant by name."""

from __future__ import annotations

from concord.conformance.bugs import (
    activations,
    attention,
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
from concord.conformance.bugs.bug import GROUPS, Bug, fits
from concord.conformance.bugs.training.catalogue import TRAINING

ENTRIES: tuple[Bug, ...] = tuple(
    bug
    for module in (
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
        saturation,
        rounding,
    )
    for bug in module.BUGS
)
"""Every bug, module by module."""

ALL: tuple[Bug, ...] = tuple(
    sorted((bug for bug in ENTRIES if bug.variant), key=lambda bug: GROUPS.index(bug.group))
)
"""Every mutant, group by group."""

BUGS: dict[str, Bug] = {bug.name: bug for bug in ALL}
"""Every mutant by name."""

KNOWN: dict[str, Bug] = {**BUGS, **TRAINING}
"""Those of training too."""

_SEARCHED = (
    "stored_in_*",
    "computed_in_*",
    "weight_in_*",
    "*_products",
    "clamped",
    "dropout",
    "variance_by_squares",
)
"""What a search of :mod:`concord.conformance.explain` finds, whatever the numbers in it are."""


def _tried(bug: Bug) -> bool:
    causes = (bug.cause or "").split(" or ")
    searched = any(fits(cause, _SEARCHED) for cause in causes)
    return bool(bug.cause and bug.change.edits) and (not searched or bug.name in causes)


TRIED: tuple[Bug, ...] = tuple(bug for bug in ENTRIES if _tried(bug))
"""Those whose edits are tried as explanations."""

__all__ = ["ALL", "BUGS", "ENTRIES", "GROUPS", "KNOWN", "TRIED", "Bug"]
