"""The verdict on one run: which tensors lie within their allowance, and where it first leaves it."""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backends.interface import Run
from conformance import tolerance
from conformance.causes import Cause
from conformance.diagnosis import Diagnosis, diagnose
from conformance.tolerance import Case, Expectation, Z, rms_limit, root_mean_square
from spec.batch import Batch
from spec.config import EncoderConfig
from spec.deviations import Deviations, declared, in_precision
from spec.parameters import Weights
from spec.precision import Precision, precision
from spec.tensors import output_name

Array = NDArray[np.floating]

NEAR = 0.5
"""Share of an allowance from which on it is derived again from the run's own taps."""

ZERO = 2.0**-24
"""Share of sigma up to which a gradient is zero but for the oracle's own rounding; then rounding is all that there is to judge."""

Z_BINS = tuple(2.0**i for i in range(-8, 9))
"""Edges of the bins in which the errors of a tensor's elements are counted, in sigma."""


@dataclass(frozen=True)
class Judgement:
    """One tensor, judged in one way.

    Attributes:
        status: ``"agrees"``, ``"diverges"``, or ``"undetermined"``: the precision does not determine it, or rounding
            alone may have grown too large on the way to it.
        z: the largest error, in sigma; infinite where it cannot be compared.
        rms: the root mean square error, in root mean square sigma.
        element: where the largest error is.
        actual, expected, sigma: the values there.
        beyond: how many elements err more than :data:`conformance.tolerance.Z` sigma.
        size: how many elements there are.
        spread: how many elements have an error in each bin of :data:`Z_BINS`, and beyond the last.
        note: what else is to be said.
    """

    status: str
    z: float = 0.0
    rms: float = 0.0
    element: tuple[int, ...] = ()
    actual: float = float("nan")
    expected: float = float("nan")
    sigma: float = float("nan")
    beyond: int = 0
    size: int = 0
    spread: tuple[int, ...] = ()
    note: str = ""

    @property
    def ratio(self) -> float:
        """The error in allowances: up to 1 is rounding."""
        return max(self.z / Z, self.rms / rms_limit(self.size))


@dataclass(frozen=True)
class Row:
    """The judgement of one tensor.

    Attributes:
        tensor: its name.
        clause: the clause of SPEC.md that defines it.
        status: ``"agrees"``, ``"diverges"``, ``"undetermined"`` or ``"undelivered"`` (the backend declares that it has
            no such tensor).
        local: the error that was committed at this step: against the reference from the run's own preceding taps. It
            decides. None where a run delivers no taps, or is compared with published tensors.
        end_to_end: the error as it arrives here: against the reference from the inputs. It decides where no other does.
        note: what else is wrong: missing, misshapen, not finite, not of the precision.
        size: how many elements the tensor has.
    """

    tensor: str
    clause: str
    status: str
    local: Judgement | None = None
    end_to_end: Judgement | None = None
    note: str = ""
    size: int = 0

    @property
    def deciding(self) -> Judgement | None:
        """The judgement that decides."""
        return self.local or self.end_to_end

    @property
    def ratio(self) -> float:
        """The error in allowances; infinite where nothing can be compared."""
        if self.deciding is None:
            return float("inf") if self.status == "diverges" else 0.0
        return self.deciding.ratio if self.deciding.status != "undetermined" else 0.0

    @property
    def element(self) -> tuple[int, ...]:
        """Where the largest error is."""
        return self.deciding.element if self.deciding else ()

    @property
    def actual(self) -> float:
        """The run's value there."""
        return self.deciding.actual if self.deciding else float("nan")

    @property
    def expected(self) -> float:
        """The oracle's value there."""
        return self.deciding.expected if self.deciding else float("nan")

    @property
    def allowance(self) -> float:
        """How far the run may lie from it."""
        return Z * self.deciding.sigma if self.deciding else float("nan")

    @property
    def beyond(self) -> int:
        """How many elements lie further off."""
        return self.deciding.beyond if self.deciding else self.size if self.status == "diverges" else 0


