"""Bugs of training, which edit one place of a step.

Trajectory and trainer have the same places. An edit takes the place's correct value, and uses operators and
:class:`concord.backends.update_rules.Operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from concord.backends.update_rules import Operations
from concord.conformance.bugs.bug import Change
from concord.spec.arrays import Shape
from concord.spec.batch import Batch
from concord.spec.training.dropout import sites
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.schedules import learning_rate
from concord.spec.training.trajectory import Course, counts

STAGES = ("losses", "gradients", "clipped", "moments")
"""Stages of a step in order of computation."""

PLACES = {
    "losses": ("masks", "batches", "load"),
    "gradients": ("weights", "added", "gradients"),
    "clipped": ("clip",),
    "moments": ("optimizer", "keeps", "skips", "rate", "load"),
}
"""Places that first show in each stage."""

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
"""Recipe fields of each clause."""

CLAUSE_OF = {name: clause for clause, names in CLAUSES.items() for name in names}

Tensor = Any
Tensors = Mapping[str, Tensor]


@dataclass
class TrainingStep:
    """The step that a bug edits.

    Attributes:
        shortened: rounds a tensor to a number format, such as ``"bfloat16"``.
        resumed: step at which training resumed from a checkpoint, or 0.
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
        return learning_rate(self.recipe, number)

    @property
    def limit(self) -> float:
        """Norm above which gradients are clipped; 0 for none."""
        return self.recipe.clip_at or 0.0

    def norm(self, gradients: Tensors, squares: Callable[[str], Tensor] | None = None) -> Tensor:
        squares_of = squares or (lambda name: self.operations.total(gradients[name] * gradients[name]))
        return self.operations.square_root(sum(squares_of(name) for name in gradients))

    def scaled(self, gradients: Tensors, norm: Tensor, limit: float | None = None) -> dict[str, Tensor]:
        limit = self.limit if limit is None else limit
        factor = self.operations.bounded(limit / (norm + self.recipe.clip_epsilon), 1.0)
        return {name: gradient * factor for name, gradient in gradients.items()}


@dataclass(frozen=True)
class DropoutSite:
    """A tensor to which dropout applies; see :func:`concord.spec.training.dropout.kept`."""

    seed: int
    step: int
    number: int
    name: str
    shape: Shape
    rate: float
    names: tuple[str, ...]


Batches = Sequence[Batch]


class Bugged(Course):
    """A mixin that inserts a bug."""

    optimizer: Any
    change: Change
    place: Any

    @property
    def right(self) -> Any:
        return super()

    def value(self, tensor: Any) -> Tensor:
        """Wrap a tensor of a step to give it a framework's operators."""
        return tensor

    def taken(self, tensor: Tensor, like: Any) -> Any:
        """Convert an edit's result to the form of the correct value."""
        return tensor

    def edited(self, place: str, right: Any, *inputs: Any) -> Any:
        if place not in self.change.places or not right:
            return right
        results = getattr(self.change, place)(self.place, *map(self.values, (right, *inputs)))
        like = next(iter(right.values()))
        return {name: self.taken(tensor, like) for name, tensor in results.items()}

    def values(self, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: self.value(tensor) for name, tensor in given.items()}

    def begun(self, batches: Batches) -> Batches:
        self.place.number = self.steps
        result: Batches = self.change.batches(self.place, batches, self.training.steps)
        self.place.count = len(result)
        return result

    def batch_weights(self, batches: Batches) -> list[float]:
        numbers = [counts(self.config, batch) for batch in batches]
        weights: list[float] = self.change.weights(self.place, super().batch_weights(batches), numbers)
        return weights

    def rate(self) -> float:
        return float(self.change.rate(self.place, super().rate()))

    def dropped(self, number: int, site: str, shape: Shape) -> Any:
        """Kept elements of a site, and the dropout rate."""
        right = super().dropped(number, site, shape)
        names = tuple(sites(self.config, self.part).values())
        return right and self.change.masks(
            self.place,
            right,
            DropoutSite(self.training.seed, self.steps, number, site, shape, right[1], names),
        )

    def added(self, total: Mapping[str, Any], piece: Mapping[str, Any], weight: Any) -> Any:
        right = self.right.added(total, piece, weight)
        return self.edited("added", right, total, piece, 1.0 if weight is None else weight)

    def accumulated(self, *inputs: Any) -> Any:
        total, *rest = self.right.accumulated(*inputs)
        return self.edited("gradients", total), *rest

    def limited(
        self, gradients: Mapping[str, Any], squares: Callable[[str], Any]
    ) -> tuple[dict[str, Any], Any]:
        right, norm = self.right.limited(gradients, squares)
        if norm is None or "clip" not in self.change.places:
            return right, norm
        clipped, used = self.change.clip(
            self.place,
            (self.values(right), self.value(norm)),
            self.values(gradients),
            lambda name: self.value(squares(name)),
        )
        return {name: self.taken(gradient, norm) for name, gradient in clipped.items()}, self.taken(
            used, norm
        )

    def update(self, gradients: Mapping[str, Any], *inputs: Any) -> None:
        if not self.change.skips(self.place, False, self.place.count):
            self.right.update(gradients, *inputs)
            self.optimizer.state = self.edited("keeps", self.optimizer.state)


def differing(change: Change, recipe: Recipe) -> tuple[str, ...]:
    """Recipe fields that a change alters."""
    altered = change.recipe(recipe)
    return tuple(
        attribute.name
        for attribute in fields(recipe)
        if getattr(altered, attribute.name) != getattr(recipe, attribute.name)
    )


def stages(change: Change, recipe: Recipe) -> set[str]:
    """Stages of a step where a change may first appear."""
    stage_of = {"OPT-10": "gradients", "OPT-7": "clipped", "DRP-2": "losses"}
    return {stage for stage, places in PLACES.items() if change.places & {*places}} | {
        stage_of.get(CLAUSE_OF[name], "moments") for name in differing(change, recipe)
    }
