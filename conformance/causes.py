"""What may have caused a divergence: hypotheses, each tested by recomputing the one step that diverged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.tolerance import Case

Array = NDArray[np.floating]


@dataclass(frozen=True)
class Cause:
    """What explains a divergence.

    Attributes:
        hypothesis: its name.
        text: a sentence that says so.
        confident: whether nothing else that was tried explains it as well.
    """

    hypothesis: str
    text: str
    confident: bool


def explain(case: Case, forced: Mapping[str, Array], tensor: str, actual: Array, judge: Callable[..., Any]) -> Cause | None:
    """Return the hypothesis that explains a tensor to within its allowance."""
    return None
