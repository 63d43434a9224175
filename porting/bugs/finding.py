"""What is found of a bug of conversion: by reading the folder.

And by judging what the model in it computes against the right one's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from concord.backends.interface import Run
from concord.conformance import judge
from concord.porting.bugs.bug import ConversionBug, Outcome
from concord.porting.checkpoint import Checkpoint
from concord.porting.comparison.beside import alone, differing
from concord.porting.reading import AUTO, read
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch, example_batch
from concord.spec.errors import SpecError
from concord.spec.reference import compute

DTYPE = "float32"

OTHER = 97
"""Seed of the order in which the wrong model sums up, as another framework would."""


@dataclass(frozen=True)
class FoundBug:
    """What is found.

    Attributes:
        outcome: ``refused``, ``named`` or ``harmless``: then nothing is found, whatever the bug is.
        said: the lines that are said.
        first: of what is named, the first tensor that diverges; empty where it is no tensor.
    """

    outcome: Outcome
    said: tuple[str, ...]
    first: str = ""


def find(bug: ConversionBug, folder: Path) -> FoundBug:
    """Put a bug into a checkpoint and look for it.

    What is refused, is so whether its format is recognised or said.

    Args:
        folder: which is there; two are written in it.
    """
    bug.right(folder / "right")
    bug.right(folder / "wrong")
    bug.inject(folder / "wrong")
    said: list[str] = []
    for format in (AUTO, bug.format):
        try:
            wrong = read(folder / "wrong", format)
            wrong.checked()
        except SpecError as error:
            said += error.problems
        else:
            return compared(read(folder / "right"), wrong)
    return FoundBug("refused", tuple(said))


def compared(right: Checkpoint, wrong: Checkpoint) -> FoundBug:
    """Say where a model goes wrong that is read from a folder."""
    if wrong.part != right.part:
        return FoundBug("named", (f"what is there is an {wrong.part}, not a {right.part}",))
    batch = example_batch(right.config, batch=4, seed=5, padding="ragged")
    weights = right.weights()
    verdict = judge(
        right.config, weights, batch, run_of(wrong, batch), right.part, end_to_end=False
    ).explained()
    first = verdict.first_divergence
    if first is None:
        beside = _beside(right, wrong)
        return (
            FoundBug("named", beside)
            if beside
            else FoundBug("harmless", tuple(entry.reason for entry in wrong.ledger if entry.reason))
        )
    return FoundBug("named", (str(verdict.cause.text if verdict.cause else ""), first.note), first.tensor)


def _beside(right: Checkpoint, wrong: Checkpoint) -> tuple[str, ...]:
    """Return what lies beside the weights and is not the same, in lines."""
    apart = differing(right, wrong, ("the right one", "the wrong one"))
    return tuple(
        f"{name}: {words}"
        for name, words in {
            **apart,
            **dict.fromkeys(alone(right, wrong), "only the right one has it"),
        }.items()
    )


def run_of(checkpoint: Checkpoint, batch: Batch) -> Run:
    """Return what a model computes, in rounded arithmetic and another order of sums."""
    truth = compute(
        checkpoint.config,
        checkpoint.weights(),
        batch,
        Arithmetic(DTYPE, shuffle=OTHER),
        False,
        checkpoint.part,
        DTYPE,
    )
    return Run(truth.output, truth.loss, dict(truth.taps), {}, "port", DTYPE, requested=("taps",))
