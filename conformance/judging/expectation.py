"""What a run was asked for, and what is expected of it."""

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

# Share of a tap's size that sigma may reach. Beyond it, end to end judges neither this tap nor a later one:
# rounding has grown so far that a right run may look wrong, and the judgement of each step needs no such
# gate.
UNDECIDED = 0.1


# A gradient below this share of its sigma is zero but for the reference's own rounding, and not a lost digit.
ZERO = 2.0**-24


@dataclass(frozen=True)
class JudgedProblem(Problem):
    """A run that was asked for, and the rules by which it is judged."""

    dtype: str = "float32"  # the precision, or mode of MODES, whose rounding is allowed for
    deviations: Deviations = field(default_factory=lambda: NONE)  # those that the backend declares
    gradients: bool = True  # whether gradients are judged
    # Patterns of taps that later steps see with more digits than are delivered.
    unrounded: tuple[str, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """A digest of its content."""
        return digest(self)

    @functools.cached_property
    def rounded(self) -> tuple[Weights, Batch]:
        """Weights and inputs as the precision holds them (SPEC PRC-2)."""
        validate_weights(self.config, self.weights, self.part)
        validate_batch(self.config, self.batch, self.part)
        return round_inputs(self.weights, self.batch, self.dtype)

    @functools.cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Rows of each table that have a gradient, by the gradient's name."""
        return {
            f"gradients.{name}": rows for name, rows in used_rows(self.config, self.batch, self.part).items()
        }

    def observe(self, arithmetic: Arithmetic, observer: Observer, pinned: Pinned | None = None) -> int:
        """Compute it in an arithmetic, from pinned tensors (:func:`concord.spec.reference.observe`)."""
        weights, batch = self.rounded
        pins = pinned or Pinned({}, {})
        return observe(
            self.config,
            weights,
            batch,
            arithmetic,
            observer,
            self.gradients,
            self.part,
            self.dtype,
            pins.taps,
            pins.gradients,
            self.is_unrounded,
            self.deviations,
        )

    def clause(self, name: str) -> str:
        """Return the clause that defines a tensor."""
        return clause_of(self.config, name, self.part)

    def forget(self) -> None:
        """Free the rounded inputs, which can be computed anew."""
        self.__dict__.pop("rounded", None)

    def is_unrounded(self, tap: str) -> bool:
        """Whether a tap is delivered rounded and used unrounded."""
        return any(fnmatch.fnmatchcase(tap, pattern) for pattern in self.unrounded)


@dataclass(frozen=True)
class JudgedTraining:
    """A training that was asked for, with the attributes of a :class:`JudgedProblem`."""

    config: EncoderConfig
    weights: Weights
    training: Training
    part: str = "model"
    dtype: str = "float32"
    deviations: Deviations = field(default_factory=lambda: NONE)
    # By how much weights may differ from the given ones.
    uncertain: Mapping[str, Array] = field(default_factory=dict)
    rows: ClassVar[dict[str, NDArray[np.int64]]] = {}

    @functools.cached_property
    def key(self) -> str:
        """A digest of its content."""
        return digest(self)

    @property
    def start(self) -> dict[str, Array]:
        """Trainable parameters before the first step."""
        return {
            f"parameters.{name}": array
            for name, array in self.weights.items()
            if name in trainable(self.config, self.part)
        }

    def trajectory(self, arithmetic: Arithmetic) -> Trajectory:
        """Return the training in an arithmetic, before its first step."""
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
    """Tensors of a run from which the reference computes what follows."""

    taps: Mapping[str, Array]  # by name
    gradients: Mapping[str, Array]  # of the loss by taps, by the tap's name

    def without(self, taps: Collection[str]) -> Pinned:
        """Return the same without some taps and their gradients."""
        return Pinned(
            *(
                {name: array for name, array in arrays.items() if name not in taps}
                for arrays in (self.taps, self.gradients)
            )
        )


@dataclass(frozen=True)
class Expectation:
    """What a run is judged by, locally or end to end.

    Attributes:
        values: expected arrays by name: taps in the order of computation, then gradients in that of the
            backward pass, those by taps as ``gradients.taps.<tap>``. A table's gradient has the rows of
            ``rows`` alone.
        sigmas: the standard deviation of correct results, in the shape of the value. NaN: undetermined;
            infinite: the value is not finite, and no rounding makes it so.
        rows: rows of a table's gradient that can be other than zero.
        shapes: of every tensor that a run may deliver, also of those that are not judged in this way.
        chained: whether each tap follows from those before it, so that none is decided after an undecided
            one.
        independent: the number of independent errors that the samples of a tensor show.
        coherent: judges what groups of elements share.
        ties: the right values of elements that rounding decides.
        norms: activations whose rows are divided by their deviation or length.
        few: whether this is a first look.
        occurred: operations that were computed, as far as their kernels matter.
        without_rule: operations whose rounding no rule describes.
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
        """The memory of all arrays."""
        return sum(array.nbytes for array in (*self.values.values(), *self.sigmas.values()))

    def whole(self, name: str, sizes: tuple[int, ...]) -> tuple[Array, Array]:
        """Return value and sigma in the tensor's full shape, with zeros in rows without a gradient."""
        value, sigma = self.values[name], self.sigmas.get(name, self.values[name])
        if name not in self.rows:
            return value, sigma
        full, sigmas = np.zeros(sizes, value.dtype), np.full(sizes, precision(self.dtype).smallest_normal)
        full[self.rows[name]], sigmas[self.rows[name]] = value, sigma
        return full, sigmas

    @functools.cached_property
    def undecided(self) -> frozenset[str]:
        """Taps from the first on whose sigma is not small beside its values."""
        undecided: set[str] = set()
        # Gradients are always decided: what grew on the way forward is in their own sigma.
        for name, value in self.values.items() if self.chained else ():
            if is_gradient(name):
                break
            sigma = self.sigmas[name]
            judged = np.isfinite(sigma) & np.isfinite(value)
            if undecided or root_mean_square(sigma[judged]) > UNDECIDED * root_mean_square(value[judged]):
                undecided.add(name)
        return frozenset(undecided)

    @functools.cached_property
    def overflowing(self) -> bool:
        """Whether a tap is out of range, and so every gradient."""
        return not all(
            np.isfinite(sigma).all() for name, sigma in self.sigmas.items() if not is_gradient(name)
        )

    @functools.cached_property
    def singular(self) -> frozenset[str]:
        """Gradients computed after one that is not finite (SPEC NRM-7) or out of range."""
        # Behind a closed ReLU or a masked score a kernel that multiplies by 0 passes NaN on, and one that
        # selects does not. From there on, whether an element is finite is no question of right or wrong.
        gradients = [name for name in self.values if is_gradient(name)]
        largest = precision(self.dtype).largest
        first = next(
            (place for place, name in enumerate(gradients) if not (abs(self.values[name]) <= largest).all()),
            len(gradients),
        )
        return frozenset(gradients[first + 1 :])

    @functools.cached_property
    def undecided_rows(self) -> dict[str, NDArray[np.bool_]]:
        """Rows of each norm that rounding leaves no digit of, (…, 1), if there are any."""
        undecided = {}
        for name in self.norms:
            if name not in self.values:
                continue
            size, noise = (
                np.max(abs(array), axis=-1, keepdims=True) for array in (self.values[name], self.sigmas[name])
            )
            # Negated, so that a sigma of NaN counts as undecided.
            rows = ~(noise <= UNDECIDED * size)
            # A vector that is zero whatever is rounded is divided by epsilon: its rows are decided.
            if name == "normalized":
                rows &= ~((size == 0) & self.settled(name).all(-1, keepdims=True))
            if rows.any():
                undecided[name] = rows
        return undecided

    @functools.cached_property
    def unsettled(self) -> frozenset[str]:
        """Gradients through a norm's row that rounding leaves no digit of."""
        # Where all entries of a row are nearly equal, its deviation is rounding. Gradients are divided by it,
        # and such errors have no variance that samples could show. A delivered gradient by a tap ends that:
        # what follows goes on from the run's own.
        order = [name for name in self.values if is_gradient(name)]
        unsettled: set[str] = set()
        for norm in self.undecided_rows:
            gamma = f"gradients.{norm}.weight"
            behind = order[order.index(gamma) if gamma in order else 0 :]
            delivered = next(
                (place for place, name in enumerate(behind) if is_tap_gradient(name)), len(behind)
            )
            unsettled.update(behind[: delivered + 1])
        return frozenset(unsettled)

    def settled(self, name: str) -> NDArray[np.bool_]:
        """Return which elements of a gradient have no noise, such as those behind a closed ReLU."""
        quiet: NDArray[np.bool_] = self.sigmas[name] <= 2 * least_sigma(self.values[name], self.dtype)
        return quiet

    def silent(self, name: str, local: bool, sound: bool) -> str:
        """Return why nothing can be said of a tensor; empty if something can.

        Args:
            local: whether each step is judged by itself.
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
        # In few bits a softmax of large scores has one weight, and what flows back through it is a difference
        # of equal numbers: rounding, times large weights. Its errors have tails that 16 samples do not show.
        target = precision(self.dtype)
        if gradient and target.unit_roundoff > target.accumulation:
            size, noise = root_mean_square(self.values[name]), root_mean_square(self.sigmas[name])
            if noise * ZERO < size < noise:
                return NO_DIGIT
        return ""

    def determined(self, name: str, local: bool) -> Array:
        """Return the sigmas of a tensor, NaN where rounding alone decides an element."""
        sigma = self.sigmas[name]
        if local and name in self.unsettled:
            sigma = np.where(self.settled(name), sigma, np.nan)
        if name in self.undecided_rows:
            sigma = np.where(self.undecided_rows[name], np.nan, sigma)
        return sigma


def digest(whole: Any) -> str:
    """Return a digest of data and of all arrays in it."""
    hasher = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, np.ndarray):
            hasher.update(f"{value.dtype} {value.shape}".encode())
            hasher.update(np.ascontiguousarray(value).data)
        elif is_dataclass(value):
            take([getattr(value, part.name) for part in fields(value)])
        elif isinstance(value, Mapping):
            take(sorted(value.items()))
        elif isinstance(value, (list, tuple)):
            hasher.update(f"{len(value)} entries".encode())
            for entry in value:
                take(entry)
        else:
            hasher.update(repr(value).encode())

    take(whole)
    return hasher.hexdigest()


def is_gradient(name: str) -> bool:
    """Return whether a tensor is a gradient."""
    return name.startswith("gradients.")


def is_tap_gradient(name: str) -> bool:
    """Return whether a tensor is the gradient by a tap."""
    return name.startswith("gradients.taps.")


def subject_of(name: str) -> str:
    """Return the tap, parameter or input that a gradient is by; another name as it is."""
    return name.removeprefix("gradients.").removeprefix("taps.")


def root_mean_square(values: Array) -> float:
    """Return the root mean square, 0 of nothing."""
    with np.errstate(all="ignore"):
        # Scaled by the largest element: squares of 1e-200 would vanish, and of 1e200 overflow.
        largest = float(np.max(abs(values), initial=0.0))
        scaled = values / largest if largest > 0 else values
        return largest * float(np.sqrt(np.mean(np.square(scaled)))) if values.size else 0.0
