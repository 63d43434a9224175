"""What a bug is: a porting bug with a name, and how the model is changed so that it has it."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from concord.backends.interface import Request
from concord.backends.optimizers import Optimizer
from concord.conformance.bugs.context import Context, Edit
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.model import Model
from concord.spec.training.recipe import Recipe

Gradients = Mapping[str, Array]

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
        request: changes what the backend is asked: its configuration, weights or inputs. NumPy alone.
        taps: patterns of the taps that are edited.
        edit: what is made of one of them.
        arithmetic, model: instead of an edit, what computes so in NumPy alone.
        handed_out: what is made of the gradients of parameters, by canonical name, before they are handed
            out.
        recipe: the recipe that is trained by, given the right one alone.
        batches: of a step of training; given those of all steps.
        weights: by how much each batch of a step counts; given how many samples and counted labels each has.
        masks: which elements dropout keeps, and the rate that these are scaled up by; given the
            :class:`concord.conformance.bugs.training.step.DropoutSite`.
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
    arithmetic: type[Arithmetic] = Arithmetic
    model: type[Model] | None = None
    handed_out: Callable[[Gradients], Gradients] | None = None
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
    """A realistic porting bug.

    Injected into a backend it is a mutant, tried on a run's own tensors it is an explanation.

    Attributes:
        name: unique among mutants, in words joined by underscores.
        group: one of :data:`concord.conformance.bugs.catalogue.GROUPS`.
        what: the bug, in one sentence; of an explanation alone, in words that follow "is explained by".
        variant: that it is run on; empty: it is an explanation alone; :data:`TRAINING`: it is of training.
        scenario: of the standard case (:data:`concord.spec.cases.SCENARIOS`), or the run of training
            (:data:`concord.conformance.bugs.training.runs.RUNS`), that makes it visible.
        first: patterns of tensor names; each tensor that fits one is rightly named first. :data:`REFUSED`
            where the framework may refuse to run.
        change: what turns the clean model into it.
        input: what an input must have to make it visible.
        options: fields of the configuration, or of the recipe, to set in the case.
        equivalent: the precisions in which no input can show it, each with the reason.
        alone: whether, in float32, no other scenario of its variant that runs in every precision shows it: it
            is why the scenario is there.
        cause: what explanations call it; several names are joined by "or". Empty where nothing that is known
            can explain it.
        clause: the clause of SPEC.md that it breaks.
        after: the scenario that runs first, in the same process.
        source: where it was seen.
        only: the algorithm that alone can have it; empty: any.
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
    cause: str = ""
    clause: str = ""
    after: str = ""
    source: str = ""
    only: str = ""

    @property
    def of_training(self) -> bool:
        """Whether training shows it."""
        return self.variant == TRAINING

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it is looked for in, in this order: what trains is float32."""
        order = ("float32", "float64") if self.of_training else ("float64", "float32")
        return tuple(dtype for dtype in order if dtype not in self.equivalent)

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
        start = self.what[0] if self.what[1:2].isupper() else self.what[0].lower()
        return f"this: {start}{self.what[1:].rstrip('.')}"

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
"""Edits by name of a bug, each a function of what is right: of the context of a tap, of the request.

Of an explanation that has several forms: the edit of each, by the words that replace ``{}`` in its sentence.
"""


def with_constants(edit: Callable[..., Any], given: Any) -> Callable[..., Any]:
    """Return an edit that takes constants of a TOML file too: one, several, or several by name."""
    if isinstance(given, Mapping):
        return functools.partial(edit, **given)
    more = given if isinstance(given, (list, tuple)) else (given,)
    return lambda *right: edit(*right, *more)


def called(maker: Callable[..., Any], given: Any) -> Any:
    """Return what is made of constants of a TOML file alone."""
    return with_constants(maker, given)()


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


def multiplied(m: Context, factor: float = 1.0, **powers: float) -> Any:
    """Return a tap times a factor, and powers of sizes."""
    return m.y * (factor * m.size(**powers))


def applied(m: Context, operation: str, *given: Any) -> Any:
    """Take an operation, or a step, of a tap."""
    return getattr(m, operation)(m.y, *given)


def taken(m: Context, operation: str, *given: Any) -> Any:
    """Take an operation, or a step, of what goes into a step."""
    return getattr(m, operation)(m.x, *given)


def projected(m: Context) -> Any:
    """Return a linear layer without the activation after it."""
    return m.projected()


# Edits of what a backend is asked.


def option(request: Request, **fields: Any) -> Request:
    """Change configuration fields."""
    return dataclasses.replace(request, config=request.config.replace(**fields))


def weights(request: Request, new: Mapping[str, Array]) -> Request:
    """Change weights, given by name. Each keeps its dtype."""
    cast = {name: array.astype(request.weights[name].dtype) for name, array in new.items()}
    return dataclasses.replace(request, weights={**request.weights, **cast})


def weight(request: Request, pattern: str, change: Callable[[Array], Array]) -> Request:
    """Change every weight whose name fits a pattern."""
    given = request.weights
    return weights(
        request, {name: change(array.copy()) for name, array in given.items() if fits(name, (pattern,))}
    )


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
