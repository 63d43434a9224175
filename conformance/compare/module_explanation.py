"""Explanation of a module's divergence."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from concord.conformance.compare import ROWS
from concord.conformance.compare.activation_names import apart
from concord.conformance.compare.blind import blind, places
from concord.conformance.compare.causes import StretchComputation, cause
from concord.conformance.compare.differences import Difference, differences
from concord.conformance.compare.kernel_names import kernels
from concord.conformance.compare.kernels import KERNELS, TF32
from concord.conformance.compare.module_reference import (
    HALF,
    ModelError,
    ModuleReference,
    dtype_name,
    numbers,
    spread,
)
from concord.conformance.compare.stretch import opened
from concord.conformance.explain.description import wrong_elements
from concord.conformance.explain.family_explanation import elsewhere
from concord.conformance.explain.search import Effort, one_thread
from concord.conformance.judging.expectation import is_buffer, is_gradient
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.verdict import MERGED, Row, Verdict
from concord.conformance.progress import say
from concord.spec.deviations import UNCOMPUTED_PADDING
from concord.spec.errors import SpecError
from concord.spec.text import first_of

if TYPE_CHECKING:
    from concord.conformance.compare.model_comparison import ModelComparison

# CPU seconds for the search, and for what follows it: matching operations, precisions and kernels.
LONGEST, LATER = 40.0, 10.0

# Maximum number of listed module differences.
FEW_TOLD = 3

# Two runs in one half precision share the rounding of weights and inputs: their distance is at most this
# share of that to a run in float32.
NEARER = 0.7

# Note on an output of a separate run, if the hooked run's activations agree.
APART = "no activation diverges with hooks: the error occurs only without them, as when steps are fused"


@one_thread()
def explain(comparison: ModelComparison, verdict: Verdict) -> Explanation:
    """Explain the first divergence."""
    first, reference = verdict.first_divergence, comparison.reference
    assert first is not None
    end, effort, undeclared = first.tensor, Effort(LONGEST), ""
    explanation: Explanation | None = None
    say(f"looking for the cause of {end}, at most {LONGEST:.0f} s of CPU time")
    # Gradients are computed backwards, so their stretch begins at the outputs.
    beginning = "the outputs" if is_gradient(end) else "the inputs"
    agreeing = [
        row.tensor
        for row in verdict.table[: list(comparison.plain).index(end)]
        if row.status == "agrees" and is_gradient(row.tensor) == is_gradient(end)
    ]
    start = f"`{agreeing[-1]}`" if agreeing else beginning
    notes = [APART if end in comparison.whole else f"the error begins in the code from {start} to `{end}`"]
    if comparison.theirs and not is_gradient(end):
        with effort.attempt("naming the kernels"):
            notes += kernels(comparison.theirs, comparison.own.get(end, end), agreeing)
    if later := comparison.held_by(end):
        wrong = (row.tensor for row in verdict.table if row.status == "diverges")
        names = [f"{name} = {held}" for name in wrong if (held := comparison.held_by(name))]
        notes.append(f"merged layers; give their names with names={{…}} or --names: {first_of(names, 5)}")
        text = f"`{end}` holds the values of `{later}`"
        return Explanation(end, hypothesis=MERGED, text=text, notes=tuple(notes))
    with effort.attempt("the search for a cause"):
        if not is_gradient(end):
            divergence: StretchComputation | None = None
            right = comparison.stretch(end, effort.check)
            if right:
                start = first_of([f"`{name}`" for name in right.starts[::-1]] or [beginning], 3)
                notes[0] = f"the error begins in the code from {start} to `{end}`"
                if is_buffer(end) and not right.steps:
                    notes.pop(0)  # a fused kernel updates it, whose operations are not visible
                notes += [f"the reference computes it at {right.lines}"] if right.lines else []
                if end in comparison.local_expected:
                    actual, dtype = (
                        comparison.tensors[end].astype(np.float64),
                        reference.activations[end].dtype,
                    )
                    divergence = StretchComputation(right, actual, dtype, comparison.local_expected[end])
            undeclared = find_declaration(comparison, divergence, effort, notes)
            if divergence and not undeclared:
                explanation = find_cause(comparison, divergence, effort, notes)
    # A kernel's tolerance hides small bugs, so any other exact cause has priority.
    if not explanation and not undeclared:
        with effort.attempt("trying half precisions"):
            explanation = explain_by_precision(comparison, first, effort)
    exact = explanation.hypothesis if explanation else ""
    if (not exact or "tf32" in exact) and not undeclared:
        with effort.attempt("trying kernels"):
            by_kernel, switch = explain_by_kernel(comparison, first, bool(exact), effort)
            explanation, notes = by_kernel or explanation, [*switch, *notes]
    statuses = {row.tensor: row.status for row in verdict.table if row.tensor not in comparison.whole}
    notes += [*effort.notes, *elsewhere(end, statuses)]
    return replace(explanation or Explanation(end), notes=tuple(notes), undeclared=undeclared)


def explain_by_precision(comparison: ModelComparison, row: Row, effort: Effort) -> Explanation | None:
    """The half precision that explains arrays, whose dtype says nothing about their arithmetic."""
    reference = comparison.reference
    if comparison.theirs or not isinstance(reference, ModuleReference) or reference.precision != "float32":
        return None
    for dtype in HALF:
        lower, actual = reference.cast(dtype), comparison.tensors[row.tensor].astype(np.float64)
        try:
            own, other = (apart(run.arrays[row.tensor], actual) for run in (lower, reference))
        except ModelError:  # its code contains a dtype, so it does not run in another one
            return None
        # The tolerance of a half precision hides small bugs, but these are not nearer to a run in it.
        nearer = own <= NEARER * other
        if not nearer:
            continue
        judgements = comparison.judged_by(lower, row.local is not None, effort.check)
        if judgements[row.tensor].status == "agrees":
            name = dtype_name(dtype)
            text = f"`{row.tensor}` may be explained by arithmetic in {name}"
            return Explanation(row.tensor, hypothesis=f"computed_in_{name}", text=text)
    return None


def explain_by_kernel(
    comparison: ModelComparison, row: Row, is_exact: bool, effort: Effort
) -> tuple[Explanation | None, tuple[str, ...]]:
    """The kernel that explains a tensor, and its switch."""
    candidate = comparison.theirs
    if candidate and candidate.in_host_memory:  # cuDNN has not run
        return None, ()
    assert row.deciding is not None
    for key, kernel in KERNELS.items():
        # TF32 allows thousands of times the error of float32, which hides most bugs: without a device, only a
        # search that reproduces its factors shows it.
        is_shown = is_exact or key != TF32
        if not (kernel.switch and (is_shown or candidate)):
            continue
        if comparison.by_kernel(key, {row.tensor: row.deciding}, row.local is not None, effort.check):
            # The device that computed arrays is unknown.
            is_sure = is_exact or (is_shown and candidate is not None)
            text = f"`{row.tensor}` {'is' if is_sure else 'may be'} explained by {kernel.text}"
            cause = Explanation(row.tensor, hypothesis=key, text=text, confident=is_sure)
            return cause, (f"to switch it off: {kernel.switch}; if it is intended, declare `{key}`",)
    return None, ()


def find_declaration(
    comparison: ModelComparison, divergence: StretchComputation | None, effort: Effort, notes: list[str]
) -> str:
    """The declaration that would suffice, if any."""
    # Each declaration costs a judgement, so declarations that the wrong rows exclude are not tried.
    names, reference = list(ROWS), comparison.reference
    if divergence:
        with contextlib.suppress(SpecError):
            padded, wrong = ~reference.real.cpu().numpy(), wrong_elements(divergence)
            padding = spread(padded, divergence.actual.shape)
            if padding is None or (wrong & ~padding).any():
                names.remove(UNCOMPUTED_PADDING)
            elif wrong.shape[:2] == padded.shape:
                there = places(np.asarray(wrong.reshape(*padded.shape, -1).any(-1)))
                notes.append(f"only padding rows are wrong: {there}")
        declaration, *note = blind(divergence) or ("",)
        names = [name for name in names if name in (UNCOMPUTED_PADDING, declaration)]
        notes += note
    for name in () if {*ROWS} & {*reference.declared} else names:
        effort.check()
        with contextlib.suppress(SpecError):
            if comparison.would_agree(name, effort.check):
                return name
    return ""


def find_cause(
    comparison: ModelComparison, divergence: StretchComputation, effort: Effort, notes: list[str]
) -> Explanation | None:
    """Return the cause; append other observations to the notes."""
    right, theirs = divergence.stretch, comparison.theirs
    differing = list[Difference]()
    if theirs is not None:
        all_differences = differences(right.module.model, theirs.model, comparison.path)
        differing = [difference for difference in all_differences if difference.within(right.active)]
    explanation = cause(divergence, comparison.unmatched, differing, effort)
    effort.seconds += LATER
    if explanation and explanation.confident and explanation.hypothesis == "modules_differ":
        return explanation
    texts = [
        difference.text
        for difference in differing
        if not (explanation and difference.text in explanation.text)
    ]
    notes += [f"the two modules differ there: {text}" for text in texts[:FEW_TOLD]]
    if theirs is None:
        return explanation
    with effort.attempt("matching operations"):  # a cause that was found is kept
        stretch = comparison.their_stretch(theirs, right.end, effort.check)
        if stretch.result is None:  # the candidate leaves this buffer unchanged
            return explanation
        versions = np.stack([numbers(stretch.result), divergence.actual, divergence.right.value])
        eagerly, actual, value = versions[:, np.isfinite(versions).all(0)]  # exact values never overflow
        if apart(eagerly, actual) <= apart(value, actual) / 2:
            notes += opened(right, stretch)
        elif is_buffer(right.end) and theirs.cotangents is not None:  # a checkpoint runs steps again
            notes.append("without a backward pass, the candidate does not diverge here")
        else:  # compiled code has no visible operations
            notes.append("run eagerly, the candidate does not diverge here: its compiler causes the error")
    return explanation
