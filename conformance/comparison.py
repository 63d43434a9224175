"""The verdict on one run: which tensors lie within their allowance, and where it first leaves it."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.interface import Run
from conformance.tolerance import Expectation, expect
from spec.batch import Batch
from spec.config import EncoderConfig
from spec.parameters import Weights
from spec.precision import Precision, precision
from spec.tensors import output_name


@dataclass(frozen=True)
class Row:
    """The judgement of one tensor.

    Attributes:
        tensor: its name.
        clause: the clause of SPEC.md that defines it.
        status: ``"agrees"``, ``"diverges"``, ``"undetermined"`` (the precision does not determine it) or
            ``"undelivered"`` (the backend declares that it has no such tensor).
        ratio: the largest error, in allowances; infinite where it cannot be compared.
        element: where that is.
        actual, expected, allowance: the values there.
        beyond: how many elements lie beyond their allowance.
        size: how many elements there are.
        note: what else is wrong: missing, misshapen, not finite, not of the precision.
    """

    tensor: str
    clause: str
    status: str
    ratio: float = 0.0
    element: tuple[int, ...] = ()
    actual: float = float("nan")
    expected: float = float("nan")
    allowance: float = float("nan")
    beyond: int = 0
    size: int = 0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one run.

    Attributes:
        table: one row for each expected tensor, in the order of computation.
    """

    table: list[Row]

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

    @property
    def worst(self) -> float:
        """The largest error in allowances, over all judged tensors."""
        return max((row.ratio for row in self.table if row.status in ("agrees", "diverges")), default=0.0)

    def row(self, tensor: str) -> Row | None:
        """Return the row of a tensor."""
        return next((row for row in self.table if row.tensor == tensor), None)


Derivation = Callable[[Mapping[str, NDArray[np.floating]]], dict[str, NDArray[np.floating]]]


def judge(
    config: EncoderConfig,
    weights: Weights,
    batch: Batch,
    run: Run,
    part: str = "model",
    expectation: Expectation | None = None,
    derive: Derivation | None = None,
) -> Verdict:
    """Judge a run against the oracle.

    Args:
        config, weights, batch, part: what the run was asked to compute.
        run: what a backend returned. Whatever was requested of it and is missing diverges.
        expectation: what to judge by, if it is at hand; computed from the reference otherwise.
        derive: how the tensors of the run become those that are expected, where they are not the same.
    """
    expectation = expectation or expect(config, weights, batch, part, run.dtype)
    output = output_name(config, part)
    delivered = {**run.taps, **{f"gradients.{name}": array for name, array in run.gradients.items()}}
    if not run.taps:
        delivered |= {"loss": run.loss, output: run.output}
    if derive:
        delivered = derive(delivered)
    undelivered = list(run.info.get("undelivered_taps", []))
    wanted = [name for name in expectation.values if _requested(name, run, output)]
    table = [
        judge_tensor(name, delivered.get(name), expectation, () if name in ("loss", output) else undelivered) for name in wanted
    ]
    return Verdict([_with_result(row, run, output) for row in table])


def _with_result(row: Row, run: Run, output: str) -> Row:
    """Let the tap that is the run's result diverge if the result that was returned is another."""
    result = {output: run.output, "loss": run.loss}.get(row.tensor)
    tap = run.taps.get(row.tensor)
    if result is None or tap is None or row.status == "diverges" or np.array_equal(result, tap, equal_nan=True):
        return row
    what = "output" if row.tensor == output else "loss"
    return dataclasses.replace(row, status="diverges", ratio=float("inf"), beyond=row.size, element=(), note=f"the run's {what} is not its tap of this name")


def _requested(name: str, run: Run, output: str) -> bool:
    if name.startswith("gradients."):
        return "gradients" in run.requested
    return "taps" in run.requested or name in ("loss", output)


def judge_tensor(name: str, actual: NDArray[np.floating] | None, expectation: Expectation, undelivered: Sequence[str] = ()) -> Row:
    """Judge one tensor.

    Args:
        actual: what the backend returned; None if it returned nothing of that name.
        undelivered: patterns of tap names that the backend declares it does not expose.
    """
    value, allowance = expectation.values[name], expectation.allowances[name]
    clause, size = expectation.clauses[name], value.size

    def diverges(note: str) -> Row:
        return Row(name, clause, "diverges", ratio=float("inf"), size=size, beyond=size, note=note)

    if actual is None:
        if not name.startswith("gradients.") and any(fnmatch.fnmatch(name, pattern) for pattern in undelivered):
            return Row(name, clause, "undelivered", size=size, note="declared by the backend")
        return diverges("missing: the backend returned no such tensor")
    if actual.shape != value.shape:
        return diverges(f"has shape {actual.shape} but must be {value.shape}")
    problem = _precision_problem(actual, precision(expectation.dtype))
    if problem:
        return diverges(problem)
    if not (np.isfinite(allowance).all() and np.isfinite(value).all()):
        return Row(name, clause, "undetermined", size=size, note=f"{expectation.dtype} does not determine it: out of range")
    return _compare(name, clause, actual.astype(np.float64), value.astype(np.float64), np.broadcast_to(allowance, value.shape))


def _compare(name: str, clause: str, actual: NDArray[np.float64], value: NDArray[np.float64], allowance: NDArray[np.floating]) -> Row:
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.where(np.isfinite(actual), abs(actual - value) / allowance, np.inf)
    element = np.unravel_index(int(np.argmax(ratios)), ratios.shape)
    ratio, beyond = float(ratios[element]), int((ratios > 1).sum())
    return Row(
        tensor=name,
        clause=clause,
        status="diverges" if beyond else "agrees",
        ratio=ratio,
        element=tuple(int(i) for i in element),
        actual=float(actual[element]),
        expected=float(value[element]),
        allowance=float(allowance[element]),
        beyond=beyond,
        size=value.size,
        note="" if np.isfinite(actual).all() else "not finite",
    )


def _precision_problem(actual: NDArray[np.floating], target: Precision) -> str | None:
    """Say what shows that a tensor was not computed in the precision that was asked for (SPEC PRC-3)."""
    if actual.dtype != target.storage:
        return f"has dtype {actual.dtype} but must be {target.storage} for a {target.name} run"
    if target.storage.itemsize > 4 or target.name == "float32":
        return None
    finite = actual[np.isfinite(actual)]
    if (target.round(finite) != finite).any():
        return f"holds numbers that {target.name} has not: it was computed in a wider precision"
    return None
