"""What a fault is: a porting bug with a name, and how the model is changed so that it has it."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Request
from concord.conformance.bugs.context import Edit
from concord.spec.batch import Batch
from concord.spec.cases import scenarios_of
from concord.spec.config import EncoderConfig
from concord.spec.parameters import Weights

Array = NDArray[np.floating]
Gradients = Mapping[str, Array]

GROUPS = (
    "embeddings",
    "positions",
    "masks",
    "attention",
    "norms",
    "activations",
    "pooling",
    "loss",
    "gradients",
    "precision",
    "weights",
    "kernels",
    "places",
    "backward",
    "saturation",
    "rounding",
)
"""Where a bug sits."""

REFUSED = "refused"
"""Stands among the tensors of :attr:`Bug.first` for a run that the framework itself refuses."""


@dataclass(frozen=True)
class Change:
    """What turns the clean model into the mutant.

    Attributes:
        request: changes what the backend is asked: its configuration, weights or inputs. NumPy alone.
        edits: patterns of taps, and what is made of those that fit; the first that fits a tap is taken.
        gradients: what is made of the gradients of parameters, by canonical name, before they are handed out.
    """

    request: Callable[[Request], Request] = lambda request: request
    edits: tuple[tuple[tuple[str, ...], Edit], ...] = ()
    gradients: Callable[[Gradients], Gradients] | None = None

    def edit(self, tap: str) -> Edit | None:
        """Return what is made of a tap, if anything."""
        return next(
            (
                edit
                for patterns, edit in self.edits
                if any(fnmatch.fnmatchcase(tap, pattern) for pattern in patterns)
            ),
            None,
        )


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A realistic porting bug.

    Attributes:
        name: unique, in words joined by underscores.
        group: one of :data:`GROUPS`.
        what: the bug, in one sentence.
        variant: its home, the variant that it is run on.
        scenario: of the standard case (:data:`concord.spec.cases.SCENARIOS`) that makes it visible.
        first: patterns of tensor names; each tensor that fits one is rightly named first. :data:`REFUSED` where the
            framework may refuse to run.
        change: what turns the clean model into it.
        input: what an input must have to make it visible.
        options: configuration fields to set in the case.
        equivalent: the precisions in which no input can show it, each with the reason.
        alone: whether, in float32, no other scenario of its variant that runs in every precision shows it: it is why the scenario is there.
        cause: the hypothesis that should explain it; several names are joined by "or". None where nothing that is known can.
        tried: whether its own edit is tried as an explanation, since no hypothesis of :mod:`concord.conformance.explain` says the same.
        clause: the clause of SPEC.md that it breaks.
        after: the scenario that runs first, in the same process.
        source: where it was seen.
    """

    name: str
    group: str
    what: str
    variant: str
    first: tuple[str, ...]
    change: Change
    scenario: str = "ragged"
    input: str = "any"
    options: Mapping[str, Any] = field(default_factory=dict)
    equivalent: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    cause: str | None = None
    tried: bool = False
    clause: str = ""
    after: str = ""
    source: str = ""

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it is looked for in, in this order."""
        return tuple(dtype for dtype in ("float64", "float32") if dtype not in self.equivalent)

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Its own scenario, and after it the others of its variant."""
        others = scenarios_of(self.variant)
        return tuple(dict.fromkeys((self.scenario, *others)))

    def rightly_first(self, tensor: str) -> bool:
        """Return whether a tensor may be the first that is wrong."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in self.first)

    def diagnosed(self, said: str) -> str:
        """Return whether a diagnosis names this fault: ``"right"``, ``"none"`` or ``"wrong"``; empty if no hypothesis is expected.

        Args:
            said: the hypotheses that it names, joined by "or"; empty if none.
        """
        if self.cause is None or not said:
            return "" if self.cause is None else "none"
        return "right" if set(said.split(" or ")) & set(self.cause.split(" or ")) else "wrong"


# Kinds of change.


def edited(edit: Edit, *taps: str) -> Change:
    """Return a change of every tap whose name fits a pattern."""
    return Change(edits=((taps, edit),))


def handed_out(gradients: Callable[[Gradients], Gradients]) -> Change:
    """Return a change of the gradients of parameters when they are handed out."""
    return Change(gradients=gradients)


def option(**fields: Any) -> Change:
    """Return a change of configuration fields."""
    return Change(lambda request: dataclasses.replace(request, config=request.config.replace(**fields)))


def inputs(change: Callable[[EncoderConfig, Batch], Mapping[str, NDArray[Any]]]) -> Change:
    """Return a change of inputs; ``change`` gives the new ones by name."""
    return Change(
        lambda request: dataclasses.replace(
            request, batch=dataclasses.replace(request.batch, **change(request.config, request.batch))
        )
    )


def weights(change: Callable[[EncoderConfig, Weights], Mapping[str, Array]]) -> Change:
    """Return a change of weights; ``change`` gives the new ones by name. Each keeps its dtype."""

    def changed(request: Request) -> Request:
        new = {
            name: array.astype(request.weights[name].dtype)
            for name, array in change(request.config, request.weights).items()
        }
        return dataclasses.replace(request, weights={**request.weights, **new})

    return Change(changed)


def weight(pattern: str, change: Callable[[Array], Array]) -> Change:
    """Return a change of every weight whose name fits a pattern."""
    return weights(
        lambda config, given: {
            name: change(array.copy()) for name, array in given.items() if fnmatch.fnmatchcase(name, pattern)
        }
    )
