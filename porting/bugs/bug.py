"""What a bug of conversion is: a name, and what it makes of a checkpoint's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord import spec
from concord.backends.interface import Run
from concord.conformance.judging import Misfit, judge
from concord.porting.checkpoint import Checkpoint, from_weights
from concord.porting.comparison import compare
from concord.porting.folder import LENGTHS, PROMPTS
from concord.porting.reading import read
from concord.porting.recognition import AUTO
from concord.porting.registry import known
from concord.porting.writing import write
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import example_batch
from concord.spec.errors import SpecError
from concord.spec.reference import compute

Outcome = Literal["refused", "named", "harmless"]
"""What must come of it: it is not read, and why is said; it is read, and where it goes wrong is said; nothing
is wrong, and nobody is alarmed."""

Array = NDArray[Any]

Arrays = dict[str, Any]

Edit = Callable[..., None]
"""Changes a checkpoint's folder; given it, its format, and constants."""

SIZES: Mapping[str, int] = {
    "vocab_size": 29,
    "d_model": 14,
    "num_heads": 2,
    "d_ff": 17,
    "num_classes": 3,
    "num_layers": 2,
    "max_positions": 13,
}
"""Of the checkpoint that a bug is put into: a prime, or twice a prime, for each axis, so that only what is
square looks like its transpose."""

SEED = 3

LABELS = ("no", "maybe", "yes")

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "", *(f"t{number}" for number in range(5, SIZES["vocab_size"])))

CARRIED: Mapping[str, bytes] = {
    "vocab.txt": "\n".join((*TOKENS, "")).encode(),
    "tokenizer.json": b'{"version": "1.0", "normalizer": {"type": "BertNormalizer", "lowercase": true}}',
    "tokenizer_config.json": b'{"do_lower_case": true, "model_max_length": 13}',
    LENGTHS: b'{"max_seq_length": 13, "do_lower_case": false}',
    PROMPTS: b'{"__version__": {"pytorch": "2.13.0"}, "prompts": {"query": "t5"}, '
    b'"default_prompt_name": "query"}',
}
"""What lies beside the weights, as far as a format has it there."""


@dataclass(frozen=True, kw_only=True)
class ConversionBug:
    """A thing that goes wrong, or only seems to, where a checkpoint is converted.

    ``bugs.toml`` explains each field; ``edits`` make the right folder into the wrong one.
    """

    name: str
    group: str
    what: str
    clause: str
    edits: Sequence[Edit]
    expected: Outcome
    says: str = ""
    first: str = ""
    format: str = "hugging-face"
    sizes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def right(self, folder: Path) -> None:
        """Write the right checkpoint, a BERT with random weights in float32."""
        model = spec.variant("bert", **{**SIZES, **self.sizes})
        weights = {
            name: array.astype(np.float32) for name, array in spec.initialize(model, seed=SEED).items()
        }
        write(
            dataclasses.replace(from_weights(model, weights, files=CARRIED), labels=LABELS),
            folder,
            self.format,
        )


DTYPE = "float32"


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
    for edit in bug.edits:
        edit(folder / "wrong", known(bug.format))
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
    # In rounded arithmetic and another order of sums, as another framework would.
    arithmetic = Arithmetic(DTYPE, shuffle=97)
    truth = compute(wrong.config, wrong.weights(), batch, arithmetic, False, wrong.part, DTYPE)
    run = Run(truth.output, truth.loss, dict(truth.taps), {}, "port", DTYPE, requested=("taps",))
    try:
        verdict = judge(right.config, right.weights(), batch, run, right.part, end_to_end=False).explained()
    except Misfit as error:
        return FoundBug("named", tuple(error.problems))
    if first := verdict.first_divergence:
        cause = verdict.cause.text if verdict.cause else ""
        return FoundBug("named", (cause, first.note), first.tensor)
    found = compare(right, wrong, sides=("the right one", "the wrong one"))
    beside = {**found.files, **dict.fromkeys(found.alone[0], "only the right one has it")}
    if beside:
        return FoundBug("named", tuple(f"{name}: {words}" for name, words in beside.items()))
    return FoundBug("harmless", tuple(entry.reason for entry in wrong.ledger if entry.reason))
