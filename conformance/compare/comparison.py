"""Whether a candidate computes what a PyTorch module computes: the module itself is the specification.

The reference runs in float64 values and in Monte Carlo arithmetic (:mod:`~.arithmetic`), which gives the
truth of every tensor and how far a correct run may lie from it, with the constants of the family
(:mod:`concord.conformance.estimate`). Each activation is judged end to end, and locally: computed from the
candidate's own activations before it, so that an error is charged to the stretch in which it was made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from concord.conformance.compare import ROWS
from concord.conformance.compare.arithmetic import FOREIGN
from concord.conformance.compare.blind import blind, places
from concord.conformance.compare.causes import StretchComputation, cause
from concord.conformance.compare.coherent import Coherent
from concord.conformance.compare.decisions import Ties, mostly
from concord.conformance.compare.differences import Difference, differences
from concord.conformance.compare.draws import constants
from concord.conformance.compare.kernels import FAST_CONVOLUTION, KERNELS
from concord.conformance.compare.names import apart, proposed
from concord.conformance.compare.reference import (
    OUTPUT,
    ModuleReference,
    Reference,
    dtype_name,
    is_output,
    nothing,
    numbers,
)
from concord.conformance.compare.stretch import Stretch, opened
from concord.conformance.estimate import SAMPLES, Estimate, Observer, Z
from concord.conformance.expectation import GROWN, Expectation, is_gradient
from concord.conformance.explain import Cause, Diagnosis
from concord.conformance.explain.computation import Prediction
from concord.conformance.explain.description import wrong_elements
from concord.conformance.explain.diagnosis import elsewhere
from concord.conformance.explain.search import Effort
from concord.conformance.judging import NEAR, PADDING
from concord.conformance.scoring import OUT_OF_RANGE, finite_alone, judge_tensor
from concord.conformance.verdict import ABSENT, CONSTANT, NO_ELEMENT, NOT_EXPOSED, Judgement, Row, Verdict
from concord.spec.arrays import Array
from concord.spec.deviations import UNCOMPUTED_PADDING
from concord.spec.errors import SpecError, refuse
from concord.spec.text import first_of

LONGEST = 40.0
"""Seconds of the processor that everything may take that is looked for after the verdict."""

FEW_TOLD = 3
"""So many differences of two modules are told."""

FEW = 6
"""Samples of a first look, which may only say that all is well."""

APART = (
    "no activation diverges in the run that shows them: "
    "what is wrong here, the program has only where nothing takes it apart, as where steps are fused"
)
"""What is said of an output that a run of its own gives, where the activations of another agree."""

SAME_BITS = "the same bits as the reference's own run"


class ModelComparison:
    """One candidate's run before its reference.

    Args:
        reference: what is right.
        given: what a candidate computed: activations by the reference's names, ``gradients.<name>`` of
            parameters and ``gradients.taps.<name>`` of activations.
        progress: called with what is being done.
        again: whether a run with the same bits as the reference's own is right without more ado.
        whole: names of what comes from a run of its own, and does not follow from activations here.
        theirs: the candidate, if it is a module.
        own: its own names of activations, by the reference's.
        notes: what is to be said of its run, by what it is about.
        unsteady: why its run says nothing, even if it agrees; empty: it says something.
        check: called with each activation that is computed; it raises what ends the judging.

    Raises:
        SpecError: for tensors of other shapes than the reference's.
    """

    def __init__(
        self,
        reference: Reference,
        given: Mapping[str, Array],
        progress: Callable[[str], None] = lambda text: None,
        again: bool = True,
        whole: Collection[str] = (),
        theirs: ModuleReference | None = None,
        own: Mapping[str, str] | None = None,
        notes: Mapping[str, str] | None = None,
        unsteady: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.reference, self.progress, self.again, self.check = reference, progress, again, check
        self.theirs, self.own, self.plain = theirs, own or {}, reference.plain
        self.ran, self.unsteady = dict(notes or {}), unsteady
        self.dtypes = {name: dtype_name(tensor.dtype) for name, tensor in self.plain.items()}
        known = {name: array for name, array in given.items() if name in self.plain}
        shapes = {name: tuple(self.plain[name].shape) for name in known}
        self.misshapen = {
            name: f"{name!r} has shape {array.shape} but must be {shapes[name]}"
            for name, array in known.items()
            if array.shape != shapes[name]
        }
        outputs = [words for name, words in self.misshapen.items() if is_output(name)]
        refuse(outputs or [*self.misshapen.values()] * (len(self.misshapen) == len(known)))
        self.given = {name: array for name, array in known.items() if name not in self.misshapen}
        self.strange = {name: array for name, array in given.items() if name not in self.plain}
        alone = self.given.keys() <= {*whole}  # then there is nothing else to follow from
        self.whole = frozenset[str]() if alone else frozenset(whole)
        self.foreign: set[str] = set()
        self.occurred: set[str] = set()
        self.wrong: dict[str, Prediction] = {}  # of what diverges locally
        self.padding = ~reference.real.numpy() if UNCOMPUTED_PADDING in reference.declared else None

    def in_padding(self, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return which elements of an activation stand in rows of padding that are not computed."""
        return None if self.padding is None else spread(self.padding, shape)

    def expected(self, pinned: bool) -> Iterator[Expectation]:
        """Yield what a correct run yields, and how far it may lie from it: at a first look, then for good.

        Args:
            pinned: whether each stretch starts from the candidate's own activations.
        """
        reference, truth = self.reference, self.reference.exact()
        compute = functools.partial(reference.compute, pin=self.pin if pinned else nothing)
        where = "each stretch" if pinned else "end to end"
        self.progress(f"{where}: exact values")
        coherent = Coherent(self.dtypes if pinned else {})

        def observed(arithmetic: Any, observer: Observer) -> None:
            def take(name: str, array: Array) -> None:
                observer(name, array)
                coherent.take(arithmetic, name, array)

            compute(arithmetic, take)

        found = Estimate(observed, self.dtypes, truth=truth)
        self.foreign.update(truth.foreign)
        self.occurred.update(getattr(truth, "occurred", ()))
        for seeds in (range(FEW), range(FEW, SAMPLES)):
            self.progress(f"{where}: {seeds.stop} samples of Monte Carlo arithmetic")
            found.take_up(reference.runs(seeds, truth), f"deriving tolerances, {where}")
            for arithmetic in [] if seeds.start or not coherent.halves else reference.others(truth):
                compute(arithmetic, functools.partial(coherent.take, arithmetic))
            independent = found.independent()
            sigmas = found.sigmas(last=seeds.stop == SAMPLES)
            branches = reference.branches(truth)
            if branches and seeds.stop < SAMPLES:
                continue  # with more samples more decisions may be open
            ties = {name: Ties(value, sigmas[name]) for name, value in found.values.items()}
            for place, branch in enumerate(branches):
                self.progress(f"{where}: decisions of rounding, {place + 1} of {len(branches)}")
                _take(ties, compute, branch)
            for name, why in reference.lost(truth).items():
                ties[name].lost = why
            ties = {name: tie for name, tie in ties.items() if tie.why}
            clauses = dict.fromkeys(sigmas, "")
            yield Expectation(
                self.dtype,
                found.values,
                sigmas,
                clauses,
                independent=independent,
                ties=ties,
                coherent=coherent,
            )

    def pin(self, name: str) -> Array | None:
        """Return a tensor of the candidate as the reference goes on with it; None if it has none."""
        self.check()
        array = self.given.get(name)
        if array is None or (padding := self.in_padding(array.shape)) is None:
            return array
        return np.where(padding, numbers(self.plain[name]), array)

    @property
    def dtype(self) -> str:
        """The precision of the outputs."""
        return next((dtype for name, dtype in self.dtypes.items() if is_output(name)), "float32")

    @property
    def notes(self) -> dict[str, str]:
        """What is to be said besides the verdict, by what it is about."""
        found = dict(self.ran)
        if isinstance(self.reference, ModuleReference) and (apart := self.reference.quantized):
            worst = max(apart, key=apart.__getitem__)
            found["weights of 8 bits"] = (
                f"the reference has the {len(apart)} that the candidate keeps so; "
                f"{worst} lies farthest off the given one, by {apart[worst]:.2%} of its size"
            )
        if self.strange:
            found["not compared"] = (
                f"{first_of([*self.strange], 3)}: the reference has no activation of that name"
            )
        if self.misshapen:
            found["left out"] = first_of([*self.misshapen.values()], 3, "; ")
        for run in (self.reference, self.theirs):
            if isinstance(run, ModuleReference) and run.state:
                found[f"state of {run.role}"] = (
                    f"its forward pass changes {first_of(run.state, 5)}: each run starts from what was given"
                )
        if self.lines:
            found["names proposed by what they hold"] = first_of(self.lines, 5)
        if self.foreign:
            found["operations without a rule"] = (
                f"{', '.join(sorted(self.foreign))}: {FOREIGN} unit roundoffs of each result are allowed for"
            )
        return found

    @functools.cached_property
    def proposed(self) -> dict[str, str]:
        """Names for the candidate's tensors that have none of the reference's, by what they hold."""
        left = {name: numbers(tensor) for name, tensor in self.plain.items() if name not in self.given}
        return proposed(self.strange, left)

    @property
    def lines(self) -> list[str]:
        """The same as lines of a file of names."""
        return [f"{own} = {theirs}" for own, theirs in self.proposed.items()]

    def verdict(self) -> Verdict:
        """Judge every tensor, locally and end to end.

        Raises:
            SpecError: if the candidate has no activation by a name of the reference's.
        """
        if all(map(is_gradient, self.given)):
            near = first_of(self.lines, 3)
            raise SpecError(
                "the candidate has no activation by a name of the reference's; give names by a mapping"
                + (f", such as {near}" if near else "")
            )
        if self.again and self.same_bits():
            local, whole = {name: self.same(array) for name, array in self.given.items()}, {}
        else:
            local, whole = self.judged(True), self.judged(False)
        table = []
        blind = next((name for name in self.plain if name in local and is_blind(local[name])), "")
        for name, tensor in self.plain.items():
            step, end = local.get(name), whole.get(name)
            deciding = step or end
            status, note = (
                (deciding.status, deciding.note)
                if deciding
                else ("not exposed", self.misshapen.get(name, ABSENT if name in self.absent else NOT_EXPOSED))
            )
            if status == "undetermined":
                note = self.void(name) or note
            elif status == "agrees" and blind and step and is_output(name) and not agrees(end):
                # It was computed from the candidate's own, of which nothing is known.
                status, note = "undetermined", f"so is {blind} before it: {local[blind].note}"
            elif status == "agrees" and self.unsteady:
                status, note = "undetermined", self.unsteady
            elif status == "agrees" and name in self.constants:
                note = CONSTANT
            table.append(Row(name, "", status, step, end, note, tensor.numel()))
        outputs = (name for name in self.plain if is_output(name) and name not in self.absent)
        found = Verdict(table, outputs=tuple(outputs), notes=self.run_notes(table))
        if found.status != "diverges":
            return found
        return dataclasses.replace(found, search=lambda: self.searched(found))

    @property
    def absent(self) -> list[str]:
        """Outputs that the candidate is declared not to have: some by name, or all."""
        outputs = [name for name in self.plain if is_output(name)]
        return [name for name in outputs if {name, OUTPUT} & {*self.reference.declared}]

    @functools.cached_property
    def constants(self) -> set[str]:
        """Activations that depend on no input; asked for only where not all outputs have to be judged."""
        return constants(self.reference) if self.absent else set()

    @functools.cached_property
    def unhooked(self) -> Mapping[str, Tensor]:
        """What the reference's own program returns without hooks, if some tensors of a candidate come so."""
        if not (self.whole and isinstance(self.reference, ModuleReference)):
            return {}
        return self.reference.watched(hooked=False)

    def void(self, name: str) -> str:
        """Return why nothing in a tensor of the reference could be judged; empty if something could."""
        if not self.plain[name].numel():
            return "it has no elements"
        if bool(self.plain[name].isfinite().any()):
            return ""
        if not all(np.isfinite(array).all() for array in self.reference.inputs.values()):
            return "the inputs are not finite, nor is it in the reference"
        first = next(other for other, tensor in self.plain.items() if not bool(tensor.isfinite().all()))
        return f"it is not finite in the reference, where {first} is the first that is not"

    def same(self, array: Array) -> Judgement:
        """Return the judgement of a tensor that has the reference's bits."""
        status = "agrees" if np.isfinite(array).any() else "undetermined"
        return Judgement(status, size=array.size, note=SAME_BITS)

    def run_notes(self, table: Iterable[Row]) -> tuple[str, ...]:
        """Say which kernels computed what agrees, as far as they err by more than their operations."""
        fast = f"computed by {KERNELS[FAST_CONVOLUTION].text}"
        names = [row.tensor for row in table if row.note == fast]
        declared = [KERNELS[name] for name in KERNELS if name in self.reference.declared]
        return (
            *([f"{first_of(names, 3)}: {fast}"] if names else []),
            *(f"declared: {kernel.text}" for kernel in declared),
        )

    def kernel(self, row: Row) -> tuple[Cause | None, tuple[str, ...]]:
        """Return which kernel explains a tensor that diverges, and how it is avoided."""
        device = next((p.device.type for p in self.theirs.model.parameters()), "cpu") if self.theirs else ""
        if device == "cpu":  # cuDNN has not run
            return None, ()
        assert row.deciding is not None
        for key, kernel in KERNELS.items():
            if kernel.switch and self.by_kernel(key, {row.tensor: row.deciding}, row.local is not None):
                cause = Cause(key, f"`{row.tensor}` is explained by {kernel.text}", confident=True)
                return cause, (f"avoided by {kernel.switch}; if it is meant, declare `{key}`",)
        return None, ()

    def undeclared(self, end: str, stretch: Stretch | None, effort: Effort, notes: list[str]) -> str:
        """Return the declaration with which the forward pass would agree; empty if there is none.

        Note which rows see no key, if they alone are wrong.
        """
        names = list(ROWS)
        if stretch and end in self.wrong:
            asked = self.asked(end)
            with contextlib.suppress(SpecError):
                padded, wrong = ~self.reference.real.numpy(), wrong_elements(asked)
                padding = spread(padded, asked.actual.shape)
                if padding is None or (wrong & ~padding).any():
                    names.remove(UNCOMPUTED_PADDING)
                elif wrong.shape[:2] == padded.shape:
                    there = places(np.asarray(wrong.reshape(*padded.shape, -1).any(-1)))
                    notes.append(f"only rows of padding are wrong, in samples (positions) {there}")
            rows = blind(stretch, asked)
            names = [
                name for name in names if name == UNCOMPUTED_PADDING or (rows and name == rows.declaration)
            ]
            notes += [rows.note] if rows else []
        given = {name: array for name, array in self.given.items() if not is_gradient(name)}
        for name in () if {*ROWS} & {*self.reference.declared} else names:
            effort.check()
            with contextlib.suppress(SpecError):
                forward = dataclasses.replace(self.reference, cotangents=None, declared=[name, *self.absent])
                other = ModelComparison(forward, given, whole=self.whole, check=effort.check)
                judged = {**(other.judged(False) if self.whole else {}), **other.judged(True)}
                if all(one.status != "diverges" for one in judged.values()):
                    return name
        return ""

    def asked(self, end: str) -> StretchComputation:
        """Return what is asked of a tensor that diverges."""
        return StretchComputation(end, self.given[end].astype(np.float64), self.dtypes[end], self.wrong[end])

    def same_bits(self, names: Iterable[str] | None = None) -> bool:
        """Whether the candidate is the reference's own run, bit for bit, in all tensors or in some."""
        return all(
            name in self.given and np.array_equal(numbers(self.plain[name]), self.given[name], equal_nan=True)
            for name in (self.plain if names is None else names)
        )

    def judged(self, pinned: bool) -> dict[str, Judgement]:
        """Judge in one way: by a first look if that is enough."""
        for expected in self.expected(pinned):
            found = {
                name: self.judgement(name, expected, pinned)
                for name in self.given
                if name in expected.values and not (pinned and name in self.whole)
            }
            if all(one.ratio <= NEAR and one.status == "agrees" for one in found.values()):
                break
        found |= self.by_kernel(FAST_CONVOLUTION, found, pinned)
        if pinned:
            self.wrong = {
                name: Prediction(expected.values[name], expected.sigmas[name])
                for name, one in found.items()
                if one.status == "diverges" and not one.note.startswith(NO_ELEMENT)
            }
        return found

    def by_kernel(self, kernel: str, judged: Mapping[str, Judgement], pinned: bool) -> dict[str, Judgement]:
        """Judge what diverges as a kernel may have computed it; return what agrees so."""
        wrong = {name: one.ratio for name, one in judged.items() if one.status == "diverges"}
        known = isinstance(self.reference, ModuleReference) and kernel not in self.reference.declared
        if not wrong or not known or self.occurred.isdisjoint(KERNELS[kernel].concerns):
            return {}
        reference = dataclasses.replace(self.reference, declared=[*self.reference.declared, kernel])
        again = ModelComparison(reference, self.given, whole=self.whole).judged(pinned)
        # Other draws alone may bring what lies at its limit below it.
        return {
            name: dataclasses.replace(again[name], note=f"computed by {KERNELS[kernel].text}")
            for name, ratio in wrong.items()
            if again[name].status == "agrees" and again[name].ratio < ratio / 2
        }

    def judgement(self, name: str, expected: Expectation, pinned: bool) -> Judgement:
        """Judge one tensor."""
        value, sigma = expected.values[name], expected.sigmas[name]
        if not pinned and name in expected.undecided:
            return Judgement("undetermined", size=value.size, note=GROWN)
        padding, why = self.in_padding(value.shape), OUT_OF_RANGE
        actual = self.given[name].astype(np.float64)
        if name in expected.ties:
            (value, sigma), why = expected.ties[name].settle(actual), expected.ties[name].why
        if not pinned and name in self.unhooked and self.unhooked[name].shape == value.shape:
            # A fast path, such as one that returns zeros for padding, is the reference's own program too.
            other = numbers(self.unhooked[name]).astype(np.float64)
            another = abs(other - value) > Z * sigma
            value = np.where(another & (abs(actual - other) < abs(actual - value)), other, value)
        if padding is not None:
            sigma, why = np.where(padding, np.nan, sigma), PADDING
        if name in expected.singular:
            sigma = finite_alone(sigma, value, actual)
        judged = judge_tensor(actual, value, sigma, self.dtypes[name], why, expected.independent[name])
        if judged.status == "agrees" and name in expected.ties and mostly(np.isnan(sigma), value):
            return Judgement("undetermined", size=value.size, note=judged.note)
        if judged.status == "agrees":
            return expected.coherent.judge(name, actual - value, sigma, judged)
        return judged

    # What is said of the first divergence.

    def searched(self, verdict: Verdict) -> tuple[Diagnosis, str]:
        """Say in which stretch of the module the first divergence was made, and where that is written.

        Say why too, or which declaration is missing. All of it has one budget.
        """
        first = verdict.first_divergence
        assert first is not None
        end, effort, undeclared, notes = first.tensor, Effort(LONGEST), "", list[str]()
        why: Cause | None = None
        before = verdict.table[: list(self.plain).index(end)]
        agreeing = [
            row.tensor
            for row in before
            if row.status == "agrees" and is_gradient(row.tensor) == is_gradient(end)
        ]
        start = agreeing[-1] if agreeing else ""
        beginning = "the outputs" if is_gradient(end) else "the inputs"
        notes.append(APART if end in self.whole else f"made between {start or beginning} and {end}")
        by_kernel, switch = self.kernel(first)
        if by_kernel:
            return Diagnosis(end, ("",), by_kernel, notes=(*switch, *notes)), ""
        with effort.attempt("the search for a cause"):
            if not is_gradient(end):
                right = None
                if isinstance(self.reference, ModuleReference) and end not in self.whole:
                    forward = dataclasses.replace(self.reference, cotangents=None)
                    right = Stretch(forward, end, self.given, self.pin, effort.check)
                    notes[-1] = f"made between {first_of(right.starts[::-1] or [beginning], 3)} and {end}"
                    notes += [f"computed by {right.lines}"] if right.lines else []
                undeclared = self.undeclared(end, right, effort, notes)
                if right and end in self.wrong and not undeclared:
                    why = self.explained(right, effort, notes)
        wrong = {row.tensor: row.status for row in verdict.table if row.tensor not in self.whole}
        return Diagnosis(end, ("",), why, notes=(*notes, *effort.notes, *elsewhere(end, wrong))), undeclared

    def explained(self, right: Stretch, effort: Effort, notes: list[str]) -> Cause | None:
        """Return what explains the end of a stretch; add what else is seen of it to the notes."""
        end, asked = right.end, self.asked(right.end)
        differing = list[Difference]()
        if self.theirs is not None:
            found = differences(right.module.model, self.theirs.model, self.path)
            differing = [one for one in found if one.within(right.active)]
        why = cause(right, asked, self.strange, differing, effort)
        if not (why and why.confident and why.hypothesis == "modules_differ"):
            told = [one.text for one in differing if not (why and one.text in why.text)]
            notes += [f"the two modules differ there: {text}" for text in told[:FEW_TOLD]]
            if self.theirs is not None:
                eager = dataclasses.replace(self.theirs, cotangents=None, compiled=False)
                known = [self.own[name] for name in self.given if name in self.own]
                theirs = Stretch(eager, self.own[end], known, check=effort.check)
                eagerly, actual, value = map(
                    np.nan_to_num, (numbers(theirs.result), asked.actual, asked.right.value)
                )
                if apart(eagerly, actual) <= apart(value, actual) / 2:
                    notes += opened(right, theirs)
                else:  # what a compiler made of it has no operations that could be seen
                    notes.append("run eagerly the candidate does not diverge here: its compiler made this")
        return why

    def path(self, own: str) -> str:
        """Return the candidate's path of a submodule of the reference."""
        if own in self.own:
            return self.own[own]
        parent, dot, name = own.rpartition(".")
        return f"{self.path(parent)}{dot}{name}" if dot else own