@dataclass(frozen=True)
class Verdict:
    """The judgement of one run.

    Attributes:
        table: one row for each expected tensor, in the order of computation.
        search: finds what is known of the first divergence.
        case: what was judged, where each step was.
    """

    table: list[Row]
    search: Callable[[], Diagnosis | None] = field(default=lambda: None, repr=False, compare=False)
    case: Case | None = field(default=None, repr=False, compare=False)

    @property
    def status(self) -> str:
        """``"agrees"``, ``"diverges"``, or ``"undetermined"`` if the precision determines nothing."""
        found = {row.status for row in self.table}
        return "diverges" if "diverges" in found else "agrees" if "agrees" in found else "undetermined"

    @property
    def passed(self) -> bool:
        """Whether no tensor diverges and at least one was judged."""
        return self.status == "agrees"

    @property
    def first_divergence(self) -> Row | None:
        """The first tensor, in the order of computation, that lies beyond its allowance."""
        return next((row for row in self.table if row.status == "diverges"), None)

    @functools.cached_property
    def diagnosis(self) -> Diagnosis | None:
        """What is known of the first divergence (:mod:`conformance.diagnosis`); None where it was not judged locally."""
        return self.search()

    def revise(self, diagnosis: Diagnosis) -> None:
        """Put what all cases together say in place of what this one says by itself."""
        self.__dict__["diagnosis"] = diagnosis

    @property
    def cause(self) -> Cause | None:
        """What explains the first divergence, if anything that is known does (:mod:`conformance.causes`)."""
        return self.diagnosis.cause if self.diagnosis else None

    @property
    def worst(self) -> float:
        """The largest error in allowances, over all judged tensors."""
        return max((row.ratio for row in self.table if row.status in ("agrees", "diverges")), default=0.0)

    @property
    def growth(self) -> list[tuple[str, float]]:
        """For each tap that can be said of: its error as it arrives there, in allowances."""
        judged = ((row.tensor, row.end_to_end) for row in self.table if not row.tensor.startswith("gradients."))
        return [(name, judgement.ratio) for name, judgement in judged if judgement and judgement.status != "undetermined"]

    def row(self, tensor: str) -> Row | None:
        """Return the row of a tensor."""
        return next((row for row in self.table if row.tensor == tensor), None)


Derivation = Callable[[Mapping[str, Array]], dict[str, Array]]

Published = Callable[[Deviations], Expectation]
"""Gives what was published, for a backend that declares deviations."""


def judge(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    run: Run,
    part: str = "model",
    expectation: Published | None = None,
    derive: Derivation | None = None,
    dtype: str | None = None,
    arriving: bool = True,
) -> Verdict:
    """Judge a run against the oracle.

    Args:
        config, weights, batch, part: what the run was asked to compute.
        run: what a backend returned. Whatever was requested of it and is missing diverges. ``run.info`` may declare
            ``deviations`` (:mod:`spec.deviations`) and ``undelivered_taps``.
        expectation: gives tensors to compare with in place of the reference's, end to end.
        derive: how the tensors of the run become those that are expected, where they are not the same.
        dtype: the precision or mode to judge by; by default the run's.
        arriving: whether to judge end to end too where that does not decide; it takes as long as all the rest.

    Raises:
        SpecError: for a deviation that cannot be understood.
    """
    dtype = dtype or run.dtype
    case = Case(config, weights, batch, part, dtype, in_precision(declared(run.info.get("deviations", [])), dtype))
    local = expectation is None and bool(run.taps)
    if expectation is not None:
        wanted = expectation(case.deviations)
    else:
        wanted = tolerance.end_to_end(case) if arriving or not local else tolerance.plain(case)
    return _Judging(case, run, wanted, derive).verdict(local, arriving or not local)


