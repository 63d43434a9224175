"""Requests and expectations of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from concord.backends.interface import Problem
from concord.conformance.judging.estimate import is_half, least_sigma
from concord.conformance.judging.exemptions import (
    GROWN,
    NO_DIGIT,
    NORM,
    NOT_FINITE_BEFORE,
    OUT_OF_RANGE_BEFORE,
)
from concord.spec.arithmetic import Arithmetic
from concord.spec.arrays import Array, Arrays, Ids, Mask, Shape
from concord.spec.batch import Batch, round_inputs, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import NONE, Deviations
from concord.spec.encoder import Observer
from concord.spec.parameters import Weights, trainable, validate_weights
from concord.spec.precision import precision
from concord.spec.reference import observe, used_rows
from concord.spec.tensors import clause_of
from concord.spec.training.trajectory import Training, Trajectory

# End to end, a tap whose sigma exceeds this share of its magnitude is not judged, and neither are later taps.
# So much rounding makes correct runs look wrong. Locally, only outputs need such a limit: no later tensor
# shows their errors.
UNDECIDED = 0.1


# Prefix of a buffer after the run. No submodule can have this name, which is that of a method.
BUFFERS = "buffers."

# A gradient below this share of its sigma is zero apart from the reference's own rounding, and not a lost
# digit.
ZERO = 2.0**-24


@dataclass(frozen=True)
class JudgedProblem(Problem):
    """The request that a run answers, with the rules of its judgement."""

    dtype: str = "float32"  # precision, or mode of MODES, whose rounding is allowed
    deviations: Deviations = field(default_factory=lambda: NONE)  # declared by the backend
    gradients: bool = True  # whether gradients are judged

    @cached_property
    def key(self) -> str:
        """Digest of the content."""
        return digest(self)

    @cached_property
    def rounded(self) -> tuple[Weights, Batch]:
        """Weights and inputs rounded to the precision (SPEC PRC-2)."""
        validate_weights(self.config, self.weights, self.part)
        validate_batch(self.config, self.batch, self.part)
        return round_inputs(self.weights, self.batch, self.dtype)

    @cached_property
    def rows(self) -> dict[str, Ids]:
        """Rows of each table with a gradient, by the gradient's name."""
        return {
            f"gradients.{name}": rows for name, rows in used_rows(self.config, self.batch, self.part).items()
        }

    def observe(self, arithmetic: Arithmetic, observer: Observer, pinned: Pinned | None = None) -> int:
        """Compute from pinned tensors; see :func:`concord.spec.reference.observe`."""
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
            self.deviations,
        )

    def clause(self, name: str) -> str:
        """The clause that defines a tensor."""
        return clause_of(self.config, name, self.part)

    def forget(self) -> None:
        """Free the rounded inputs; recompute them on demand."""
        self.__dict__.pop("rounded", None)


@dataclass(frozen=True)
class JudgedTraining:
    """A requested training; see :class:`JudgedProblem`."""

    config: EncoderConfig
    weights: Weights
    training: Training
    part: str = "model"
    dtype: str = "float32"
    deviations: Deviations = field(default_factory=lambda: NONE)
    # Bounds on the differences from the given weights.
    uncertain: Arrays = field(default_factory=dict)
    rows: ClassVar[dict[str, Ids]] = {}

    @cached_property
    def key(self) -> str:
        """Digest of the content."""
        return digest(self)

    @property
    def elements(self) -> int:
        """Number of elements of all weights."""
        return sum(array.size for array in self.weights.values())

    @property
    def start(self) -> Arrays:
        """Trainable parameters before the first step."""
        return {
            f"parameters.{name}": array
            for name, array in self.weights.items()
            if name in trainable(self.config, self.part)
        }

    def trajectory(self, arithmetic: Arithmetic) -> Trajectory:
        """Training before its first step."""
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
        """The clause that defines a tensor."""
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
    """Tensors of a run that the reference continues from."""

    taps: Arrays  # by name
    gradients: Arrays  # of the loss with respect to taps, by the tap's name

    def without(self, taps: Collection[str]) -> Pinned:
        """Leave out some taps and their gradients."""
        return Pinned(
            *(
                {name: array for name, array in arrays.items() if name not in taps}
                for arrays in (self.taps, self.gradients)
            )
        )


