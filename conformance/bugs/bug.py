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
from concord.conformance.bugs.context import Context, Edit
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

    Injected into a backend it is a mutant, tried on a run's own tensors it is an explanation.

    Attributes:
        name: unique among mutants, in words joined by underscores.
        group: one of :data:`GROUPS`.
        what: the bug, in one sentence; of an explanation alone, in words that follow "is explained by".
        variant: its home, the variant that it is run on; empty: it is an explanation alone.
        scenario: of the standard case (:data:`concord.spec.cases.SCENARIOS`) that makes it visible.
        first: patterns of tensor names; each tensor that fits one is rightly named first. :data:`REFUSED`
            where the framework may refuse to run.
        change: what turns the clean model into it.
        input: what an input must have to make it visible.
        options: configuration fields to set in the case.
        equivalent: the precisions in which no input can show it, each with the reason.
        alone: whether, in float32, no other scenario of its variant that runs in every precision shows it: it
            is why the scenario is there.
        cause: what explanations call it; several names are joined by "or". None where nothing that is known
            can explain it.
        clause: the clause of SPEC.md that it breaks.
        after: the scenario that runs first, in the same process.
        source: where it was seen.
    """

    name: str
    group: str
    what: str
    change: Change
    variant: str = ""
    first: tuple[str, ...] = ()
    scenario: str = "ragged"
    input: str = "any"
    options: Mapping[str, Any] = field(default_factory=dict)
    equivalent: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    cause: str | None = None
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

    @property
    def of_gradients(self) -> bool:
        """Whether every value stays as it is, and gradients alone are wrong."""
        return bool(self.first) and all(
            name.startswith("gradients.") or name == REFUSED for name in self.first
        )

    @property
    def text(self) -> str:
        """What explains a tensor, in words that follow "is explained by"."""
        if not self.what.endswith("."):
            return self.what
        start = self.what[0].lower() if self.what[1:2].islower() else self.what[0]
        return f"this: {start}{self.what[1:].rstrip('.')}"

    def rightly_first(self, tensor: str) -> bool:
        """Return whether a tensor may be the first that is wrong."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in self.first)

    def diagnosed(self, said: str) -> str:
        """Return whether a diagnosis names this bug: ``"right"``, ``"none"`` or ``"wrong"``.

        Empty if nothing can.

        Args:
            said: the explanations that it names, joined by "or"; empty if none.
        """
        if self.cause is None or not said:
            return "" if self.cause is None else "none"
        return "right" if set(said.split(" or ")) & set(self.cause.split(" or ")) else "wrong"


@dataclass(frozen=True)
class Group:
    """Makes the bugs of a group.

    Args:
        name: of the group.
        taps: that edits change, if they do not say which.
        common: fields of all of its bugs.
    """

    name: str
    taps: tuple[str, ...] = ()
    common: Mapping[str, Any] = field(default_factory=dict)

    def bug(self, name: str, what: str, change: Edit | Change, *taps: str, **fields: Any) -> Bug:
        """Return a mutant; it shows first at the first of the taps that its edit changes, in the first
        layer.
        """
        taps = taps or self.taps
        first = (_in_first_layer(taps[0]),) if taps else ()
        known = {"variant": "bert", "cause": name, "first": first, **self.common, **fields}
        return Bug(name=name, group=self.name, what=what, change=_change(change, taps), **known)

    def also(self, cause: str, what: str, change: Edit, *taps: str, **fields: Any) -> Bug:
        """Return an explanation that nobody injects: another form of a bug."""
        known = {name: self.common[name] for name in ("clause", "first") if name in self.common}
        return Bug(
            name=cause,
            group=self.name,
            what=what,
            change=_change(change, taps or self.taps),
            **{"cause": cause, **known, **fields},
        )


def group(name: str, *taps: str, **common: Any) -> Group:
    """Return what makes the bugs of a group: see :class:`Group`."""
    return Group(name, taps, common)


def _change(change: Edit | Change, taps: tuple[str, ...]) -> Change:
    return change if isinstance(change, Change) else edited(change, *taps)


def _in_first_layer(tap: str) -> str:
    return f"layers.0.{tap[1:].removeprefix('.')}" if tap.startswith("*") else tap


def where(edit: Edit, **options: Any) -> Edit:
    """Return the edit of models that have these options alone."""

    def edited_there(m: Context, y: Any) -> Any:
        there = all(getattr(m.config, name) == value for name, value in options.items())
        return edit(m, y) if there else y

    return edited_there


def of_source(function: Callable[[Context, Any], Any]) -> Edit:
    """Return the edit that makes something else of what goes into a step."""
    return lambda m, y: function(m, m.source())


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
