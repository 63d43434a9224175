"""What a fault of training is: a name, the run that shows it, and what it makes of one place of a step.

The oracle's trajectory and a backend's trainer have the same places. What is made of one is written with operators, and with the
operations that both give (:class:`concord.backends.optimizers.Operations`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.optimizers import Operations, Optimizer
from concord.spec.batch import Batch
from concord.spec.training.recipe import Recipe

GROUPS = ("optimizer", "decay", "clipping", "schedule", "accumulation", "dropout", "data", "resume")
"""Where in training a bug sits."""

Tensor = Any
"""A tensor of a framework, or on the tape."""

Tensors = Mapping[str, Tensor]
"""By name of a parameter: a framework's own, or the canonical one."""

Window = Sequence[Batch]

HUB = "https://github.com/"


@dataclass
class Place:
    """Where a fault is at work in one run.

    Attributes:
        operations: of the framework, or of the tape.
        shortened: rounds a tensor to a number format, ``"bfloat16"``.
        recipe: of the run.
        kinds: of the parameters, by name.
        step: the number of the step, from 0.
        resumed: the step at which training went on from a checkpoint; 0 before it did.
        memory: what a fault keeps from step to step.
    """

    operations: Operations
    shortened: Callable[[Tensor, str], Tensor]
    recipe: Recipe
    kinds: Mapping[str, str]
    step: int = 0
    resumed: int = 0
    memory: dict[str, Any] = field(default_factory=dict)

    def norm(self, gradients: Tensors) -> Tensor:
        """Return the norm of gradients taken together."""
        return self.operations.square_root(
            sum(self.operations.total(gradient * gradient) for gradient in gradients.values())
        )

    def share(self, limit: float, norm: Tensor) -> Tensor:
        """Return by what gradients of a norm are multiplied so that it keeps within a limit."""
        return self.operations.bounded(limit / (norm + self.recipe.clip_epsilon), 1.0)


@dataclass(frozen=True)
class Site:
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


Masks = Callable[[Place, Site], tuple[NDArray[np.bool_], float]]
"""Gives which elements are kept, and the rate by which those are scaled up: by 1 / (1 - rate)."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a fault makes of the places of a step; None: what is right.

    Attributes:
        recipe: the recipe that is trained by.
        window: the batches of a step, of those of all steps.
        shares: by how much each batch of a step counts, given how many samples and counted labels each has, and what is right.
        masks: what dropout keeps.
        added: the sum of gradients so far, with those of one more batch, which counts by a share of all.
        gradients: of a step, accumulated.
        clip: the clipped gradients, and the norm that is reported; given what gives the sum of squares that a norm sees.
        rate: the learning rate of a step.
        optimizer: what updates parameters.
        keeps: what the optimizer keeps after a step, as ``<slot>.<parameter>``.
        skips: whether a step with that many batches updates nothing.
        load: what training goes on from: ``parameters.<name>`` and ``<slot>.<name>``, and how many steps the optimizer has made.
    """

    recipe: Callable[[Recipe], Recipe] | None = None
    window: Callable[[Place, Sequence[Window]], Window] | None = None
    shares: Callable[[Place, list[tuple[int, int]], list[float]], list[float]] | None = None
    masks: Masks | None = None
    added: Callable[[Place, Tensors, Tensors, float], dict[str, Tensor]] | None = None
    gradients: Callable[[Place, Tensors], dict[str, Tensor]] | None = None
    clip: (
        Callable[[Place, Tensors, Callable[[str], Tensor]], tuple[dict[str, Tensor], Tensor | None]] | None
    ) = None
    rate: Callable[[Place], float] | None = None
    optimizer: type[Optimizer] | None = None
    keeps: Callable[[Place, Tensors], dict[str, Tensor]] | None = None
    skips: Callable[[Place, int], bool] | None = None
    load: Callable[[Place, Tensors, int], tuple[dict[str, Tensor], int]] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFault:
    """A realistic bug of a training loop.

    Attributes:
        name: unique, in words joined by underscores.
        group: one of :data:`GROUPS`.
        what: the bug, in one sentence.
        clause: the clause of SPEC.md that it breaks.
        change: what it makes of a step.
        run: the run that makes it visible, by its name in :data:`concord.conformance.faults.training.runs.RUNS`.
        options: fields of that run's recipe to set.
        source: where it was seen.
        algorithm: the only one that can have it; empty: any.
        equivalent: the precisions in which its run does not show it, each with the reason.
    """

    name: str
    group: str
    what: str
    clause: str
    change: Change
    run: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    algorithm: str = ""
    equivalent: Mapping[str, str] = field(default_factory=dict)

    first = ("where the reference shows it",)
    scenario, cause = property(lambda self: self.run), property(lambda self: self.name)
    variant, input = property(lambda self: "training"), property(lambda self: f"run {self.run}")

    def diagnosed(self, said: str) -> str:
        """Return whether a diagnosis names this fault: ``"right"``, ``"none"`` or ``"wrong"``.

        Args:
            said: what it names, joined by "or"; empty if nothing.
        """
        return "none" if not said else "right" if self.name in said.split(" or ") else "wrong"

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it is looked for in: what trains is float32."""
        return tuple(dtype for dtype in ("float32", "float64") if dtype not in self.equivalent)


def recipe(**fields: Any) -> Change:
    """Return the change of training by another recipe."""
    return Change(recipe=lambda given: given.replace(**fields))
