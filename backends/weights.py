"""Names and layouts of weights in the four frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Tensor = Any


@dataclass(frozen=True)
class Naming:
    """A framework's parameter names and layout."""

    # The last word of a native name, by kind of parameter; positions count as embeddings.
    embedding: str
    kernel: str
    gamma: str
    beta: str
    transposed: bool = False  # whether a linear weight is (out, in) instead of (in, out)

    def native_name(self, name: str, kind: str) -> str:
        """Native name of a parameter."""
        leaf = "bias" if kind == "bias" else getattr(self, "embedding" if kind == "positions" else kind)
        return f"{name.rpartition('.')[0]}.{leaf}"


# Independent of the frameworks: weights can be read where none is installed (decision 0027).
NAMINGS = {
    "torch": Naming("weight", "weight", "weight", "bias", transposed=True),
    "tf": Naming("embeddings", "kernel", "gamma", "beta"),
    "paddle": Naming("weight", "weight", "weight", "bias"),
    "jax": Naming("embedding", "kernel", "scale", "bias"),
}