@dataclass(frozen=True)
class Expectation:
    """Values and tolerances for judging a run, locally or end to end.

    Attributes:
        values: taps in order of computation, then gradients in order of the backward pass. Tables' gradients
            have only the rows in ``rows``.
        sigmas: standard deviations of correct results. NaN: undetermined; infinite: the value is not finite,
            even without rounding.
        chained: whether all taps after an undetermined one are undetermined.
        independent: numbers of independent errors in the samples.
        coherent: judge of errors shared by groups of elements.
        ties: correct values of elements that rounding determines.
        norms: activations whose rows are divided by their standard deviation or length.
        occurred: computed operations whose kernels matter.
    """

    dtype: str
    values: Arrays
    sigmas: Arrays
    clauses: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Ids] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
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
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (*self.values.values(), *self.sigmas.values()))

    def whole(self, name: str, sizes: Shape) -> tuple[Array, Array]:
        """Value and sigma in full shape, including zeros."""
        value, sigma = self.values[name], self.sigmas[name]
        if name not in self.rows:
            return value, sigma
        full, sigmas = np.zeros(sizes, value.dtype), np.full(sizes, precision(self.dtype).smallest_normal)
        full[self.rows[name]], sigmas[self.rows[name]] = value, sigma
        return full, sigmas

    @cached_property
    def undecided(self) -> frozenset[str]:
        """The first tap with a relatively large sigma, and all later taps."""
        undecided: set[str] = set()
        # Gradients are always determined: their sigma includes the growth of the forward pass.
        for name in self.values if self.chained else ():
            if is_gradient(name):
                break
            if undecided or self.is_vague(name):
                undecided.add(name)
        return frozenset(undecided)

    def is_vague(self, name: str) -> bool:
        """Whether sigma is relatively large."""
        value, sigma = self.values[name], self.sigmas[name]
        judged = np.isfinite(sigma) & np.isfinite(value)
        most = UNDECIDED * root_mean_square(value[judged])
        return (
            root_mean_square(sigma[judged]) > most
            # What a zero-initialized layer returns is exactly zero.
            and root_mean_square(np.where(self.settled(name), 0, sigma)[judged]) > most
        )

    @cached_property
    def overflowing(self) -> bool:
        """Whether a tap, and therefore every gradient, is out of range."""
        return not all(
            np.isfinite(sigma).all() for name, sigma in self.sigmas.items() if not is_gradient(name)
        )

    @cached_property
    def singular(self) -> frozenset[str]:
        """Gradients after one that is not finite (SPEC NRM-7) or out of range."""
        # Behind a closed ReLU or masked score, a kernel that multiplies by 0 propagates NaN, and one that
        # selects does not. From there on, finiteness does not imply correctness.
        gradients = [name for name in self.values if is_gradient(name)]
        largest = precision(self.dtype).largest
        first = next(
            (place for place, name in enumerate(gradients) if not (abs(self.values[name]) <= largest).all()),
            len(gradients),
        )
        return frozenset(gradients[first + 1 :])

    @cached_property
    def undecided_rows(self) -> dict[str, Mask]:
        """Rows of each norm that lose all digits by rounding, (…, 1)."""
        undecided = {}
        for name in self.norms:
            if name not in self.values:
                continue
            size, noise = (
                np.max(abs(array), axis=-1, keepdims=True) for array in (self.values[name], self.sigmas[name])
            )
            # Negated, so that a NaN sigma counts as undetermined.
            rows = ~(noise <= UNDECIDED * size)
            # A vector that is exactly zero is divided by epsilon, so its rows are determined.
            if name == "normalized":
                rows &= ~((size == 0) & self.settled(name).all(-1, keepdims=True))
            if rows.any():
                undecided[name] = rows
        return undecided

    @cached_property
    def unsettled(self) -> frozenset[str]:
        """Gradients through a row that loses all digits by rounding."""
        # If all entries of a row are nearly equal, its deviation is only rounding. Gradients are divided by
        # it, and such errors have no variance that samples could estimate. A returned tap gradient ends this:
        # the following steps continue from the run's own.
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

    def settled(self, name: str) -> Mask:
        """Noiseless elements, such as those of a gradient behind a closed ReLU."""
        quiet: Mask = self.sigmas[name] <= 2 * least_sigma(self.values[name], self.dtype)
        return quiet

    def silent(self, name: str, local: bool, sound: bool) -> str:
        """Reason why a tensor cannot be judged, if any.

        Args:
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
        # With few bits, a softmax of large scores has one nonzero weight, and its gradient is a difference of
        # equal values: rounding times large weights. Its errors have tails that 16 samples do not reveal.
        if gradient and is_half(self.dtype):
            size, noise = root_mean_square(self.values[name]), root_mean_square(self.sigmas[name])
            if noise * ZERO < size < noise:
                return NO_DIGIT
        return ""

    def determined(self, name: str, local: bool) -> Array:
        """A tensor's sigmas, with NaN for elements that rounding determines."""
        sigma = self.sigmas[name]
        if local and name in self.unsettled:
            sigma = np.where(self.settled(name), sigma, np.nan)
        if name in self.undecided_rows:
            sigma = np.where(self.undecided_rows[name], np.nan, sigma)
        return sigma


def digest(whole: Any) -> str:
    """A digest of data, including arrays."""
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
    """Whether this names a gradient."""
    return name.startswith("gradients.")


def is_buffer(name: str) -> bool:
    """Whether this names a module's buffer after its run."""
    return name.startswith(BUFFERS)


def is_tap_gradient(name: str) -> bool:
    """Whether this names a tap's gradient."""
    return name.startswith("gradients.taps.")


def subject_of(name: str) -> str:
    """Strip the prefixes of a gradient's name."""
    return name.removeprefix("gradients.").removeprefix("taps.")


def root_mean_square(values: Array) -> float:
    """Root mean square; 0 for an empty array."""
    with np.errstate(all="ignore"):
        # Scaled by the largest element, since squares of 1e-200 would underflow, and those of 1e200 overflow.
        largest = float(np.max(abs(values), initial=0.0))
        scaled = values / largest if largest > 0 else values
        return largest * float(np.sqrt(np.mean(np.square(scaled)))) if values.size else 0.0
