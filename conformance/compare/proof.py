"""Proofs that a comparison could fail, and that samples do not depend on their batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from concord.conformance.compare.aten_operations import OperationBug, Watched, injected, sites
from concord.conformance.compare.mechanisms import COUNTED, bugs
from concord.conformance.compare.model_comparison import ModelComparison
from concord.conformance.compare.module_reference import (
    LOG_PROBABILITIES,
    ModelReference,
    ModuleReference,
    is_output,
    numbers,
)
from concord.conformance.judging.expectation import Expectation
from concord.conformance.judging.verdict import Verdict
from concord.conformance.progress import say
from concord.conformance.wording import counted
from concord.spec.errors import SpecError

# For each bug the number of mutants ``tried``, ``found``, and ``silent``: no activation of the whole model
# changes by more than rounding with these inputs.
Proof = Mapping[OperationBug, Counter[str]]


def prove(comparison: ModelComparison) -> Proof:
    """Inject each bug into all operations, the first, and the last.

    A mutant returns the candidate's tensors, and is found if it diverges.
    """
    if not isinstance(comparison.reference, ModuleReference):
        raise SpecError("bugs can be planted only in a torch.nn.Module, and the reference is not one")
    reference = replace(comparison.reference, cotangents=None)
    names = [name for name in comparison.tensors if name in reference.plain]
    *_, end = reference.expect(None)
    proof = defaultdict[OperationBug, Counter[str]](Counter)
    for bug, places in sites(lambda make: reference.watched(Watched(make)), bugs).items():
        if bug.name not in COUNTED:
            continue
        for selection in (places, places[:1], places[-1:]) if len(places) > 1 else [places]:
            say(f"planting {bug.text}")
            try:
                results = reference.watched(Watched(injected(bug, selection, bugs)))
                every = {name: numbers(x) for name, x in results.items() if name in reference.plain}
                tensors = {name: every[name] for name in names if name in every}
                mutant, whole = (
                    ModelComparison(reference, given, allow_same_bits=False) for given in (tensors, every)
                )
            except SpecError:  # the bug does not fit this operation
                continue
            proof[bug]["tried"] += 1
            if mutant.same_bits(names):
                proof[bug]["silent"] += 1
            else:
                found = _diverges(mutant, end)
                proof[bug]["found"] += found
                # If every activation is returned, judging the whole model reveals nothing more.
                proof[bug]["silent"] += not found and (
                    tensors.keys() == every.keys() or not _diverges(whole, end)
                )
    return proof


def _diverges(mutant: ModelComparison, end: Expectation) -> bool:
    return any(mutant.judgement(name, end, False).status == "diverges" for name in mutant.tensors) or any(
        judgement.status == "diverges" for judgement in mutant.judge_steps().values()
    )


def summary(proof: Proof) -> dict[str, str]:
    """Describe found and missed bugs."""
    total = sum(proof.values(), Counter[str]())
    effective = total["tried"] - total["silent"]
    words = {"sensitivity": f"{total['found']} of {effective} bugs planted in the reference would be caught"}
    texts = [(bug.text.removeprefix("a bug: "), counts) for bug, counts in proof.items()]
    missed = [text for text, counts in texts if counts["tried"] > counts["found"] + counts["silent"]]
    if missed:
        words["not found"] = ", ".join(missed)
    if total["silent"]:
        quiet = [text for text, counts in texts if counts["silent"] == counts["tried"]]
        words["no effect beyond rounding with these inputs"] = (
            f"{counted(total['silent'], 'more bug')}{': ' if quiet else ''}{', '.join(quiet)}"
        )
    return words


def batched(reference: ModelReference) -> Iterator[tuple[str, Verdict]]:
    """Judge each sample of a batch against the sample alone, without padding."""
    mask = reference.real if "attention_mask" in reference.kwargs else None
    samples, tokens = (samples_of(reference), 0) if mask is None else mask.shape
    for sample in range(samples):
        real = None if mask is None else torch.nonzero(mask[sample])[:, 0]

        def cut(entry: Tensor, sample: int = sample, real: Tensor | None = real) -> Tensor:
            if not entry.ndim or entry.shape[0] != samples:
                return entry
            entry = entry[sample : sample + 1]
            for axis in range(1, entry.ndim):
                if real is not None and entry.shape[axis] == tokens:
                    entry = entry.index_select(axis, real)
            return entry

        tensors = {name: numbers(cut(tensor)) for name, tensor in reference.values.items()}
        if reference.log_probabilities:  # the first token has none
            every = pad(reference.values[LOG_PROBABILITIES], (1, 0))
            tensors[LOG_PROBABILITIES] = numbers(cut(every)[:, 1:])
        empty = [name for name, array in tensors.items() if not array.size]
        absent = [name for name in reference.declared if is_output(name)] + empty
        alone = replace(reference, **reference.map_inputs(cut), cotangents=None, declared=absent)
        fitting = {
            name: array
            for name, array in tensors.items()
            if name in alone.plain and name not in empty and array.shape == alone.plain[name].shape
        }
        if not fitting:
            raise SpecError("no activation has the same shape alone as in its batch: nothing can be compared")
        verdict = ModelComparison(alone, fitting, allow_same_bits=False).verdict()
        table = [
            row
            if row.tensor in fitting or row.tensor not in tensors
            else replace(row, note=f"{row.tensor!r} has a different shape alone than in its batch")
            for row in verdict.table
        ]
        padding = "" if real is None else f", {len(real)} of {tokens} tokens"
        yield f"sample {sample}{padding}", replace(verdict, table=table)


def samples_of(reference: ModelReference) -> int:
    """Number of samples."""
    sizes = {name: len(array) for name, array in reference.inputs.items() if array.ndim}
    if len({*sizes.values()}) != 1:
        raise SpecError(
            f"the first axis of all inputs must have the same length, but the lengths are {sizes}"
        )
    return next(iter(sizes.values()))
