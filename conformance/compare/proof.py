"""Whether a comparison could have failed, and whether a sample depends on what it is batched with."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from concord.conformance.compare.activations import numbers, observe
from concord.conformance.compare.comparison import ModelComparison
from concord.conformance.compare.edits import BUGS, UNFIT, Injected, Mutant, Sites
from concord.conformance.compare.reference import ModuleReference, Reference
from concord.conformance.verdict import Verdict
from concord.spec.errors import SpecError

MOST = 2
"""Operations into each of which a bug is put, besides all that can have it at once."""


@dataclass(frozen=True)
class Proof:
    """What came of one bug that was put into the reference.

    Attributes:
        bug: its name.
        text: what it is.
        tried: how many mutants were made of it.
        found: how many of them the comparison would have found.
        silent: how many compute the same, bit for bit, with these inputs.
    """

    bug: str
    text: str
    tried: int = 0
    found: int = 0
    silent: int = 0


def prove(comparison: ModelComparison, progress: Callable[[str], None] = lambda text: None) -> list[Proof]:
    """Put each bug into a copy of the reference, and say which the comparison would have found.

    A mutant delivers what the candidate delivered. It is found if it diverges end to end, or locally.
    """
    if not isinstance(comparison.reference, ModuleReference):
        raise SpecError("bugs are put into a torch.nn.Module, and the reference is none")
    reference = replace(comparison.reference, gradients=False)
    plain = ModelComparison(reference, reference.plain.arrays(), comparison.declared)
    given = [name for name in comparison.given if name in plain.plain]
    *_, end = plain.expected(False)
    sites, proofs = Sites(), []
    with Mutant(sites), contextlib.suppress(*UNFIT):
        observe(reference.model, reference.args, reference.kwargs)
    for bug in BUGS:
        count, came = sites.found[bug], Counter[str]()
        places = [None, *np.linspace(0, count - 1, min(MOST, count), dtype=int).tolist()]
        for place in places if count > 1 else places[:count]:
            progress(f"would {bug.text} be found?")
            try:
                with Mutant(Injected(bug, place)):
                    made = observe(reference.model, reference.args, reference.kwargs).arrays()
            except UNFIT:  # the bug does not fit this operation
                continue
            plain.given = {name: made[name] for name in given if name in made}
            came["tried"] += 1
            if plain.same_bits(given):
                came["silent"] += 1
            else:
                came["found"] += any(
                    plain.judgement(name, end, False).status == "diverges" for name in plain.given
                ) or any(one.status == "diverges" for one in plain.judged(True).values())
        proofs += [Proof(bug.name, bug.text, **came)] if came else []
    return proofs


def said(proofs: Sequence[Proof]) -> dict[str, str]:
    """Say which bugs the comparison would have found, and which it would not."""
    tried, silent = sum(one.tried for one in proofs), sum(one.silent for one in proofs)
    found = sum(one.found for one in proofs)
    missed = [one.text for one in proofs if one.tried > one.found + one.silent]
    words = {
        "could it have failed?": f"it would have found {found} of {tried - silent} bugs in the reference"
    }
    if missed:
        words["not found"] = ", ".join(missed)
    if silent:
        quiet = [one.text for one in proofs if one.silent == one.tried]
        words["no effect with these inputs"] = f"{silent} more{': ' if quiet else ''}{', '.join(quiet)}"
    return words


def batched(reference: Reference) -> Iterator[tuple[str, Verdict]]:
    """Judge each sample of a batch by the same sample alone, without its padding.

    Yields:
        What is judged, in words, and the verdict.

    Raises:
        SpecError: if no input ``attention_mask`` (B, T), 1 where a token is real, says where padding is.
    """
    samples, tokens = reference.real.shape
    for sample in range(samples):
        real = torch.nonzero(reference.real[sample])[:, 0]

        def cut(entry: Any, sample: int = sample, real: Tensor = real) -> Any:
            """Return one sample's share of a tensor, without its padding."""
            if not isinstance(entry, Tensor) or not entry.ndim or entry.shape[0] != samples:
                return entry
            entry = entry[sample : sample + 1]
            for axis in range(1, entry.ndim):
                entry = entry.index_select(axis, real) if entry.shape[axis] == tokens else entry
            return entry

        args, kwargs = reference.given(cut)
        alone = replace(reference, args=args, kwargs=kwargs, gradients=False)
        found = {name: numbers(cut(tensor)) for name, tensor in reference.plain.values.items()}
        fitting = {
            name: array
            for name, array in found.items()
            if name in alone.plain.values and array.shape == alone.plain.values[name].shape
        }
        verdict = ModelComparison(alone, fitting, again=False).verdict()
        yield f"sample {sample}, {len(real)} of {tokens} tokens", verdict
