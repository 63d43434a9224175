"""Training in any arithmetic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Ids, Mask
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.leaves import Leaves
from concord.spec.parameters import Weights, parameters
from concord.spec.reference import observe, used_rows
from concord.spec.tape import Node
from concord.spec.tensors import resolve, sizes_of, taps
from concord.spec.training.dropout import kept, rate_of, sites
from concord.spec.training.recipe import Recipe
from concord.spec.training.reference_optimizer import Nodes, ReferenceOptimizer, batch_weights, clipped
from concord.spec.training.schedules import learning_rate

Observer = Callable[[str, Array], None]
"""Receives the tensors of a step.

These are ``losses.<number>`` of its batches, ``gradients.<name>`` before clipping, ``norm``,
``clipped.<name>``, ``rate``, and ``<moment>.<name>`` and ``parameters.<name>`` after the step.
"""


@dataclasses.dataclass(frozen=True)
class Training:
    """A recipe, its batches and seed."""

    recipe: Recipe
    steps: Sequence[Sequence[Batch]]  # batches whose gradients each step accumulates
    seed: int = 0  # of dropout
    # Steps that report all tensors, counted from 0; the others report only losses and norms.
    reported: tuple[int, ...] = ()

    def reports(self, step: int, name: str) -> bool:
        """Whether a step reports a tensor."""
        return step in self.reported or name == "norm" or name.startswith("losses.")


def counts(config: EncoderConfig, batch: Batch) -> tuple[int, int]:
    """Number of samples, and of those with a counted label (SPEC LOS-3)."""
    size = len(next(iter(batch.arrays().values())))
    return size, size if batch.labels is None or config.ignore_label is None else int(
        (batch.labels != config.ignore_label).sum()
    )


def rows_of(config: EncoderConfig, batches: Sequence[Batch], part: str = "model") -> dict[str, Ids]:
    """Rows of each table that a step looks up, sorted (SPEC OPT-8)."""
    rows_by_batch = [used_rows(config, batch, part) for batch in batches]
    return {
        name: np.unique(np.concatenate([rows[name] for rows in rows_by_batch]))
        for name in (rows_by_batch[0] if rows_by_batch else {})
    }


class Course:
    """Learning rates, batch weights and dropout of a training run."""

    def __init__(self, config: EncoderConfig, training: Training, part: str = "model") -> None:
        self.config, self.training, self.part, self.steps = config, training, part, 0
        self.recipe = training.recipe
        self.sites = {tap: site for tap, site in sites(config, part).items() if rate_of(self.recipe, site)}

    def batch_weights(self, batches: Sequence[Batch]) -> list[float]:
        """Weights of the batches' gradients (SPEC OPT-10)."""
        return batch_weights(self.recipe, [counts(self.config, batch) for batch in batches])

    def rate(self) -> float:
        """Learning rate of the next step (SPEC OPT-9)."""
        return learning_rate(self.recipe, self.steps)

    def dropped(self, number: int, site: str, shape: tuple[int, ...]) -> tuple[Mask, float] | None:
        """Kept elements of a site and the dropout rate, or None (SPEC DRP-2)."""
        rate = rate_of(self.recipe, site)
        return (kept(self.training.seed, self.steps, number, site, shape, rate), rate) if rate else None

    def masked(self, batch: Batch, number: int) -> dict[str, tuple[Mask, float]]:
        """Return :meth:`dropped` for each tap with dropout."""
        arrays = batch.arrays()
        table, sizes = taps(self.config, self.part, arrays), sizes_of(self.config, arrays)
        masks = {
            tap: self.dropped(number, site, resolve(table[tap].shape, sizes))
            for tap, site in self.sites.items()
        }
        return {tap: mask for tap, mask in masks.items() if mask}


