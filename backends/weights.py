"""Canonical weights in and out of the models of the four frameworks: names and layouts.

No framework is called here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any
"""A tensor or parameter of the framework."""


@dataclass(frozen=True)
class Naming:
    """What a framework calls parameters, and how it lays them out.

    Attributes:
        embedding, kernel, gamma, beta: the last word of a native name, for a kind of parameter
            (:class:`concord.spec.parameters.Parameter`); positions are embeddings, and a bias is one.
        transposed: whether a linear weight is (out, in); the canonical one is (in, out).
    """

    embedding: str
    kernel: str
    gamma: str
    beta: str
    transposed: bool = False

    def native_name(self, name: str, kind: str) -> str:
        """Return the native name of a parameter."""
        leaf = "bias" if kind == "bias" else getattr(self, "embedding" if kind == "positions" else kind)
        return f"{name.rpartition('.')[0]}.{leaf}"


NAMINGS = {
    "torch": Naming("weight", "weight", "weight", "bias", transposed=True),
    "tf": Naming("embeddings", "kernel", "gamma", "beta"),
    "paddle": Naming("weight", "weight", "weight", "bias"),
    "jax": Naming("embedding", "kernel", "scale", "bias"),
}
"""What each framework says, known without it: a file of weights is read where none is installed."""
