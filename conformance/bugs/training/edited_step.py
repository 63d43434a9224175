"""A bug of training: a name, the run that shows it, and what it makes of one place of a step.

The reference's trajectory and a backend's trainer have the same places. An edit of one takes what is right
there. It is written with operators, and with the operations that both give
(:class:`concord.backends.update_rules.Operations`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from concord.backends.update_rules import Operations
from concord.conformance.bugs.bug import Change
from concord.spec.batch import Batch
from concord.spec.training.dropout import sites
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Course, counts

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
        count: of its batches.
        resumed: the step at which training went on from a checkpoint; 0 before it did.
        memory: what a bug keeps from step to step.
    """

    operations: Operations
    shortened: Callable[[Tensor, str], Tensor]
    recipe: Recipe
    kinds: Mapping[str, str]
    number: int = 0
    count: int = 0
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


class Bugged(Course):
    """Puts a bug into the places of a step: a base before the reference's trajectory, or a backend's trainer.

    Attributes:
        change: what the bug makes of each place.
        place: the step that it is at work in.
    """

    optimizer: Any
    change: Change
    place: Any

    @property
    def right(self) -> Any:
        """The same places without the bug."""
        return super()

    def value(self, tensor: Any) -> Tensor:
        """Return a tensor of a step as one that has the operators of a framework."""
        return tensor

    def taken(self, tensor: Tensor, like: Any) -> Any:
        """Return what an edit made in the form of what is right."""
        return tensor

    def edited(self, place: str, right: Any, *given: Any) -> Any:
        """Return what a place makes of tensors by name, given others of the step."""
        if place not in self.change.places or not right:
            return right
        found = getattr(self.change, place)(self.place, *map(self.values, (right, *given)))
        like = next(iter(right.values()))
        return {name: self.taken(tensor, like) for name, tensor in found.items()}

    def values(self, given: Any) -> Any:
        """Return tensors by name as :meth:`value` does, and anything else as it is."""
        if not isinstance(given, Mapping):
            return given
        return {name: self.value(tensor) for name, tensor in given.items()}

    def begun(self, batches: Batches) -> Batches:
        """Begin a step, and return its batches."""
        self.place.number = self.steps
        found: Batches = self.change.batches(self.place, batches, self.training.steps)
        self.place.count = len(found)
        return found

    def batch_weights(self, batches: Batches) -> list[float]:
        """Return by how much the gradient of each batch counts."""
        counted = [counts(self.config, batch) for batch in batches]
        found: list[float] = self.change.weights(self.place, super().batch_weights(batches), counted)
        return found

    def rate(self) -> float:
        """Return the learning rate of the step."""
        return float(self.change.rate(self.place, super().rate()))

    def dropped(self, number: int, site: str, shape: tuple[int, ...]) -> Any:
        """Return which elements a batch of the step keeps at a site, and which share is dropped."""
        right = super().dropped(number, site, shape)
        names = tuple(sites(self.config, self.part).values())
        return right and self.change.masks(
            self.place,
            right,
            DropoutSite(self.training.seed, self.steps, number, site, shape, right[1], names),
        )

    def added(self, total: Mapping[str, Any], piece: Mapping[str, Any], weight: Any) -> Any:
        """Return the sum of gradients so far with those of one more batch, which has a weight."""
        right = self.right.added(total, piece, weight)
        return self.edited("added", right, total, piece, 1.0 if weight is None else weight)

    def accumulated(self, *given: Any) -> Any:
        """Return the gradient of a step, and what else comes of its batches."""
        total, *more = self.right.accumulated(*given)
        return self.edited("gradients", total), *more

    def limited(
        self, gradients: Mapping[str, Any], squares: Callable[[str], Any]
    ) -> tuple[dict[str, Any], Any]:
        """Return clipped gradients, and the norm of all of them, if they are clipped by one."""
        right, norm = self.right.limited(gradients, squares)
        if norm is None or "clip" not in self.change.places:
            return right, norm
        found, used = self.change.clip(
            self.place,
            (self.values(right), self.value(norm)),
            self.values(gradients),
            lambda name: self.value(squares(name)),
        )
        return {name: self.taken(one, norm) for name, one in found.items()}, self.taken(used, norm)

    def update(self, gradients: Mapping[str, Any], *given: Any) -> None:
        """Update every parameter by its clipped gradient."""
        if not self.change.skips(self.place, False, self.place.count):
            self.right.update(gradients, *given)
            self.optimizer.state = self.edited("keeps", self.optimizer.state)


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