class Trajectory(Course):
    """Training in any arithmetic, step by step.

    Args:
        weights: valid, and already rounded to ``dtype``.
        dtype: precision of the model; mask constants are rounded to it.
        uncertain: errors of weights not known exactly, such as a float32 table.

    Attributes:
        norm: a run's norm to clip by, or None.
    """

    def __init__(
        self,
        config: EncoderConfig,
        weights: Weights,
        training: Training,
        arithmetic: Arithmetic,
        part: str = "model",
        dtype: str = "float64",
        deviations: Deviations = NONE,
        uncertain: Mapping[str, Array] | None = None,
    ) -> None:
        super().__init__(config, training, part)
        self.a, self.dtype, self.deviations = arithmetic, dtype, deviations
        # Only a batch needs a tape: on it, an update would keep every intermediate array of each parameter.
        arithmetic.recording = False
        table = parameters(config, part)
        self.trained = [name for name, parameter in table.items() if parameter.trainable]
        self.parameters: dict[str, Node] = {name: arithmetic.leaf(array) for name, array in weights.items()}
        for name, size in (uncertain or {}).items():
            self.parameters[name] = arithmetic.uncertain(self.parameters[name], size)
        bits = deviations.get("optimizer_constant_bits")
        self.kinds = {name: entry.kind for name, entry in table.items()}
        self.optimizer = ReferenceOptimizer(
            arithmetic, training.recipe, self.kinds, None if bits is None else int(bits)
        )
        self.norm: Array | None = None

    def run(self, observer: Observer) -> None:
        """Run every step, and report tensors as ``steps.<step>.<name>``."""
        for step, batches in enumerate(self.training.steps):
            self.step(
                batches,
                lambda name, values, step=step: (  # type: ignore[misc]
                    observer(f"steps.{step}.{name}", values) if self.training.reports(step, name) else None
                ),
            )

    def load(self, state: Mapping[str, Array], steps: int) -> None:
        """Resume after some steps.

        Args:
            state: ``parameters.<name>`` of all trained parameters, and ``<moment>.<name>``, by default zero.
        """
        self.parameters |= {name: self.a.leaf(state[f"parameters.{name}"]) for name in self.trained}
        self.optimizer.load(
            {name: values for name, values in state.items() if not name.startswith("parameters.")}, steps
        )
        self.steps = steps

    def state(self) -> dict[str, Array]:
        """The state for :meth:`load`, with leading axes."""
        return {f"parameters.{name}": self.parameters[name].value for name in self.trained} | {
            name: node.value for name, node in self.optimizer.state.items()
        }

    def step(self, batches: Sequence[Batch], observer: Observer) -> None:
        """Run one step, and report its tensors."""
        with np.errstate(all="ignore"):  # infinities and NaN are valid here
            total, slices = self.accumulated(batches, observer)
        for name, values in total.items():
            observer(f"gradients.{name}", values)
        self.finish(total, slices, batches, observer)

    def finish(
        self,
        total: Mapping[str, Array],
        slices: Mapping[str, list[Array]],
        batches: Sequence[Batch],
        observer: Observer,
    ) -> None:
        """Clip the gradients of a step, and update.

        Args:
            slices: gradients of looked-up rows, for a norm that uses them (SPEC OPT-7).
        """
        with np.errstate(all="ignore"):
            gradients = {name: self.node(values) for name, values in total.items()}
            limited, norm = self.limited(
                gradients, lambda name: self.squares(slices.get(name) or [total[name]])
            )
            if norm is not None:
                observer("norm", norm.value)
            if self.recipe.clipping != "none":
                for name, gradient in limited.items():
                    observer(f"clipped.{name}", gradient.value)
            observer("rate", self.optimizer.scalar(self.rate()).value)
            self.update(limited, batches)
        for name, node in self.optimizer.state.items():
            observer(name, node.value)
        for name in self.trained:
            observer(f"parameters.{name}", self.parameters[name].value)
        self.steps += 1

    def limited(
        self, gradients: Nodes, squares: Callable[[str], Node]
    ) -> tuple[dict[str, Node], Node | None]:
        """Clipped gradients, and the global norm, if any."""
        return clipped(self.a, self.recipe, gradients, squares, self.kinds, self.norm)

    def update(self, gradients: Nodes, batches: Sequence[Batch]) -> None:
        """Update every parameter."""
        trained = {name: self.parameters[name] for name in self.trained}
        self.parameters |= self.optimizer.update(
            trained, gradients, self.rate(), rows_of(self.config, batches, self.part)
        )

    def node(self, values: Array) -> Node:
        """Turn values into a leaf, including samples."""
        return Node(values, values.shape[self.a.lead :], taped=False)

    def accumulated(
        self, batches: Sequence[Batch], observer: Observer
    ) -> tuple[dict[str, Array], dict[str, list[Array]]]:
        """Gradients of a step, and those of looked-up rows."""
        total: dict[str, Array] = {}
        slices: dict[str, list[Array]] = {}
        for number, weight in enumerate(self.batch_weights(batches)):
            gradients = self.differentiated(batches[number], number, observer)
            scaled = {
                name: self.a.scale(self.node(values), weight).value if weight != 1.0 else values
                for name, values in gradients.items()
            }
            for name in [name for name in scaled if name.startswith("slices.")]:
                slices.setdefault(name.removeprefix("slices."), []).append(scaled.pop(name))
            total = self.added(total, scaled, weight)
        return {name: total[name] for name in self.trained}, slices

    def added(
        self, total: Mapping[str, Array], piece: Mapping[str, Array], weight: float
    ) -> dict[str, Array]:
        """Add the gradients of one more batch."""
        return {
            name: self.a.add(self.node(total[name]), self.node(values)).value if name in total else values
            for name, values in piece.items()
        }

    def squares(self, pieces: Sequence[Array]) -> Node:
        """Sum the squares of several arrays."""
        sums = [self.a.sum(self.a.multiply(self.node(piece), self.node(piece))) for piece in pieces]
        total = sums[0]
        for further in sums[1:]:
            total = self.a.add(total, further)
        return total

    def differentiated(self, batch: Batch, number: int, observer: Observer) -> dict[str, Array]:
        """Gradients of a batch's loss."""
        sliced = self.recipe.embedding_gradients == "slices"
        gradients: dict[str, Array] = {}
        rows = used_rows(self.config, batch, self.part)

        def take(name: str, values: Array) -> None:
            if name == "loss":
                observer(f"losses.{number}", values)
            elif name.startswith("gradients.") and not name.startswith(
                ("gradients.taps.", "gradients.inputs.")
            ):
                name = name.removeprefix("gradients.")
                gradients[name] = self.whole(name, values, rows[name]) if name in rows else values

        # One tape per batch: its weights are new leaves that keep their samples between steps.
        leaves = Leaves(self.a, {name: node.value for name, node in self.parameters.items()}, carried=True)
        observe(
            self.config,
            leaves,
            batch,
            self.a,
            take,
            True,
            self.part,
            self.dtype,
            deviations=self.deviations,
            slices=sliced,
            dropout=functools.partial(self.dropped, number),
        )
        self.a.recording = False
        return gradients

    def whole(self, name: str, values: Array, rows: Ids) -> Array:
        """Gradient of a table with all rows."""
        lead = values.shape[: self.a.lead]
        full = np.zeros((*lead, *self.parameters[name].shape), values.dtype)
        where: Any = (*(slice(None),) * self.a.lead, rows)
        full[where] = values
        return full
