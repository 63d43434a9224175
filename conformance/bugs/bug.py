"""What a bug is: a wrong operation with a name, and what it makes of a model or of a step of training."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from concord.backends.interface import Request
from concord.backends.update_rules import Optimizer
from concord.conformance.bugs.context import Context, Edit
from concord.spec.arrays import Array
from concord.spec.training.recipe import Recipe

TRAINING = "training"
"""Stands for a variant in bugs of training."""

REFUSED = "refused"
"""Stands among the tensors of :attr:`Bug.first` for a run that the framework itself refuses."""

StepEdit = Callable[..., Any]
"""Takes the step of training, what is right, and what that is made of."""


def untouched(m: Any, right: Any, *given: Any) -> Any:
    """Return what is right."""
    return right


@dataclass(frozen=True, kw_only=True)
class Change:
    """What turns the clean model, or training, into the mutant.

    Attributes:
        request: changes what the backend is asked: its configuration, weights or inputs.
        taps: patterns of the taps that are edited.
        edit: what is made of one of them.
        recipe: the recipe that is trained by, given the right one alone.
        batches: of a step of training; given those of all steps.
        weights: by how much each batch of a step counts; given how many samples and counted labels each has.
        masks: which elements dropout keeps, and the rate that these are scaled up by; given the
            :class:`concord.conformance.bugs.training.edited_step.DropoutSite`.
        added: the gradients so far with those of one more batch; given both, and the weight of the batch.
        gradients: of a step, accumulated.
        clip: the clipped gradients, and the norm; given gradients, and what gives the squares that a norm
            sees.
        rate: the learning rate of a step.
        optimizer: what updates parameters.
        keeps: the optimizer state after a step, as ``<moment>.<parameter>``.
        skips: whether a step updates nothing; given how many batches it has.
        load: what training goes on from: ``<section>.<name>``, and how many steps the optimizer has made.
    """

    request: Callable[[Request], Request] = lambda request: request
    taps: tuple[str, ...] = ()
    edit: Edit | None = None
    recipe: Callable[[Recipe], Recipe] = lambda recipe: recipe
    batches: StepEdit = untouched
    weights: StepEdit = untouched
    masks: StepEdit = untouched
    added: StepEdit = untouched
    gradients: StepEdit = untouched
    clip: StepEdit = untouched
    rate: StepEdit = untouched
    optimizer: type[Optimizer] = Optimizer
    keeps: StepEdit = untouched
    skips: StepEdit = untouched
    load: StepEdit = untouched

    def at(self, tap: str) -> Edit | None:
        """Return what is made of a tap, if anything."""
        return self.edit if fits(tap, self.taps) else None

    @functools.cached_property
    def places(self) -> frozenset[str]:
        """What is changed, by the names of these attributes."""
        return frozenset(
            one.name for one in dataclasses.fields(self) if getattr(self, one.name) is not one.default
        )


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name fits one of several patterns."""
    return any(
        name == pattern or ("*" in pattern and fnmatch.fnmatchcase(name, pattern)) for pattern in patterns
    )


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A wrong operation. Injected into a backend it is a mutant, tried on a run's own tensors an explanation.

    Attributes:
        name: in words joined by underscores.
        operation: one of :data:`concord.conformance.bugs.catalogue.OPERATIONS`.
        text: the bug, in one sentence.
        change: what turns the right model, or training, into the wrong one.
        clause: of SPEC.md that it breaks.
        variant: of the model that it is injected into; :data:`TRAINING`: into a training.
        scenario: of the standard case (:data:`concord.spec.cases.SCENARIOS`), or the run of training
            (:data:`concord.conformance.bugs.training.runs.RUNS`), that makes it visible.
        after: the scenario that runs first, in the same process.
        options: fields of the configuration, or of the recipe, to set in the case.
        first: patterns of tensor names; each tensor that fits one is rightly named first. :data:`REFUSED`
            where the framework may refuse to run.
        cause: what explanations call it; several names are joined by "or". Empty where nothing can.
        source: where it was seen.
        only: the algorithm that alone can have it; empty: any.
    """

    name: str
    operation: str
    text: str
    change: Change
    clause: str
    variant: str = "bert"
    scenario: str = "ragged"
    after: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    cause: str = ""
    source: str = ""
    only: str = ""

    @property
    def of_training(self) -> bool:
        """Whether training shows it."""
        return self.variant == TRAINING

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it is looked for in, in this order: what trains is float32."""
        return ("float32", "float64") if self.of_training else ("float64", "float32")

    @property
    def of_gradients(self) -> bool:
        """Whether every value stays as it is, and gradients alone are wrong."""
        return all(name.startswith("gradients.") or name == REFUSED for name in self.first)

    @property
    def explanation(self) -> str:
        """What explains a tensor, in words that follow "is explained by"."""
        start = self.text[0] if self.text[1:2].isupper() else self.text[0].lower()
        return f"this: {start}{self.text[1:].rstrip('.')}"

    def rightly_first(self, tensor: str) -> bool:
        """Return whether a tensor may be the first that is wrong."""
        return fits(tensor, self.first)

    def diagnosed(self, said: str) -> str:
        """Return whether a diagnosis names this bug: ``"right"``, ``"none"`` or ``"wrong"``.

        Empty if nothing can.

        Args:
            said: the explanations that it names, joined by "or"; empty if none.
        """
        if not self.cause or not said:
            return "none" if self.cause else ""
        return "right" if set(said.split(" or ")) & set(self.cause.split(" or ")) else "wrong"


