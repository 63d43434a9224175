"""Canonical weights in and out of the models of the four frameworks: names and layouts.

No framework is called here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tensor = Any
"""A tensor or parameter of the framework."""


@dataclass(frozen=True)
class Naming:
    """What a framework calls parameters, and how it lays them out.

    Attributes:
        leaves: the last word of a native name, for each kind of parameter
            (:class:`concord.spec.parameters.Parameter`).
        transposed: whether a linear weight is (out, in); the canonical one is (in, out).
    """

    leaves: Mapping[str, str]
    transposed: bool = False

    def native_name(self, name: str, kind: str) -> str:
        """Return the native name of a parameter."""
        return f"{name.rpartition('.')[0]}.{self.leaves[kind]}"


NAMINGS = {
    "torch": Naming(
        {
            "embedding": "weight",
            "positions": "weight",
            "kernel": "weight",
            "bias": "bias",
            "gamma": "weight",
            "beta": "bias",
        },
        transposed=True,
    ),
    "tf": Naming(
        {
            "embedding": "embeddings",
            "positions": "embeddings",
            "kernel": "kernel",
            "bias": "bias",
            "gamma": "gamma",
            "beta": "beta",
        }
    ),
    "paddle": Naming(
        {
            "embedding": "weight",
            "positions": "weight",
            "kernel": "weight",
            "bias": "bias",
            "gamma": "weight",
            "beta": "bias",
        }
    ),
    "jax": Naming(
        {
            "embedding": "embedding",
            "positions": "embedding",
            "kernel": "kernel",
            "bias": "bias",
            "gamma": "scale",
            "beta": "bias",
        }
    ),
}
"""What each framework says, known without it: a file of weights is read where none is installed."""