def spread(rows: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return which elements of an activation stand in some tokens; None if its axes do not say it.

    Args:
        rows: the tokens, (B, T).
        shape: (B, T, ...), of heads (B, H, T, ...), or of all tokens in a row (B * T, ...).
    """
    samples, tokens = rows.shape
    if shape[:2] == rows.shape:
        laid = rows.reshape(samples, tokens, *[1] * (len(shape) - 2))
    elif len(shape) == 4 and (shape[0], shape[2]) == rows.shape:
        laid = rows[:, None, :, None]
    elif shape[:1] == (samples * tokens,):
        laid = rows.reshape(-1, *[1] * (len(shape) - 1))
    else:
        return None
    return np.broadcast_to(laid, shape)


def agrees(judged: Judgement | None) -> bool:
    """Return whether a tensor was judged, and agrees."""
    return judged is not None and judged.status == "agrees"


def is_blind(judged: Judgement) -> bool:
    """Return whether rounding decides a whole tensor, so that a wrong one may hide in it."""
    return judged.status == "undetermined" and judged.note.startswith("rounding")


def _take(ties: Mapping[str, Ties], compute: Callable[..., None], branch: Any) -> None:
    """Take up what a branch gives."""
    left = {**ties}

    def take(name: str, array: Array) -> None:
        left.pop(name, None)
        ties[name].take(branch.decisions, array)

    try:
        compute(branch, take)
    except Exception:  # noqa: BLE001 – the model itself may refuse what a branch holds, such as NaN
        for tie in left.values():
            tie.take(branch.decisions, np.full(tie.value.shape, np.nan))