class _Judging:
    """One run before its judge."""

    def __init__(self, case: Case, run: Run, expectation: Expectation, derive: Derivation | None) -> None:
        self.case, self.run, self.expectation = case, run, expectation
        self.output = output_name(case.config, case.part)
        self.delivered = {**run.taps, **{f"gradients.{name}": array for name, array in run.gradients.items()}}
        if not run.taps:
            self.delivered |= {"loss": run.loss, self.output: run.output}
        if derive:
            self.delivered = derive(self.delivered)
        self.undelivered = list(run.info.get("undelivered_taps", []))

    def verdict(self, local: bool, arriving: bool) -> Verdict:
        """Judge every requested tensor, in one way or both."""
        wanted = [name for name in self.expectation.values if self.requested(name)]
        faults = {name: self.fault(name) for name in wanted}
        sound = [name for name in wanted if faults[name] is None]
        committed = self.local(sound) if local else {}
        arrived = {name: self.end_to_end(name) for name in sound} if arriving else {}
        table = [faults[name] or self.row(name, committed.get(name), arrived.get(name)) for name in wanted]
        verdict = Verdict(table, case=self.case if local else None)
        first = verdict.first_divergence
        if not local or first is None or first.local is None:
            return verdict
        statuses = {row.tensor: row.status for row in table}
        return Verdict(table, functools.partial(diagnose, self.case, self.forced(), first.tensor, self.delivered, judge_tensor, statuses), self.case)

    def requested(self, name: str) -> bool:
        if name.startswith("gradients."):
            return "gradients" in self.run.requested
        return "taps" in self.run.requested or name in ("loss", self.output)

    def fault(self, name: str) -> Row | None:
        """Return the row of a tensor whose values cannot be compared, or need not be."""
        actual, value, clause = self.delivered.get(name), self.expectation.values[name], self.expectation.clauses[name]

        def fault(note: str, status: str = "diverges") -> Row:
            return Row(name, clause, status, note=note, size=value.size)

        if actual is None:
            declared_away = not name.startswith("gradients.") and name not in ("loss", self.output)
            if declared_away and any(fnmatch.fnmatch(name, pattern) for pattern in self.undelivered):
                return fault("declared by the backend", "undelivered")
            return fault("missing: the backend returned no such tensor")
        if actual.shape != value.shape:
            return fault(f"has shape {actual.shape} but must be {value.shape}")
        problem = _precision_problem(actual, precision(self.case.dtype))
        if problem:
            return fault(problem)
        result = {self.output: self.run.output, "loss": self.run.loss}.get(name)
        tap = self.run.taps.get(name)
        if result is not None and tap is not None and not np.array_equal(result, tap, equal_nan=True):
            return fault(f"the run's {'output' if name == self.output else 'loss'} is not its tap of this name")
        return None

    def row(self, name: str, local: Judgement | None, end_to_end: Judgement | None) -> Row:
        deciding = local or end_to_end
        assert deciding is not None
        return Row(name, self.expectation.clauses[name], deciding.status, local, end_to_end, deciding.note, deciding.size)

    def end_to_end(self, name: str) -> Judgement:
        gradient = name.startswith("gradients.")
        if gradient and self.overflowing:
            return Judgement("undetermined", size=self.expectation.values[name].size, note="the forward pass is out of range")
        if name in self.undecided:
            return Judgement("undetermined", size=self.expectation.values[name].size, note="rounding may have grown beyond a tenth of it")
        lenient = _behind_a_singularity(name, self.expectation)
        return judge_tensor(self.delivered[name], self.expectation.values[name], self.expectation.sigmas[name], self.case.dtype, not lenient, lenient)

    @functools.cached_property
    def undecided(self) -> set[str]:
        """Taps from the first one on whose sigma is no longer small beside its values. Gradients are always decided."""
        found: set[str] = set()
        for name, value in self.expectation.values.items():
            if name.startswith("gradients."):
                break
            sigma = self.expectation.sigmas[name]
            judged = np.isfinite(sigma) & np.isfinite(value)
            if found or _rms(sigma[judged]) > tolerance.UNDECIDED * _rms(value[judged]):
                found.add(name)
        return found

    @functools.cached_property
    def overflowing(self) -> bool:
        """Whether the precision does not determine all taps: every gradient flows through all of them."""
        return not all(np.isfinite(sigma).all() for name, sigma in self.expectation.sigmas.items() if not name.startswith("gradients."))

    @functools.cached_property
    def half(self) -> bool:
        """Whether the run is in a precision that sums in a wider one."""
        target = precision(self.case.dtype)
        return target.unit_roundoff > target.accumulation

    def forced(self) -> dict[str, Array]:
        """Return the run's taps that others can be recomputed from."""
        names = [name for name, value in tolerance.plain(self.case).values.items() if name in self.run.taps and self.run.taps[name].shape == value.shape]
        return {name: self.run.taps[name].astype(np.float64) for name in names if name != "loss"}

    def local(self, names: Sequence[str]) -> dict[str, Judgement]:
        """Judge tensors by what was committed at each."""
        forced = self.forced()
        sound = all(np.isfinite(tap).all() for tap in forced.values())
        if not self.half:
            expectation = tolerance.local(self.case, forced)
            found = {name: self.committed(name, expectation, sound) for name in names}
            if all(judgement.ratio <= NEAR for judgement in found.values()):
                return found
        expectation = tolerance.local_exactly(self.case, forced)
        return {name: self.committed(name, expectation, sound) for name in names}

    def committed(self, name: str, expectation: Expectation, sound: bool) -> Judgement:
        value = expectation.values[name]
        if name.startswith("gradients.") and not sound:
            return Judgement("undetermined", size=value.size, note="the forward pass is not finite")
        if name.startswith("gradients.") and _rounding_decides_a_norm(expectation):
            return Judgement("undetermined", size=value.size, note="rounding decides a layer norm that it flows through")
        if name.startswith("gradients.") and self.half and _is_noise(value, expectation.sigmas[name]):
            return Judgement("undetermined", size=value.size, note="rounding leaves no digit of it")
        lenient = _behind_a_singularity(name, expectation)
        return judge_tensor(self.delivered[name], value, expectation.sigmas[name], self.case.dtype, sound and not lenient, lenient)


