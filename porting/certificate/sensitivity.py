"""Proof that a certificate could have failed: tensors are changed one after the other.

And it has to notice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from concord.porting.certificate.evidence import BACKWARD_PASSES, FORWARD_PASSES, JudgedModel, tokens_of
from concord.porting.checkpoint import Checkpoint, LazyTensor
from concord.porting.comparison.difference import head_axis
from concord.porting.stored import NUMPY, Bits, digest, widened
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import Batch, from_arrays
from concord.spec.config import EncoderConfig
from concord.spec.precision import precision
from concord.spec.reference import observe, reference, used_rows
from concord.spec.tensors import POOLED, output_name

TRANSPOSED, SWAPPED, PERMUTED, NUDGED, UNUSED, ROUNDED, TOGETHER = (
    "transposed",
    "swapped with one of its shape",
    "its heads permuted",
    "one element nudged",
    "one element nudged where no input looks",
    "rounded to bfloat16",
    "all heads of a layer permuted alike",
)

CHANGES = (TRANSPOSED, SWAPPED, PERMUTED, NUDGED, UNUSED, ROUNDED, TOGETHER)

SOFTMAX = "a bias of keys adds the same to all scores of a query, which softmax does not see"
NOT_READ = "no input looks this row up"
ALL_HEADS = "queries, keys, values and output projection have their heads in the same new order"
ZERO = "the number next to 0 is too small to change any sum"
ULP = "one unit in the last place of float64 is what rounding itself may do"


@dataclass(frozen=True)
class Alteration:
    """A change of one tensor or more.

    Attributes:
        kind: one of :data:`CHANGES`.
        tensors: makes each parameter that it changes, by name, in the dtype of the file; it is called by the
            first.
        reason: why the model computes the same all the same; empty: it does not.
    """

    kind: str
    tensors: Mapping[str, Callable[[], Bits]]
    reason: str

    @property
    def named(self) -> tuple[str, ...]:
        """What it is called by."""
        return (next(iter(self.tensors)),)


def changes(
    config: EncoderConfig,
    part: str,
    tensors: Mapping[str, LazyTensor],
    batch: Batch,
    gradients: Mapping[str, NDArray[np.floating]],
) -> Iterator[Alteration]:
    """Yield every change that can be made to a model, tensor after tensor, then those that are none.

    Args:
        batch: on which the outputs are going to be computed.
        gradients: of the loss on it, by parameter: a nudge is where it matters most, and not behind a ReLU
            that is closed.
    """
    used: Mapping[str, NDArray[np.int64]] = used_rows(config, batch, part)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype), []).append(name)

    def alone(kind: str, name: str, make: Callable[[Bits], Bits], reason: str = "") -> Alteration:
        """Return a change of one tensor."""
        changed = {name: lambda: make(tensors[name].bits())}
        return Alteration(kind, changed, reason or _unseen(config, changed))

    def rolled(name: str) -> Callable[[], Bits]:
        """Return what makes a tensor whose heads stand one place further on."""
        axis = head_axis(name)
        assert axis is not None
        return lambda: np.roll(tensors[name].bits(), tensors[name].shape[axis] // config.num_heads, axis)

    for name, tensor in tensors.items():
        nudge = partial(_nudge, tensor.dtype)
        if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] > 1:
            yield alone(TRANSPOSED, name, np.transpose)
        same = alike[tensor.shape, tensor.dtype]
        other = same[(same.index(name) + 1) % len(same)]
        if other != name:
            swapped = {name: tensors[other].bits, other: tensor.bits}
            yield Alteration(SWAPPED, swapped, _unseen(config, swapped))
        if head_axis(name) is not None and config.num_heads > 1:
            yield Alteration(PERMUTED, {name: rolled(name)}, _unseen(config, [name]))
        # What padding looks up need not reach the output.
        hidden = (config.pad_id, config.token_padding_row) if name == "embeddings.token.weight" else ()
        read = [int(row) for row in used.get(name, ()) if row not in hidden]
        reason = ULP if tensor.dtype == "float64" else "" if tensor.bits().any() else ZERO
        yield alone(NUDGED, name, partial(nudge, rows=read, gradient=gradients.get(name)), reason)
        unread = np.setdiff1d(range(tensor.shape[0]), used[name])[:1].tolist() if name in used else []
        if unread:
            yield alone(UNUSED, name, partial(nudge, rows=unread), NOT_READ)
        yield alone(ROUNDED, name, partial(_rounded, tensor.dtype))
    if config.num_heads > 1 and config.output_projection and config.mask_assignment == "per_sample":
        for inside in [name.removesuffix("output.weight") for name in tensors if name.endswith(OUTPUT)]:
            moved = [name for name in tensors if name.startswith(inside) and head_axis(name) is not None]
            yield Alteration(TOGETHER, {name: rolled(name) for name in moved}, ALL_HEADS)


OUTPUT = "attention.output.weight"


def _unseen(config: EncoderConfig, names: Iterable[str]) -> str:
    """Return why it does not matter what stands in some tensors; empty: it does."""
    keys = all(name.endswith("attention.key.bias") for name in names)
    return SOFTMAX if keys and config.qkv_activation == "none" else ""


def _nudge(
    dtype: str, bits: Bits, rows: Sequence[int] = (), gradient: NDArray[np.floating] | None = None
) -> Bits:
    """Return bits with one number moved away from zero by one unit in the last place.

    Args:
        rows: of which it is one; none: of all.
        gradient: of the loss; by default the largest number is taken.
    """
    found = np.array(bits, NUMPY[dtype], order="C")
    where = np.asarray(rows or range(len(found)))
    sizes = abs(widened(found[where], dtype))
    weighed = sizes if gradient is None else sizes * abs(gradient[where])
    place = np.unravel_index(int(weighed.argmax()), sizes.shape)
    # Of the largest finite number the next one is none: it goes down.
    largest = float(sizes[place]) >= precision(dtype).largest
    found.view(f"i{found.dtype.itemsize}")[where[place[0]], *place[1:]] += -1 if largest else 1
    return found


def _rounded(dtype: str, bits: Bits) -> Bits:
    """Return numbers rounded to bfloat16, in the dtype that they have."""
    if dtype == "bfloat16":
        return bits
    target = precision("bfloat16")
    return np.asarray(target.round(np.asarray(bits))).astype(NUMPY[dtype])


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
    quick: bool = False,
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
        quick: whether the outputs are computed of :data:`AT_LEAST` changes alone.
    """
    batch = _few(model, batch)
    gradients = reference(model.config, model.weights, batch, True, model.part).gradients
    made = list(changes(model.config, model.part, checkpoint.tensors, batch, gradients))
    outputs = _Outputs(model, batch)
    run = min(len(made), affordable(model, batch, quick))
    chosen = set(random.Random(seed).sample(range(len(made)), run))
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


