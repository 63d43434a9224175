"""Canonical weights in and out of the models of the four frameworks: names and layouts. No framework is called here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights, parameters

Tensor = Any
"""A tensor or parameter of the framework."""


@dataclass(frozen=True)
class Naming:
    """What a framework calls parameters, and how it lays them out.

    Attributes:
        leaves: the last word of a native name, for each kind of parameter (:class:`concord.spec.parameters.Parameter`).
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
            "table": "weight",
            "positions": "weight",
            "kernel": "weight",
            "bias": "bias",
            "gain": "weight",
            "offset": "bias",
        },
        transposed=True,
    ),
    "tf": Naming(
        {
            "table": "embeddings",
            "positions": "embeddings",
            "kernel": "kernel",
            "bias": "bias",
            "gain": "gamma",
            "offset": "beta",
        }
    ),
    "paddle": Naming(
        {
            "table": "weight",
            "positions": "weight",
            "kernel": "weight",
            "bias": "bias",
            "gain": "weight",
            "offset": "bias",
        }
    ),
    "jax": Naming(
        {
            "table": "embedding",
            "positions": "embedding",
            "kernel": "kernel",
            "bias": "bias",
            "gain": "scale",
            "offset": "bias",
        }
    ),
}
"""What each framework says, known without it: a file of weights is read where none is installed."""


class FrameworkWeights(ABC):
    """Where a framework keeps what the specification calls by canonical names.

    The path of a native name is canonical, its last word the framework's.

    Attributes:
        naming: the framework's entry of :data:`NAMINGS`.
        named: returns the parameters of a model by native name.
        trained: returns those that a gradient is taken by.
        explicit_names: returns tensors by native name, those of an encoder layer of the framework's by the names that the explicit one has.
    """

    naming: ClassVar[Naming]
    named: ClassVar[staticmethod[[Any], Mapping[str, Tensor]]]
    trained: ClassVar[staticmethod[[Any], Mapping[str, Tensor]]]
    explicit_names: ClassVar[staticmethod[[Mapping[str, Tensor]], Mapping[str, Tensor]]] = staticmethod(
        lambda named: named
    )

    def relaid(self, array: NDArray[Any], kind: str) -> NDArray[Any]:
        """Return a canonical array in the native layout, or a native one in the canonical layout."""
        return array.T if self.naming.transposed and kind == "kernel" else array

    def load(self, model: Any, config: EncoderConfig, weights: Weights, part: str) -> None:
        """Copy canonical weights into a model, rounding each to the model's dtype once (SPEC PRC-2, WGT-4)."""
        named = self.explicit_names(self.named(model))
        for name, parameter in parameters(config, part).items():
            self.assign(
                named[self.naming.native_name(name, parameter.kind)],
                np.ascontiguousarray(self.relaid(weights[name], parameter.kind)),
            )

    def export(
        self, named: Mapping[str, Tensor], config: EncoderConfig, part: str
    ) -> dict[str, NDArray[Any]]:
        """Return tensors that bear native names, a model's parameters or their gradients, as canonical arrays."""
        found, named = {}, self.explicit_names(named)
        for name, parameter in parameters(config, part).items():
            native = self.naming.native_name(name, parameter.kind)
            if native in named:
                found[name] = np.ascontiguousarray(self.relaid(self.to_numpy(named[native]), parameter.kind))
        return found

    # What each framework does in its own way.

    @abstractmethod
    def assign(self, parameter: Tensor, array: NDArray[Any]) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""

    @abstractmethod
    def to_numpy(self, tensor: Tensor) -> NDArray[Any]:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
