"""How layers show their activations to whoever runs a model, and what is observed of it.

No framework is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, NamedTuple

Tensor = Any
"""A tensor of the framework."""

Tap = Callable[[str, Tensor], Tensor]

TARGETS = ("labels", "cotangent")
"""Inputs that the loss takes, not the model."""

DROPOUT = "dropout."
"""How the names of inputs begin that a trace takes, not the model: what elements of a site are multiplied
by."""


class Observation(NamedTuple):
    """What was computed, as the framework's tensors.

    Attributes:
        gradients: of the loss by native name of a parameter, ``inputs.<name>`` and ``taps.<name>``.
    """

    output: Tensor
    loss: Tensor
    taps: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Tapped:
    """A layer, or a loss, that shows its activations.

    It goes on with what its tap returns, by default what it is given.
    """

    def tap(self, name: str, tensor: Tensor) -> Tensor:
        """Return what the layer goes on with.

        :func:`attach` puts another function in the place of this one.
        """
        return tensor


def attach(layers: Iterable[tuple[str, Any]], tap: Tap, hidden: Collection[str] = ()) -> None:
    """Have tapped layers show their activations to a tap, by names that their place begins.

    Args:
        layers: with their paths in the model, such as ``layers.0.attention``.
        hidden: names of activations that are not shown.
    """

    def show(place: str, name: str, tensor: Tensor) -> Tensor:
        return tensor if place + name in hidden else tap(place + name, tensor)

    for path, layer in layers:
        if isinstance(layer, Tapped):
            place = path.removesuffix(".dot_product")
            layer.tap = partial(show, place and f"{place}.")  # type: ignore[method-assign]
