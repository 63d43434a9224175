"""What is asked of a run, and what is expected of it."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Problem
from concord.conformance.judging.estimate import least_sigma
from concord.conformance.judging.exemptions import (
    GROWN,
    NO_DIGIT,
    NORM,
    NOT_FINITE_BEFORE,
    OUT_OF_RANGE_BEFORE,
)
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.encoder import Observer
from concord.spec.parameters import Weights, trainable, validate_weights
from concord.spec.precision import precision
from concord.spec.reference import observe, used_rows
from concord.spec.tensors import clause_of
from concord.spec.training.trajectory import Training, Trajectory

UNDECIDED = 0.1
"""Share of a tap's own size that sigma may have.

Beyond it, and in every later tap, end to end says nothing.
"""


ZERO = 2.0**-24
"""Share of sigma up to which a gradient is zero but for the oracle's own rounding.

Then rounding is all that there is to judge.
"""


@dataclass(frozen=True)
class JudgedProblem(Problem):
    """What a run is asked to compute, and by which rules it is judged.

    Attributes:
        dtype: the precision, or mode of :data:`concord.spec.precision.MODES`, whose rounding is allowed for.
        deviations: that the backend declares.
        gradients: whether gradients are judged.
        unrounded: patterns of the taps of which the backend says that what follows them sees more digits than
            it delivers.
    """

    dtype: str = "float32"
    deviations: Deviations = field(default_factory=lambda: NONE)
    gradients: bool = True
    unrounded: tuple[str, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """A digest of all of its content."""
        return digest(self)

    @functools.cached_property
    def rounded(self) -> tuple[Weights, Batch]:
        """Weights and inputs as the precision holds them (SPEC PRC-2)."""
        validate_weights(self.config, self.weights, self.part)
        validate_batch(self.config, self.batch, self.part)
        return round_inputs(self.weights, self.batch, self.dtype)

    @functools.cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Which rows of each table have a gradient, by the name of the gradient."""
        return {
            f"gradients.{name}": rows for name, rows in used_rows(self.config, self.batch, self.part).items()
        }

    def observe(self, arithmetic: Arithmetic, observer: Observer, pinned: Pinned | None = None) -> int:
        """Compute it in some arithmetic (:func:`concord.spec.reference.observe`), from pinned tensors."""
        weights, batch = self.rounded
        given = pinned or Pinned({}, {})
        return observe(
            self.config,
            weights,
            batch,
            arithmetic,
            observer,
            self.gradients,
            self.part,
            self.dtype,
            given.taps,
            given.gradients,
            self.is_unrounded,
            self.deviations,
        )

    def clause(self, name: str) -> str:
        """Return the clause that defines a tensor."""
        return clause_of(self.config, name, self.part)

    def forget(self) -> None:
        """Let go of what it was computed from, which is made anew when it is wanted again."""
        self.__dict__.pop("rounded", None)

    def is_unrounded(self, tap: str) -> bool:
        """Whether a tap is handed out before it is rounded."""
        return any(fnmatch.fnmatchcase(tap, pattern) for pattern in self.unrounded)


@dataclass(frozen=True)
class JudgedTraining:
    """What a run is asked to do to a model, and by which rules it is judged.

    The same to its judge as a :class:`JudgedProblem`.

    Attributes:
        uncertain: by how much weights may differ from those that are given.
    """

    config: EncoderConfig
    weights: Weights
    training: Training
    part: str = "model"
    dtype: str = "float32"
    deviations: Deviations = field(default_factory=lambda: NONE)
    uncertain: Mapping[str, Array] = field(default_factory=dict)
    rows: ClassVar[dict[str, NDArray[np.int64]]] = {}

    @functools.cached_property
    def key(self) -> str:
        """A digest of all of its content."""
        return digest(self)

    @property
    def start(self) -> dict[str, Array]:
        """Where training stands before its first step."""
        return {
            f"parameters.{name}": array
            for name, array in self.weights.items()
            if name in trainable(self.config, self.part)
        }

    def trajectory(self, arithmetic: Arithmetic) -> Trajectory:
        """Return the training in some arithmetic, before its first step."""
        weights = {name: precision(self.dtype).round(array) for name, array in self.weights.items()}
        return Trajectory(
            self.config,
            weights,
            self.training,
            arithmetic,
            self.part,
            self.dtype,
            self.deviations,
            self.uncertain,
        )

    def clause(self, name: str) -> str:
        """Return the clause that defines a tensor of a step."""
        section = name.split(".")[2]
        update = {"sgd": "OPT-2", "adam": "OPT-3", "rmsprop": "OPT-5"}[self.training.recipe.algorithm]
        return {
            "losses": "LOS-2",
            "gradients": "GRD-1",
            "norm": "OPT-7",
            "clipped": "OPT-7",
            "rate": "OPT-9",
        }.get(section, update)