def affordable(model: JudgedModel, batch: Batch, quick: bool) -> int:
    """Return of how many changes the outputs are computed at most."""
    kernels = sum(
        array.size
        for name, array in model.weights.items()
        if array.ndim == 2 and not name.startswith("embeddings.")
    )
    return AT_LEAST if quick else max(AT_LEAST, int(WORK / (2 * max(kernels, 1) * tokens_of(batch))))


def work(model: JudgedModel, batch: Batch, quick: bool) -> int:
    """Return over about how many tokens the reference passes to try the changes of a model."""
    few = _few(model, batch)
    run = min(4 * len(model.weights), affordable(model, few, quick))
    return (FORWARD_PASSES + BACKWARD_PASSES + run) * tokens_of(few)


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
    bits, tensors = {name: make() for name, make in change.tensors.items()}, checkpoint.tensors
    count.made += 1
    if all(digest(array) == tensors[name].sha256() for name, array in bits.items()):
        count.same += 1
        return
    count.by_bits += any(
        (tensors[name].dtype, digest(array)) != placements[name].held for name, array in bits.items()
    )
    if outputs is None:
        return
    count.run += 1
    seen = outputs.show({name: widened(array, tensors[name].dtype) for name, array in bits.items()})
    if change.reason:
        count.equivalent += not seen
        reasons[change.reason] += not seen
        count.contradicted += change.named * seen
    else:
        count.by_outputs += seen
        count.unseen += change.named * (not seen)


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
    other, by_bits, same, run, seen, equivalent = (
        sum(getattr(tried, name) for tried in found.tried)
        for name in ("changing", "by_bits", "same", "run", "by_outputs", "equivalent")
    )
    said = f"of {other} changes that change a bit, the comparison of bits notices {by_bits}"
    said += f"; {same} more change none" if same else ""
    yield Item(
        "would notice, by bits",
        NOT_APPLICABLE if not other else PROVEN if by_bits == other else FAILED,
        said if other else "there is nothing to change",
    )
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
