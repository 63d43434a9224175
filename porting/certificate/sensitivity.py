"""Proof that a certificate could have failed: tensors are changed one after the other.

And it has to notice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance import tolerance
from concord.conformance.expectation import Expectation, JudgedProblem
from concord.conformance.scoring import judge_tensor
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    PROVEN,
    UNVERIFIED,
    Item,
    Placement,
    Sensitivity,
    Tried,
)
from concord.porting.certificate.changes import CHANGES, Alteration, changes
from concord.porting.certificate.evidence import JudgedModel
from concord.porting.checkpoint import Checkpoint
from concord.porting.stored import Bits, digest, widened
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch, from_arrays
from concord.spec.reference import observe, reference
from concord.spec.tensors import POOLED, output_name

WORK = 2e12
"""Multiplications and additions that the outputs of changed models may take together: of a larger model a
sample is run."""

AT_LEAST = 16
"""Changes whose outputs are computed, however large the model."""

IN_TOKENS = {"input_ids": 2, "segment_ids": 2, "cotangent": 3}
"""Inputs whose second axis is the tokens, where they have so many axes."""

ROWS = 2
"""Samples of the batch on which they are."""


def prove(
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    model: JudgedModel,
    batch: Batch,
    case: str,
    seed: int,
    tell: Callable[[str], None],
) -> Sensitivity:
    """Change each tensor in each way, and say which changes are noticed: by the comparison of bits.

    And by the judge of the outputs.

    Args:
        checkpoint: the source, which stands for a target that is right.
        placements: how its parameters lie.
        model: the same, for the oracle.
        batch: whose first rows the outputs are computed on, the first of which has no padding but where the
            model needs it.
        tell: takes what is being done, in words.
    """
    batch = _few(model, batch)
    gradients = reference(model.config, model.weights, batch, True, model.part).gradients
    made = list(changes(model.config, model.part, checkpoint.tensors, batch, gradients))
    outputs = _Outputs(model, batch)
    chosen = set(random.Random(seed).sample(range(len(made)), min(len(made), outputs.affordable())))
    tried = {kind: Tried(kind, 0, 0, 0, 0, 0, 0) for kind in CHANGES}
    reasons: Counter[str] = Counter()
    for number, change in enumerate(made):
        shown = outputs if number in chosen else None
        _try(change, tried[change.kind], checkpoint, placements, shown, reasons)
        if (number + 1) * 10 // len(made) > number * 10 // len(made):
            tell(f"{number + 1} of {len(made)} changes")
    return Sensitivity(
        tuple(one for one in tried.values() if one.made),
        dict(reasons),
        seed,
        f"the first {len(next(iter(batch.arrays().values())))} rows of {case}, float64",
    )


def _few(model: JudgedModel, batch: Batch) -> Batch:
    """Return the first rows of a batch, without the columns in which they all are padding."""
    arrays = {name: array[:ROWS] for name, array in batch.arrays().items()}
    if "input_ids" not in arrays or (model.part in POOLED and model.config.pooling == "flatten"):
        return from_arrays(arrays)
    width = int(np.flatnonzero((arrays["input_ids"] != model.config.pad_id).any(0)).max(initial=0)) + 1
    return from_arrays(
        {
            name: array[:, :width] if name in IN_TOKENS and array.ndim == IN_TOKENS[name] else array
            for name, array in arrays.items()
        }
    )


def _try(
    change: Alteration,
    count: Tried,
    checkpoint: Checkpoint,
    placements: Mapping[str, Placement],
    outputs: _Outputs | None,
    reasons: Counter[str],
) -> None:
    """Make a change, and count who notices."""
    bits = change.bits()
    count.made += 1
    if all(digest(array) == digest(checkpoint.tensors[name].bits()) for name, array in bits.items()):
        count.same += 1
        return
    count.by_bits += noticed(bits, checkpoint, placements)
    if outputs is None:
        return
    count.run += 1
    seen = outputs.show(
        {name: widened(array, checkpoint.tensors[name].dtype) for name, array in bits.items()}
    )
    if change.reason:
        count.equivalent += not seen
        reasons[change.reason] += not seen
        count.contradicted += change.tensors[:1] * seen
    else:
        count.unseen += change.tensors[:1] * (not seen)
    count.by_outputs += seen and not change.reason


def noticed(bits: Mapping[str, Bits], checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> bool:
    """Say whether the comparison of bits notices tensors that a target has."""
    return any(
        (checkpoint.tensors[name].dtype, digest(array)) != (placements[name].dtype, placements[name].sha256)
        for name, array in bits.items()
    )


class _Outputs:
    """The outputs of a model some of whose tensors are changed, before the judge; in float64, forward."""

    def __init__(self, model: JudgedModel, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.problem = JudgedProblem(
            model.config, model.weights, batch, model.part, "float64", gradients=False
        )
        self.weights, self.rounded = self.problem.rounded
        self.names = (output_name(model.config, model.part), "loss")
        self.found: Expectation | None = None

    @property
    def expected(self) -> Expectation:
        """What the oracle says, derived when it is first asked for."""
        if self.found is None:
            self.found = tolerance.end_to_end(self.problem)
        return self.found

    def affordable(self) -> int:
        """Return of how many changes the outputs are computed."""
        kernels = sum(
            array.size
            for name, array in self.weights.items()
            if array.ndim == 2 and not name.startswith("embeddings.")
        )
        tokens = int(np.prod(next(iter(self.batch.arrays().values())).shape[:2]))
        return max(AT_LEAST, int(WORK / (2 * max(kernels, 1) * tokens)))

    def show(self, changed: Mapping[str, NDArray[Any]]) -> bool:
        """Say whether the judge of outputs notices a change."""
        weights = {**self.weights, **{name: np.asarray(array, np.float64) for name, array in changed.items()}}
        computed: dict[str, NDArray[Any]] = {}

        def take(name: str, array: NDArray[Any]) -> None:
            if name in self.names:
                computed[name] = array

        observe(self.model.config, weights, self.rounded, Arithmetic("float64"), take, False, self.model.part)
        judged = (
            judge_tensor(computed[name], self.expected.values[name], self.expected.sigmas[name], "float64")
            for name in self.names
        )
        return any(judgement.status == "diverges" for judgement in judged)


def items(found: Sensitivity) -> Iterator[Item]:
    """Yield what the changes prove."""
    other = sum(tried.changing for tried in found.tried)
    by_bits, same = sum(tried.by_bits for tried in found.tried), sum(tried.same for tried in found.tried)
    said = f"of {other} changes that change a bit, the comparison of bits notices {by_bits}" + (
        f"; {same} more change none" if same else ""
    )
    yield Item(
        "would notice, by bits",
        NOT_APPLICABLE if not other else PROVEN if by_bits == other else FAILED,
        said if other else "there is nothing to change",
    )
    run, seen = sum(tried.run for tried in found.tried), sum(tried.by_outputs for tried in found.tried)
    equivalent = sum(tried.equivalent for tried in found.tried)
    wrong = [f"{name} ({tried.kind})" for tried in found.tried for name in tried.contradicted]
    unseen = [f"{name} ({tried.kind})" for tried in found.tried for name in tried.unseen]
    said = (
        f"on {found.case}: of {run} changes that were run the outputs show {seen}; {equivalent} "
        "compute the same, for reasons that are known"
    )
    said += f"; not run: {other - run}, chosen by seed {found.seed}" if run < other else ""
    if wrong:
        said += f"; said to compute the same, and do not: {', '.join(wrong[:5])}"
    if unseen:
        said += f"; not shown, and nobody knows why, {len(unseen)}: {', '.join(unseen[:5])}; bits show them"
    yield Item(
        "would notice, by outputs",
        FAILED if wrong else NOT_APPLICABLE if not run else UNVERIFIED if unseen else PROVEN,
        said,
    )