@dataclass(frozen=True)
class Pinned:
    """Tensors that what follows them is computed from.

    Attributes:
        taps: by name.
        gradients: of the loss by taps, by the tap's name.
    """

    taps: Mapping[str, Array]
    gradients: Mapping[str, Array]

    def without(self, taps: Collection[str]) -> Pinned:
        """Return the same without some taps and the gradients by them."""
        return Pinned(
            *(
                {name: array for name, array in arrays.items() if name not in taps}
                for arrays in (self.taps, self.gradients)
            )
        )


@dataclass(frozen=True)
class Expectation:
    """What a run is judged by, in one of the two ways.

    Attributes:
        dtype: the precision or mode.
        values: tensor name to expected array; taps in the order of computation, then gradients in the order
            of the backward pass, those by taps as ``gradients.taps.<tap>``. Of the gradient of a table, the
            rows of ``rows`` alone.
        sigmas: for each, the standard deviation of correct results, in its shape. NaN: undetermined.
            Infinite: the value is not finite, and no rounding makes it so.
        clauses: for each, the clause that defines it.
        rows: which rows of a table's gradient can be other than zero.
        shapes: of every tensor that a run may deliver, those that are not judged in this way too; of those in
            ``rows`` without the other rows.
        chained: whether each tap is computed from those before it, so that it says nothing once one of them
            does not.
        independent: of a tensor, how many independent errors the samples show.
        coherent: what groups of elements may share.
        ties: of tensors of which rounding decides elements, the values that these may have.
        norms: activations whose rows are divided by their deviation, or their length.
        few: whether this is a first look, at few samples.
        occurred: operations that were computed, as far as anything depends on their kernels.
        without_rule: operations whose rounding nothing says.
    """

    dtype: str
    values: dict[str, Array]
    sigmas: dict[str, Array]
    clauses: dict[str, str]
    rows: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chained: bool = True
    independent: Mapping[str, float] = field(default_factory=dict)
    ties: Mapping[str, Any] = field(default_factory=dict)
    coherent: Any = None
    norms: Collection[str] = ()
    few: bool = False
    occurred: Collection[str] = ()
    without_rule: Collection[str] = ()

    @property
    def nbytes(self) -> int:
        """The memory that it takes up."""
        return sum(array.nbytes for array in (*self.values.values(), *self.sigmas.values()))

    def whole(self, name: str, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """Return values and sigmas of a tensor in its full shape.

        What has no row is zero, and sigma as small as may be.
        """
        value, sigma = self.values[name], self.sigmas.get(name, self.values[name])
        if name not in self.rows:
            return value, sigma
        full, sigmas = np.zeros(sizes, value.dtype), np.full(sizes, precision(self.dtype).smallest_normal)
        full[self.rows[name]], sigmas[self.rows[name]] = value, sigma
        return full, sigmas

    @functools.cached_property
    def undecided(self) -> frozenset[str]:
        """Taps from the first on whose sigma is not small beside its values. Gradients are always decided."""
        found: set[str] = set()
        for name, value in self.values.items() if self.chained else ():
            if is_gradient(name):
                break
            sigma = self.sigmas[name]
            judged = np.isfinite(sigma) & np.isfinite(value)
            if found or root_mean_square(sigma[judged]) > UNDECIDED * root_mean_square(value[judged]):
                found.add(name)
        return frozenset(found)

    @functools.cached_property
    def overflowing(self) -> bool:
        """Whether the precision does not determine all taps: every gradient flows through all of them."""
        return not all(
            np.isfinite(sigma).all() for name, sigma in self.sigmas.items() if not is_gradient(name)
        )

    @functools.cached_property
    def singular(self) -> frozenset[str]:
        """Gradients that are computed after one that is not finite (SPEC NRM-7), or is out of range.

        What is not finite passes a ReLU that is closed, or a masked score, in one framework, which multiplies
        by 0, and not in another, which selects: from there on it is no question of right or wrong whether an
        element is finite.
        """
        gradients = [name for name in self.values if is_gradient(name)]
        largest = precision(self.dtype).largest
        first = next(
            (place for place, name in enumerate(gradients) if not (abs(self.values[name]) <= largest).all()),
            len(gradients),
        )
        return frozenset(gradients[first + 1 :])

    @functools.cached_property
    def undecided_rows(self) -> dict[str, NDArray[np.bool_]]:
        """In which rows of each layer norm rounding leaves no digit, (…, 1).

        Where sigma is not small, nor a number. Norms without one are left out.

        So with vectors that are divided by their length, but for one that is zero whatever is rounded: it is
            divided by epsilon.
        """
        found = {}
        for name in self.norms:
            if name not in self.values:
                continue
            size, noise = (
                np.max(abs(array), axis=-1, keepdims=True) for array in (self.values[name], self.sigmas[name])
            )
            rows = ~(noise <= UNDECIDED * size)
            if name == "normalized":
                rows &= ~((size == 0) & self.settled(name).all(-1, keepdims=True))
            if rows.any():
                found[name] = rows
        return found

    @functools.cached_property
    def unsettled(self) -> frozenset[str]:
        """Gradients that flow through a row of a layer norm of which rounding leaves no digit.

        Where all entries of a row are nearly equal, its deviation is rounding, and gradients are divided by
            it: their errors have no variance that samples could show. Where gradients by taps are delivered,
            what follows goes on from them.
        """
        order = [name for name in self.values if is_gradient(name)]
        found: set[str] = set()
        for norm in self.undecided_rows:
            gamma = f"gradients.{norm}.weight"
            behind = order[order.index(gamma) if gamma in order else 0 :]
            given = next((place for place, name in enumerate(behind) if is_tap_gradient(name)), len(behind))
            found.update(behind[: given + 1])
        return frozenset(found)

    def settled(self, name: str) -> NDArray[np.bool_]:
        """Return which elements of a gradient have no noise, such as those behind a closed ReLU."""
        quiet: NDArray[np.bool_] = self.sigmas[name] <= 2 * least_sigma(self.values[name], self.dtype)
        return quiet

    def silent(self, name: str, local: bool, sound: bool) -> str:
        """Return why nothing can be said of a tensor; empty if something can.

        Args:
            local: whether this is expected of each step by itself.
            sound: whether the run's forward pass is finite.
        """
        gradient = is_gradient(name)
        if not local:
            if gradient and self.overflowing:
                return OUT_OF_RANGE_BEFORE
            return GROWN if name in self.undecided else ""
        if gradient and not sound:
            return NOT_FINITE_BEFORE
        if name in self.unsettled and not self.settled(name).any():
            return NORM
        # In few bits a softmax of large scores has but one weight, and what flows back through it is a
        # difference of equal numbers: rounding, times weights that are large. Few samples say little of how
        # far that may go.
        target = precision(self.dtype)
        if gradient and target.unit_roundoff > target.accumulation:
            size, noise = root_mean_square(self.values[name]), root_mean_square(self.sigmas[name])
            if noise * ZERO < size < noise:
                return NO_DIGIT
        return ""

    def determined(self, name: str, local: bool) -> Array:
        """Return the sigmas of a tensor, NaN where rounding alone decides what an element is."""
        sigma = self.sigmas[name]
        if local and name in self.unsettled:
            sigma = np.where(self.settled(name), sigma, np.nan)
        if name in self.undecided_rows:
            sigma = np.where(self.undecided_rows[name], np.nan, sigma)
        return sigma


def digest(whole: Any) -> str:
    """Return a digest of data, and of all arrays in it."""
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, np.ndarray):
            found.update(f"{value.dtype} {value.shape}".encode())
            found.update(np.ascontiguousarray(value).data)
        elif is_dataclass(value):
            take([getattr(value, one.name) for one in fields(value)])
        elif isinstance(value, Mapping):
            take(sorted(value.items()))
        elif isinstance(value, (list, tuple)):
            found.update(f"{len(value)} entries".encode())
            for entry in value:
                take(entry)
        else:
            found.update(repr(value).encode())

    take(whole)
    return found.hexdigest()


def is_gradient(name: str) -> bool:
    """Return whether a tensor is a gradient."""
    return name.startswith("gradients.")


def is_tap_gradient(name: str) -> bool:
    """Return whether a tensor is the gradient by a tap."""
    return name.startswith("gradients.taps.")


def subject_of(name: str) -> str:
    """Return the tap, parameter or input that a gradient is by; the name itself of what is no gradient."""
    return name.removeprefix("gradients.").removeprefix("taps.")


def root_mean_square(values: Array) -> float:
    """Return the root mean square, scaled so that squares neither overflow nor vanish; 0 of nothing."""
    with np.errstate(all="ignore"):
        largest = float(np.max(abs(values), initial=0.0))
        scaled = values / largest if largest > 0 else values
        return largest * float(np.sqrt(np.mean(np.square(scaled)))) if values.size else 0.0