Edits = Mapping[str, Any]
"""Edits by name of a bug: each takes the context of a tap, or what a place of training takes."""


def with_constants(edit: Callable[..., Any], given: Any) -> Callable[..., Any]:
    """Return an edit that takes constants of a TOML file too: one, several, or several by name."""
    if isinstance(given, Mapping):
        return functools.partial(edit, **given)
    more = given if isinstance(given, (list, tuple)) else (given,)
    return lambda *right: edit(*right, *more)


# Edits of a tap.


def only(there: Callable[[Context], bool], edit: Edit) -> Edit:
    """Return an edit that is made in some places alone."""
    return lambda m: edit(m) if there(m) else m.y


def where(edit: Edit, **options: Any) -> Edit:
    """Return the edit of models that have these options alone."""
    return only(lambda m: all(getattr(m.config, name) == one for name, one in options.items()), edit)


def in_last_layer(edit: Edit) -> Edit:
    return only(lambda m: m.layer == m.config.num_layers - 1, edit)


def skipped(m: Context) -> Any:
    """Return what goes into a step instead of what it gives."""
    return m.x


def applied(m: Context, operation: str, *given: Any) -> Any:
    """Take an operation, or a step, of a tap."""
    return getattr(m, operation)(m.y, *given)


def taken(m: Context, operation: str, *given: Any) -> Any:
    """Take an operation, or a step, of what goes into a step."""
    return getattr(m, operation)(m.x, *given)


def at_most(m: Context, most: float) -> Any:
    """Return the tap with a number where it is larger."""
    return m.where(m.y > most, m.y * 0.0 + most, m.y)


def soft_cap(m: Context, cap: float) -> Any:
    return m.tanh(m.y / cap) * cap


def weights(request: Request, new: Mapping[str, Array]) -> Request:
    """Change weights of a request, given by name. Each keeps its dtype."""
    cast = {name: array.astype(request.weights[name].dtype) for name, array in new.items()}
    return dataclasses.replace(request, weights={**request.weights, **cast})


# Changes of training.


def recipe(**fields: Any) -> Change:
    """Return a change of fields of a recipe."""
    return Change(recipe=lambda given: given.replace(**fields))


def rule(**methods: StepEdit) -> Change:
    """Return the change of methods of the optimizer; each is given it, the right method and its arguments."""

    def edited(name: str, edit: StepEdit) -> Callable[..., Any]:
        right = getattr(Optimizer, name)
        return lambda self, *given: edit(self, functools.partial(right, self), *given)

    new = {name: edited(name, edit) for name, edit in methods.items()}
    return Change(optimizer=type("EditedOptimizer", (Optimizer,), new))