def _rounding_decides_a_norm(expectation: Expectation) -> bool:
    """Return whether some row of a layer norm is a difference of which rounding leaves no digit.

    Where all entries of a row are nearly equal, its deviation is rounding, and gradients are divided by it: their errors
    have no variance that samples could show.
    """
    for name, value in expectation.values.items():
        if "norm" in name.rpartition(".")[2] and not name.startswith("gradients."):
            sigma, size = (np.max(abs(array), axis=-1) for array in (expectation.sigmas[name], value))
            if not (sigma <= tolerance.UNDECIDED * size).all():  # nor is it where sigma is not a number
                return True
    return False


def _is_noise(value: Array, sigma: Array) -> bool:
    """Return whether rounding is larger than a gradient that is not zero in exact arithmetic.

    In few bits a softmax of large scores has but one weight, and what flows back through it is a difference of equal
    numbers: rounding, times weights that are large. Few samples say little of how far that may go.
    """
    size, noise = _rms(value.reshape(-1)), _rms(sigma.reshape(-1))
    return noise * ZERO < size < noise


def _behind_a_singularity(name: str, expectation: Expectation) -> bool:
    """Return whether a gradient was computed after one that is not finite (SPEC NRM-7).

    What is not finite passes a ReLU that is closed, or a masked score, in one framework, which multiplies by 0, and not
    in another, which selects: from there on it is no question of right or wrong whether an element is finite.
    """
    if not name.startswith("gradients."):
        return False
    gradients = itertools.takewhile(lambda other: other != name, (n for n in expectation.values if n.startswith("gradients.")))
    return any(not np.isfinite(expectation.values[other]).all() for other in gradients)


def judge_tensor(actual: Array, value: Array, sigma: Array, dtype: str, strict: bool = True, lenient: bool = False) -> Judgement:
    """Judge one tensor.

    Args:
        actual: what the backend returned, in the shape of ``value``.
        value: what the oracle says.
        sigma: the standard deviation of correct results; where it is not finite the element is undetermined.
        dtype: the precision or mode.
        strict: whether an element that is not finite in the oracle must not be in the backend.
        lenient: whether an element that is finite in the oracle need not be in the backend.
    """
    actual, value = actual.astype(np.float64), np.asarray(value, np.float64)
    finite = np.isfinite(value)
    judged = finite & np.isfinite(sigma) & (np.isfinite(actual) | (not lenient))
    wrongly_finite = ~finite & np.isposinf(sigma) & np.isfinite(actual) & strict
    if not judged.any() and not wrongly_finite.any():
        return Judgement("undetermined", size=value.size, note=f"{dtype} does not determine it: out of range")
    with np.errstate(all="ignore"):
        errors = np.where(judged, abs(actual - value), 0.0)
        scores = np.where(judged, np.where(np.isfinite(actual), errors / sigma, np.inf), np.where(wrongly_finite, np.inf, 0.0))
        rms = _rms(errors[judged]) / _rms(sigma[judged]) if np.isfinite(scores).all() else np.inf
    element = np.unravel_index(int(np.argmax(scores)), scores.shape)
    z, beyond = float(scores[element]), int((scores > Z).sum())
    counted = np.histogram(scores[judged], bins=[0.0, *Z_BINS, np.inf])[0] if judged.any() else [0] * (len(Z_BINS) + 1)
    unjudged = f"{judged.size - judged.sum()} elements are undetermined: out of range" if not judged.all() else ""
    infinite = unjudged if np.isfinite(actual[judged]).all() else "not finite"
    return Judgement(
        status="diverges" if beyond or rms > rms_limit(value.size) else "agrees",
        z=z,
        rms=rms,
        element=tuple(int(i) for i in element),
        actual=float(actual[element]),
        expected=float(value[element]),
        sigma=float(sigma[element]),
        beyond=beyond,
        size=value.size,
        spread=tuple(int(count) for count in counted),
        note="finite where the oracle is not" if wrongly_finite.any() else infinite,
    )


def _rms(values: Array) -> float:
    with np.errstate(all="ignore"):
        return float(root_mean_square(values, 0))


def _precision_problem(actual: Array, target: Precision) -> str | None:
    """Say what shows that a tensor was not computed in the precision that was asked for (SPEC PRC-3)."""
    if actual.dtype != target.storage:
        return f"has dtype {actual.dtype} but must be {target.storage} for a {target.name} run"
    if target.unit_roundoff <= target.accumulation:
        return None
    finite = actual[np.isfinite(actual)]
    if (target.round(finite) != finite).any():
        return f"holds numbers that {target.name} has not: it was computed in a wider precision"
    return None
