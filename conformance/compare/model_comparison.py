"""Judgement of a candidate's tensors against a PyTorch module or NumPy model.

Local judgement assigns an error to the stretch between two submodules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from concord.backends import heaps
from concord.backends.wire import WorkerFailure
from concord.conformance.compare.activation_names import apart, proposed
from concord.conformance.compare.aten_arithmetic import FOREIGN
from concord.conformance.compare.aten_operations import Tensors
from concord.conformance.compare.draws import constants
from concord.conformance.compare.kernels import FAST_CONVOLUTION, KERNELS
from concord.conformance.compare.module_explanation import explain
from concord.conformance.compare.module_reference import ModelReference, ModuleReference, is_output, numbers
from concord.conformance.compare.stretch import Check, Stretch
from concord.conformance.compare.untested import untested
from concord.conformance.explain.computation import Prediction
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.exemptions import CONSTANT, GROWN, is_decided_by_rounding
from concord.conformance.judging.expectation import (
    BUFFERS,
    ZERO,
    Expectation,
    is_buffer,
    is_gradient,
    root_mean_square,
)
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.judge import Judge, Judgements
from concord.conformance.judging.protocol import Pin
from concord.conformance.judging.scoring import judge_tensor
from concord.conformance.judging.verdict import NO_ELEMENT, Judgement, Row, Verdict
from concord.conformance.wording import counted
from concord.spec.arrays import Array, Arrays
from concord.spec.errors import SpecError
from concord.spec.text import first_of

# In half precision, two runs of one activation are this many times nearer than two activations.
MUCH = 30

SAME_BITS = "the same bits as the reference's own run"

# Integers up to here are exact in float64.
COUNTABLE = 2.0**53

UNCOUNTED = "it holds integers beyond 2**53, which float64 rounds"


class ModelComparison(Judge):
    """One candidate's run and its reference.

    Args:
        given: the candidate's tensors by the reference's names.
        allow_same_bits: whether equal bits suffice for agreement.
        theirs: the candidate, if it is a module.
        own: the candidate's names by the reference's.
        unsteady: why agreement would prove nothing, or empty.
        call: runs the candidate once, for timing.
    """

    reference: ModelReference

    def __init__(
        self,
        reference: ModelReference,
        given: Arrays,
        allow_same_bits: bool = True,
        whole: Collection[str] = (),
        theirs: ModuleReference | None = None,
        own: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
        unsteady: str = "",
        check: Check = lambda: None,
        call: Callable[[], Any] | None = None,
    ) -> None:
        self.allow_same_bits, self.check, self.plain = allow_same_bits, check, reference.plain
        self.theirs, self.own, self.call = theirs, own or {}, call
        self.ran, self.unsteady = dict(notes or {}), unsteady
        matches = {name: array for name, array in given.items() if name in self.plain}
        self.misshapen = {
            name: f"{name!r} has shape {array.shape} but must be {shape}"
            for name, array in matches.items()
            if array.shape != (shape := tuple(self.plain[name].shape))
        }
        # An output with a different shape is refused. An activation is skipped, since a port may use a
        # different layout; if none fits, all are refused.
        outputs = [words for name, words in self.misshapen.items() if is_output(name)]
        if problems := outputs or [*self.misshapen.values()] * (len(self.misshapen) == len(matches)):
            raise WorkerFailure("broken", "; ".join(problems))
        self.unmatched = {
            name: array
            for name, array in given.items()
            # Of a module's buffers, only those that the reference changes are compared.
            if name not in self.plain and not (theirs and is_buffer(name))
        }
        tensors = {name: array for name, array in matches.items() if name not in self.misshapen}
        alone = tensors.keys() <= {*whole}  # then there are no other activations
        self.ops_without_rule: set[str] = set()
        self.occurred: set[str] = set()
        self.accuracy: list[str] = []  # exact errors of the worst output
        self.own_faults: dict[str, float] = {}  # ratios of the reference's own divergent tensors
        self.local_expected: dict[str, Prediction] = {}  # tensors that diverge locally
        super().__init__(reference, tensors, () if alone else whole)

    def unjudgeable(self, name: str) -> tuple[str, str] | None:
        """As in the base class; misshapen tensors are not exposed."""
        if name in self.misshapen:
            return "not exposed", self.misshapen[name]
        return super().unjudgeable(name)

    def pin(self, name: str) -> Array | None:
        """The candidate's tensor, if any."""
        self.check()
        return super().pin(name)

    @property
    def notes(self) -> dict[str, str]:
        """Remarks by topic."""
        notes = dict(self.ran)
        if isinstance(self.reference, ModuleReference) and (apart := self.reference.quantized):
            worst = max(apart, key=apart.__getitem__)
            notes["8-bit weights"] = (
                f"the reference uses the {counted(len(apart), 'weight')} that the candidate stores in 8 "
                f"bits; {worst} differs most from the original, by {apart[worst]:.2%} of its norm"
            )
        if self.unmatched:
            notes["not compared"] = f"{first_of([*self.unmatched], 3)}: no such activation in the reference"
        if self.misshapen:
            notes["left out"] = first_of([*self.misshapen.values()], 3, "; ")
        own_names = [self.own.get(name, name) for name in self.tensors]
        for run, names in ((self.reference, self.tensors), (self.theirs, own_names)):
            if isinstance(run, ModuleReference) and run.state:
                unjudged = [name for name in run.state if f"{BUFFERS}{name}" not in names]
                notes[f"state of {run.role}"] = (
                    f"its forward pass changes {first_of(run.state, 5)}: each run starts from the original "
                    f"state{f'; not judged: {first_of(unjudged, 5)}' if unjudged else ''}"
                )
        if self.lines:
            notes["proposed names, from similar values; save them with --names FILE"] = first_of(
                self.lines, 5
            )
        if self.ops_without_rule:
            notes["operations that Concord has no rule for"] = (
                f"{', '.join(sorted(self.ops_without_rule))}: the tolerance allows {FOREIGN} unit roundoffs "
                "for each"
            )
        return notes

    @cached_property
    def proposed(self) -> dict[str, str]:
        """Names proposed for unmatched tensors."""
        rest = {name: numbers(tensor) for name, tensor in self.plain.items() if name not in self.tensors}
        return proposed(self.unmatched, rest)

    def held_by(self, name: str) -> str:
        """The later activation whose values a tensor holds, as when a norm is folded into a convolution."""
        if name not in self.tensors or is_gradient(name) or is_output(name) or is_buffer(name):
            return ""
        order, array = list(self.plain), self.tensors[name]
        distances = {
            other: apart(array, numbers(self.plain[other]))
            for other in order[order.index(name) :]
            if other == name or (other not in self.tensors and self.plain[other].shape == array.shape)
        }
        nearest = min(distances, key=distances.__getitem__)
        return nearest if distances[nearest] < distances[name] / MUCH else ""

    @property
    def lines(self) -> list[str]:
        """Proposed names as lines of a file."""
        return [f"{own} = {theirs}" for own, theirs in self.proposed.items()]

    @np.errstate(all="ignore")  # infinities and NaN are compared as values
    def verdict(self, several: bool = False) -> Verdict:
        """Judge every tensor, locally and end to end.

        Args:
            several: whether this is one of several candidates: exact errors are noted unless it agrees.

        Raises:
            SpecError: if no activation shares a name with the reference.
        """
        if all(map(is_gradient, self.tensors)):
            near = first_of(self.lines, 3)
            raise SpecError(
                "no activation of the candidate shares a name with the reference; give a mapping of names"
                + (f", such as {near}" if near else "")
            )
        with heaps.reused(sum(array.nbytes for array in self.tensors.values())):
            table = self.table()
        first = next((row for row in table if row.local and is_decided_by_rounding(row.local.note)), None)
        table = [self.with_exemptions(row, first) for row in table]
        outputs = (name for name in self.plain if is_output(name) and name not in self.reference.absent)
        verdict = Verdict(table, outputs=tuple(outputs), notes=self.run_notes(table))
        if not (several and verdict.passed):
            verdict = replace(verdict, notes=(*verdict.notes, *self.accuracy))
        if verdict.passed and isinstance(self.reference, ModuleReference):
            with contextlib.suppress(SpecError):
                hidden = untested(self.reference, self.theirs, self.path)
                verdict = replace(verdict, notes=(*verdict.notes, *hidden))
        if verdict.status != "diverges":
            return verdict
        if verdict.first in self.own_faults:
            raise SpecError(
                f"{verdict.first} of the reference itself differs from its exact value by "
                f"{self.own_faults[verdict.first]:.3g} tolerances: the reference's code may depend on the "
                "types or addresses of tensors, which differ in exact arithmetic"
            )
        return replace(verdict, judge=self)

    def find_own_faults(
        self, judgements: Mapping[str, Judgement], expected: Expectation
    ) -> Iterator[tuple[str, float]]:
        """Yield tensors whose exact value differs from the reference's own, unlike the candidate's."""
        # Code may ask for the type or the address of a tensor, which differ in exact arithmetic. On a GPU,
        # TF32 has the same effect, but its explanation names the switch.
        reference = self.reference
        if not (isinstance(reference, ModuleReference) and reference.in_host_memory):
            return
        for name, judgement in judgements.items():
            if judgement.status != "diverges" or name in self.broken:
                continue
            own = numbers(self.plain[name])
            value, sigma, why = self.settle(name, expected, own, False)
            judged = judge_tensor(own, value, sigma, reference.activations[name].dtype, why)
            apart, astray = (
                np.fmax.reduce(abs(other - own), axis=None) for other in (self.tensors[name], value)
            )
            if judged.status == "diverges" and apart <= astray / 2:
                yield name, judged.ratio

    @np.errstate(all="ignore")
    def explain(self, verdict: Verdict) -> Explanation:
        """Explain the first divergence."""
        return explain(self, verdict)

    def judgement(
        self, name: str, expected: Expectation, local: bool, sound: bool = True, deciding: bool = True
    ) -> Judgement:
        """Judge one tensor; an output of which rounding determines a tenth does not agree."""
        judgement = super().judgement(name, expected, local, sound, deciding)
        # Of a small difference of equal values, such as a divergence of two distributions, any multiple
        # agreed. A difference that is exactly zero is determined.
        if local and judgement.status == "agrees" and is_output(name) and expected.is_vague(name):
            size, noise = map(root_mean_square, (expected.values[name], expected.sigmas[name]))
            if not size < noise * ZERO:
                return Judgement("undetermined", size=judgement.size, note=GROWN)
        return judgement

    def with_exemptions(self, row: Row, first: Row | None) -> Row:
        """Add the reason why a row is undetermined, or its agreement proves nothing."""
        if row.status == "undetermined":
            return replace(row, note=self.void(row.tensor) or row.note)
        if row.status != "agrees":
            return row
        note = self.unsteady or UNCOUNTED * self.is_beyond_counting(row.tensor)
        by_steps = row.local and not (row.end_to_end and row.end_to_end.status == "agrees")
        if first and by_steps and is_output(row.tensor):
            # It was computed from an undetermined activation.
            note = f"it depends on {first.tensor}, which is undetermined: {first.local and first.local.note}"
        if note:
            return replace(row, status="undetermined", note=note)
        return replace(row, note=CONSTANT) if row.tensor in self.constants else row

    def is_beyond_counting(self, name: str) -> bool:
        """Whether a tensor holds integers that float64 may have rounded."""
        tensor = self.plain[name]
        return tensor.dtype == torch.float64 and bool((tensor.abs() >= COUNTABLE).any())

    @cached_property
    def constants(self) -> set[str]:
        """Activations independent of the inputs."""
        # Needed only if some outputs are absent, because it costs a run.
        return constants(self.reference) if self.reference.absent else set()

    @cached_property
    def unhooked(self) -> Tensors:
        """The reference's results without hooks, if needed."""
        if not (self.whole and isinstance(self.reference, ModuleReference)):
            return {}
        return self.reference.watched(hooked=False)

    def void(self, name: str) -> str:
        """Reason why a whole tensor cannot be judged."""
        if not self.plain[name].numel():
            return "it has no elements"
        if bool(self.plain[name].isfinite().any()):
            return ""
        if not all(np.isfinite(array).all() for array in self.reference.inputs.values()):
            return "the inputs are not finite, and neither is the reference's value"
        first = next(other for other, tensor in self.plain.items() if not bool(tensor.isfinite().all()))
        return f"it is not finite in the reference, where {first} is the first such tensor"

    def same(self, array: Array) -> Judgement:
        """Judge a tensor that has the same bits as the reference."""
        status = "agrees" if np.isfinite(array).any() else "undetermined"
        return Judgement(status, size=array.size, note=SAME_BITS)

    def run_notes(self, table: Iterable[Row]) -> tuple[str, ...]:
        """List special kernels."""
        fast = f"computed by {KERNELS[FAST_CONVOLUTION].text}"
        names = [row.tensor for row in table if row.note == fast]
        return (
            *([f"{first_of(names, 3)}: {fast}"] if names else []),
            *(f"declared: {KERNELS[name].text}" for name in KERNELS if name in self.reference.declared),
        )

    def same_bits(self, names: Iterable[str] | None = None) -> bool:
        """Whether tensors have the reference's bits."""
        return all(
            name in self.tensors
            and np.array_equal(numbers(self.plain[name]), self.tensors[name], equal_nan=True)
            for name in (self.plain if names is None else names)
        )

    @cached_property
    def is_same(self) -> bool:
        """Whether equal bits suffice."""
        return self.allow_same_bits and self.same_bits()

    def judge_steps(self) -> Judgements:
        """Judge locally, unless equal bits suffice."""
        if self.is_same:
            return {name: self.same(array) for name, array in self.tensors.items()}
        return super().judge_steps()

    def judge_whole(self, deciding: bool = False) -> Judgements:
        """Judge end to end, unless equal bits suffice."""
        return {} if self.is_same else super().judge_whole(deciding)

    def look(
        self, pin: Pin | None, names: Collection[str], deciding: bool = True
    ) -> tuple[Judgements, Expectation]:
        """Judge, allowing for fast convolutions."""
        judgements, expected = super().look(pin, names, deciding)
        self.ops_without_rule.update(expected.without_rule)
        self.occurred.update(expected.occurred)
        if pin is None:
            self.accuracy = self.errors_against(expected)
            self.own_faults = dict(self.find_own_faults(judgements, expected))
        judgements |= self.by_kernel(FAST_CONVOLUTION, judgements, pin is not None, self.check)
        # Other pins come from passed_by, which tests whether the model skips an activation.
        if pin == self.pin:
            self.local_expected = {
                name: Prediction(expected.values[name], expected.sigmas[name])
                for name, judgement in judgements.items()
                if judgement.status == "diverges" and not judgement.note.startswith(NO_ELEMENT)
            }
        return judgements, expected

    def errors_against(self, expected: Expectation) -> list[str]:
        """Describe exact errors of the output in which both differ most, if any."""
        # PyTorch's maintainers use them to distinguish rounding from a bug.
        descriptions = []
        for name in self.judged:
            if not is_output(name) or name not in expected.values:
                continue
            decided = np.isfinite(expected.values[name])  # elsewhere there is no expectation
            error, own = (
                abs(run - expected.values[name])[decided].max(initial=0.0)
                for run in (self.tensors[name], numbers(self.plain[name]))
            )
            # The reference's error may be 0, and the candidate's value may be NaN.
            ratio = np.nan_to_num(error / max(own, np.finfo(float).tiny), nan=np.inf)
            words = f"candidate {error:.2g}, the reference itself {own:.2g}"
            descriptions.append((ratio, f"largest error of {name} against exact values: {words}"))
        return [words for _, words in sorted(descriptions)[-1:]]

    def by_kernel(
        self, kernel: str, judged: Mapping[str, Judgement], pinned: bool, check: Check
    ) -> Judgements:
        """Tensors that agree within a kernel's errors."""
        wrong = {
            name: judgement.ratio for name, judgement in judged.items() if judgement.status == "diverges"
        }
        is_undeclared = isinstance(self.reference, ModuleReference) and kernel not in self.reference.declared
        # The estimate already includes a declared kernel.
        if not wrong or not is_undeclared or self.occurred.isdisjoint(KERNELS[kernel].concerns):
            return {}
        reference = replace(self.reference, declared=[*self.reference.declared, kernel])
        judgements = self.judged_by(reference, pinned, check)
        # New random draws may already move a tensor at its limit below it, so the kernel must halve the
        # error.
        return {
            name: replace(judgements[name], note=f"computed by {KERNELS[kernel].text}")
            for name, ratio in wrong.items()
            if judgements[name].status == "agrees" and judgements[name].ratio < ratio / 2
        }

    def judged_by(self, reference: ModelReference, local: bool, check: Check) -> Judgements:
        """Judge by another reference."""
        comparison = ModelComparison(
            reference, self.tensors, allow_same_bits=False, whole=self.whole, check=check
        )
        return comparison.judge_steps() if local else comparison.judge_whole()

    def settle(
        self, name: str, expected: Expectation, actual: Array, local: bool
    ) -> tuple[Array, Array, str]:
        """Use the unhooked value where nearer."""
        value, sigma, why = super().settle(name, expected, actual, local)
        if not local and name in self.unhooked and self.unhooked[name].shape == value.shape:
            # A fast path, such as one that returns zeros for padding, also belongs to the reference.
            other = numbers(self.unhooked[name]).astype(np.float64)
            another = abs(other - value) > Z * sigma
            value = np.where(another & (abs(actual - other) < abs(actual - value)), other, value)
        return value, sigma, why

    def stretch(self, end: str, check: Check = lambda: None) -> Stretch | None:
        """The reference's forward operations that lead to a tensor, if they are visible."""
        reference = self.reference
        if is_gradient(end) or end in self.whole or not isinstance(reference, ModuleReference):
            return None
        forward = replace(reference.on_host(), cotangents=None)
        return Stretch(forward, end, self.tensors, self.pin, check)

    def their_stretch(self, theirs: ModuleReference, end: str, check: Check = lambda: None) -> Stretch:
        """The same operations of the candidate, run eagerly."""
        eager = replace(theirs, cotangents=None, compiled=False)
        starts = [self.own[name] for name in self.tensors if name in self.own]
        return Stretch(eager, self.own[end], starts, check=check)

    def would_agree(self, declaration: str, check: Check) -> bool:
        """Whether a declaration would suffice for the forward pass."""
        declared = [declaration, *self.reference.absent]
        forward = replace(self.reference, cotangents=None, declared=declared)
        ends = self.judged_by(forward, False, check) if self.whole else {}
        judged = {**ends, **self.judged_by(forward, True, check)}
        return all(judgement.status != "diverges" for judgement in judged.values())

    def path(self, own: str) -> str:
        """The candidate's path of a submodule."""
        if own in self.own:
            return self.own[own]
        parent, dot, name = own.rpartition(".")
        return f"{self.path(parent)}{dot}{name}" if dot else own
