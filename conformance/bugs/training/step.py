"""A bug of training: a name, the run that shows it, and what it makes of one place of a step.

The oracle's trajectory and a backend's trainer have the same places. An edit of one takes what is right
there. It is written with operators, and with the operations that both give
(:class:`concord.backends.optimizers.Operations`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from concord.backends.optimizers import Operations, Optimizer
from concord.conformance.bugs.bug import Bug, Change, StepEdit
from concord.conformance.wording import instead
from concord.spec.batch import Batch
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.schedules import learning_rate

STAGES = ("losses", "gradients", "clipped", "moments")
"""A step in the order of computation."""

PLACES = {
    "losses": ("masks", "batches", "load"),
    "gradients": ("weights", "added", "gradients"),
    "clipped": ("clip",),
    "moments": ("optimizer", "keeps", "skips", "rate", "load"),
}
"""Where in a step each place shows first."""

CLAUSES = {
    "OPT-1": ("learning_rate",),
    "OPT-2": ("momentum", "momentum_form", "dampening", "nesterov"),
    "OPT-3": ("epsilon", "epsilon_placement", "beta1", "beta2", "bias_correction"),
    "OPT-4": ("amsgrad",),
    "OPT-5": ("centered", "algorithm"),
    "OPT-6": ("weight_decay", "decay_form", "undecayed"),
    "OPT-7": ("clipping", "clip_at", "clip_epsilon", "embedding_gradients"),
    "OPT-8": ("embedding_updates",),
    "OPT-9": ("schedule", "first_step", "warmup_steps", "total_steps", "decay_start", "final_share"),
    "OPT-10": ("accumulation", "accumulation_mean"),
    "DRP-2": RATES,
}
"""Which fields of a recipe each clause is about."""

CLAUSE_OF = {name: clause for clause, names in CLAUSES.items() for name in names}

Tensor = Any
"""A tensor of a framework, or on the tape."""

Tensors = Mapping[str, Tensor]
"""By name of a parameter: a framework's own, or the canonical one."""


@dataclass
class TrainingStep:
    """The step that a bug is at work in.

    Attributes:
        operations: of the framework, or of the tape.
        shortened: rounds a tensor to a number format, ``"bfloat16"``.
        recipe: of the run.
        kinds: of the parameters, by name.
        number: of the step, from 0.
        resumed: the step at which training went on from a checkpoint; 0 before it did.
        memory: what a bug keeps from step to step.
    """

    operations: Operations
    shortened: Callable[[Tensor, str], Tensor]
    recipe: Recipe
    kinds: Mapping[str, str]
    number: int = 0
    resumed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def rate(self, number: int) -> float:
        """Return the learning rate of the step of a number."""
        return learning_rate(self.recipe, number)

    @property
    def limit(self) -> float:
        """The norm from which on gradients are clipped."""
        return self.recipe.clip_at or 0.0

    def norm(self, gradients: Tensors, squares: Callable[[str], Tensor] | None = None) -> Tensor:
        """Return the norm of gradients taken together."""
        own = squares or (lambda name: self.operations.total(gradients[name] * gradients[name]))
        return self.operations.square_root(sum(own(name) for name in gradients))

    def scaled(self, gradients: Tensors, norm: Tensor, limit: float | None = None) -> dict[str, Tensor]:
        """Return gradients of a norm, multiplied so that it keeps within a limit."""
        limit = self.limit if limit is None else limit
        factor = self.operations.bounded(limit / (norm + self.recipe.clip_epsilon), 1.0)
        return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass(frozen=True)
class DropoutSite:
    """A tensor that dropout is asked for.

    Attributes:
        seed, step, number, name, shape, rate: as :func:`concord.spec.training.dropout.kept` takes them.
        names: of all sites of the model.
    """

    seed: int
    step: int
    number: int
    name: str
    shape: tuple[int, ...]
    rate: float
    names: tuple[str, ...]


Batches = Sequence[Batch]
"""Of a step."""


def differing(change: Change, recipe: Recipe) -> tuple[str, ...]:
    """Return which fields of a recipe a change makes others."""
    made = change.recipe(recipe)
    return tuple(one.name for one in fields(recipe) if getattr(made, one.name) != getattr(recipe, one.name))


def stages(change: Change, recipe: Recipe) -> set[str]:
    """Return where in a step a change may show first.

    Raises:
        ConfigError: for a recipe that it makes no recipe of.
    """
    known = {"OPT-10": "gradients", "OPT-7": "clipped", "DRP-2": "losses"}
    return {stage for stage, places in PLACES.items() if change.places & {*places}} | {
        known.get(CLAUSE_OF[name], "moments") for name in differing(change, recipe)
    }


def text(bug: Bug, recipe: Recipe) -> str:
    """Return what a bug is in training by a recipe, in words that follow "explained by"."""
    made = bug.change.recipe(recipe)
    said = [
        f"{name} = {instead(getattr(made, name), getattr(recipe, name))}"
        for name in differing(bug.change, recipe)
        if name not in RATES
    ]
    return bug.text + (f" ({', '.join(said)})" if said and bug.group else "")


def recipe(**changed: Any) -> Callable[[Recipe], Recipe]:
    """Return the edit of a recipe that replaces fields."""
    return lambda given: given.replace(**changed)


def rule(**methods: StepEdit) -> type[Optimizer]:
    """Return the optimizer with other methods; each is given it, the right method and its arguments."""

    def edited(name: str, edit: StepEdit) -> Callable[..., Any]:
        right = getattr(Optimizer, name)
        return lambda self, *given: edit(self, functools.partial(right, self), *given)

    return type("EditedOptimizer", (Optimizer,), {name: edited(name, edit) for name, edit in methods.items()})
