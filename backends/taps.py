"""Taps that expose activations, and the observation of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

Tensor = Any
"""A tensor of the framework."""

Tap = Callable[[str, Tensor], Tensor]

TARGETS = ("labels", "cotangent")
"""Inputs of the loss, not of the model."""

# Prefix of inputs that go to the trace, not to the model: the dropout factors of a site's elements.
DROPOUT = "dropout."


class Observation(NamedTuple):
    """Framework tensors of one evaluation."""

    output: Tensor
    loss: Tensor
    taps: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the loss by native parameter name, inputs.<name> and taps.<name>


class Tapped:
    """A layer or loss that continues with its tap's result."""

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor to continue with; :func:`attach` replaces this method."""
        return tensor


def attach(layers: Iterable[tuple[str, Any]], tap: Tap, hidden: Collection[str] = ()) -> None:
    """Connect layers to a tap, prefix names with the layer's path, and omit ``hidden`` activations."""

    def show(place: str, name: str, tensor: Tensor) -> Tensor:
        return tensor if place + name in hidden else tap(place + name, tensor)

    for path, layer in layers:
        if isinstance(layer, Tapped):
            # The specification assigns the taps of this layer to the attention around it.
            place = path.removesuffix(".dot_product")
            layer.tap = partial(show, place and f"{place}.")  # type: ignore[method-assign]
