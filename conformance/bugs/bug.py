"""Bugs: named wrong operations."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from concord.backends.interface import Request
from concord.backends.update_rules import Optimizer
from concord.conformance.bugs.context import Context, Edit, only
from concord.spec.arrays import Array
from concord.spec.training.recipe import Recipe

TRAINING = "training"
"""Variant of bugs in training."""

REFUSED = "refused"
"""Entry of :attr:`Bug.first` for a run that the framework itself refuses."""

StepEdit = Callable[..., Any]
"""Takes the training step, the correct value, and its inputs."""


def untouched(m: Any, right: Any, *inputs: Any) -> Any:
    return right


@dataclass(frozen=True, kw_only=True)
class Change:
    """Edits that turn the correct model or training into the mutant.

    Edits of training take the step, the correct value and more; ``recipe`` takes only the recipe.

    Attributes:
        request: edits the backend's configuration, weights or inputs.
        taps: patterns of the edited taps.
        batches: batches of a step; also takes those of all steps.
        weights: batch weights; also takes their numbers of samples and counted labels.
        masks: kept elements and dropout rate; also takes the
            :class:`concord.conformance.bugs.training.edited_step.DropoutSite`.
        added: gradients with one more batch; also takes both, and the batch's weight.
        clip: clipped gradients and norm; also takes gradients, and the function for squares.
        keeps: optimizer state after a step, as ``<moment>.<parameter>``.
        skips: whether a step skips its update; also takes its number of batches.
        load: checkpoint as ``<section>.<name>``, and the optimizer's step count.
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
        return self.edit if fits(tap, self.taps) else None

    @functools.cached_property
    def places(self) -> frozenset[str]:
        """Names of the attributes that are set."""
        return frozenset(
            attribute.name
            for attribute in fields(self)
            if getattr(self, attribute.name) is not attribute.default
        )


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(
        name == pattern or ("*" in pattern and fnmatch.fnmatchcase(name, pattern)) for pattern in patterns
    )


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A wrong operation: a mutant if injected into a backend, an explanation if tried on a run.

    Attributes:
        variant: the model to inject it into, or :data:`TRAINING`.
        scenario: standard case (:data:`concord.spec.cases.SCENARIOS`) or training run
            (:data:`concord.conformance.bugs.training.runs.RUNS`) that reveals it.
        after: scenario to run first, in the same process.
        options: configuration or recipe fields to set in the case.
        first: patterns of tensors that may diverge first; :data:`REFUSED` if the framework may refuse.
        cause: its names in explanations, joined by "or"; empty if there are none.
        only: the only algorithm that can have it; empty for any.
    """

    name: str
    operation: str
    text: str
    change: Change
    clause: str
    variant: str = "bert"
    scenario: str = "ragged"
    after: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    cause: str = ""
    source: str = ""
    only: str = ""

    @property
    def of_training(self) -> bool:
        return self.variant == TRAINING

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to search, in order; training uses float32."""
        return ("float32", "float64") if self.of_training else ("float64", "float32")

    @property
    def of_gradients(self) -> bool:
        return all(name.startswith("gradients.") or name == REFUSED for name in self.first)

    @property
    def explanation(self) -> str:
        start = self.text[0] if self.text[1:2].isupper() else self.text[0].lower()
        return f"a bug: {start}{self.text[1:].rstrip('.')}"

    def rightly_first(self, tensor: str) -> bool:
        return fits(tensor, self.first)

    def diagnosed(self, said: str) -> str:
        """Whether a diagnosis (names joined by "or") names this bug: ``"right"``, ``"none"`` or ``"wrong"``;
        empty if no diagnosis can.
        """
        if not self.cause or not said:
            return "none" if self.cause else ""
        return "right" if set(said.split(" or ")) & set(self.cause.split(" or ")) else "wrong"


def with_constants(edit: Callable[..., Any], given: Any) -> Callable[..., Any]:
    if isinstance(given, Mapping):
        return functools.partial(edit, **given)
    constants = given if isinstance(given, (list, tuple)) else (given,)
    return lambda *right: edit(*right, *constants)


# Edits of a tap.


def where(edit: Edit, **options: Any) -> Edit:
    return only(lambda m: all(getattr(m.config, name) == value for name, value in options.items()), edit)


def skipped(m: Context) -> Any:
    """Input of a step instead of its result."""
    return m.x


def applied(m: Context, operation: str, *operands: Any) -> Any:
    """Apply an operation, or a step, to a tap."""
    return getattr(m, operation)(m.y, *operands)


def taken(m: Context, operation: str, *operands: Any) -> Any:
    """Apply an operation, or a step, to the input of a tap's step."""
    return getattr(m, operation)(m.x, *operands)


def at_most(m: Context, most: float) -> Any:
    return m.where(m.y > most, m.y * 0.0 + most, m.y)


def soft_cap(m: Context, cap: float) -> Any:
    return m.tanh(m.y / cap) * cap


def weights(request: Request, new: Mapping[str, Array]) -> Request:
    cast = {name: array.astype(request.weights[name].dtype) for name, array in new.items()}
    return replace(request, weights={**request.weights, **cast})


# Changes of training.


def recipe(**fields: Any) -> Change:
    return Change(recipe=lambda original: original.replace(**fields))


def rule(**methods: StepEdit) -> Change:
    """Replace optimizer methods; each edit takes the optimizer, the correct method, and its arguments."""

    def edited(name: str, edit: StepEdit) -> Callable[..., Any]:
        method = getattr(Optimizer, name)
        return lambda self, *inputs: edit(self, functools.partial(method, self), *inputs)

    replacements = {name: edited(name, edit) for name, edit in methods.items()}
    return Change(optimizer=type("EditedOptimizer", (Optimizer,), replacements))
