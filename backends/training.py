"""What the four frameworks' training shares: a model and its loss, evaluated with live taps. No framework is called here."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from concord.backends.interface import Trace

Tensor = Any
"""A tensor of the framework."""

Tap = Callable[[str, Tensor], Tensor]

TARGETS = ("labels", "cotangent")
"""Inputs that the loss takes, not the model."""

DROPOUT = "dropout."
"""How the names of inputs begin that a trace takes, not the model: what elements of a site are multiplied by."""

SEED = f"{DROPOUT}seed"
"""The input that a framework's own dropout begins from, where it is given one."""


class Observation(NamedTuple):
    """What was computed, as the framework's tensors.

    Attributes:
        gradients: of the loss by native name of a parameter, ``inputs.<name>`` and ``taps.<name>``.
    """

    output: Tensor
    loss: Tensor
    taps: dict[str, Tensor]
    gradients: dict[str, Tensor]


class Evaluate(Protocol):
    """A function that :func:`evaluation` made, perhaps compiled."""

    def __call__(
        self,
        model: Any,
        loss_function: Callable[..., Tensor] | None,
        inputs: Mapping[str, Tensor],
        trace: Trace,
        zeros: Mapping[str, Tensor],
        recorded: bool,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return output, the loss if there is a function for it, and if they are recorded all taps.

        Args:
            trace: makes of the tap that records the one that the model calls.
            zeros: by tap; what has the gradient that the tap has, for it is added to it (:func:`add_zeros`).
        """


def by_name(model: Any, inputs: Mapping[str, Tensor], tap: Tap) -> Tensor:
    """Call a model that takes each of its inputs as an argument."""
    return model(**inputs, tap=tap)


def by_mapping(model: Any, inputs: Mapping[str, Tensor], tap: Tap) -> Tensor:
    """Call a model that takes its inputs in one argument."""
    return model(inputs, tap=tap)


def evaluation(call: Callable[[Any, Mapping[str, Tensor], Tap], Tensor] = by_name) -> Evaluate:
    """Return what evaluates a model: a function for each framework, which its compiler may mark as its own.

    Args:
        call: gives a model its inputs.
    """

    def evaluate(
        model: Any,
        loss_function: Callable[..., Tensor] | None,
        inputs: Mapping[str, Tensor],
        trace: Trace,
        zeros: Mapping[str, Tensor],
        recorded: bool,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        taps: dict[str, Tensor] = (
            OrderedDict()
        )  # JAX's transformations would return a dict in alphabetical order

        def record(name: str, tensor: Tensor) -> Tensor:
            tensor = add_zeros(tensor, zeros.get(name))
            if recorded:
                taps[name] = tensor
            return tensor

        tap = trace(model, inputs, record)
        output = call(
            model,
            {
                name: tensor
                for name, tensor in inputs.items()
                if name not in TARGETS and not name.startswith(DROPOUT)
            },
            tap,
        )
        return output, None if loss_function is None else loss_function(model, output, inputs, tap), taps

    return evaluate


def add_zeros(tensor: Tensor, zeros: Tensor | None) -> Tensor:
    """Add what has the tensor's own gradient; a tensor of another shape, which only a faulty model has, stays alone."""
    return tensor if zeros is None or zeros.shape != tensor.shape else tensor + zeros
