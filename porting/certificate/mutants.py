"""Proof that a certificate could have failed: each tensor is changed in turn, and it has to notice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.conformance import tolerance
from concord.conformance.campaign import Job
from concord.conformance.expectation import JudgedProblem
from concord.conformance.mutants.matrix import Finding
from concord.conformance.scoring import judge_tensor
from concord.conformance.wording import gather
from concord.porting.certificate.certificate import (
    BITS,
    FAILED,
    NOT_APPLICABLE,
    OUTPUTS,
    PROVEN,
    UNVERIFIED,
    Asked,
    Claim,
    PortSide,
)
from concord.porting.certificate.files import NAMED
from concord.porting.certificate.runs import BACKWARD_PASSES, FORWARD_PASSES, tokens_of
from concord.porting.checkpoint import LazyTensor
from concord.porting.comparison.difference import head_axis
from concord.porting.stored import NUMPY, Bits, digest, widened
from concord.spec.arithmetic import Arithmetic
from concord.spec.batch import from_arrays
from concord.spec.precision import precision
from concord.spec.reference import observe, reference, used_rows
from concord.spec.tensors import POOLED, output_name
from concord.spec.text import first_of

TRANSPOSED, SWAPPED, PERMUTED, NUDGED, UNUSED, ROUNDED, TOGETHER = (
    "transposed",
    "swapped with one of its shape",
    "its heads permuted",
    "one element nudged",
    "one element nudged where no input looks",
    "rounded to bfloat16",
    "all heads of a layer permuted alike",
)

SAME = "no bit is another"
SOFTMAX = "a bias of keys adds the same to all scores of a query, which softmax does not see"
NOT_READ = "no input looks this row up"
ALL_HEADS = "queries, keys, values and output projection have their heads in the same new order"
ZERO = "the number next to 0 is too small to change any sum"
ULP = "one unit in the last place of float64 is what rounding itself may do"

OUTPUT = "attention.output.weight"

Tensors = Mapping[str, LazyTensor]
Changed = Mapping[str, Bits]
"""Each parameter that is changed, by name, in the dtype of the file; a change is called by the first."""


def mutants(model: Job, tensors: Tensors) -> Iterator[tuple[str, Changed, str]]:
    """Yield every change that can be made to a model, tensor after tensor, then those that are none.

    A nudge is where it matters most to the loss, and not behind a ReLU that is closed.

    Args:
        model: with the batch on which the outputs are going to be computed.
        tensors: its parameters.

    Yields:
        The kind of change, the tensors, and why the model computes the same all the same; empty: it does not.
    """
    config, heads = model.config, model.config.num_heads
    gradients = reference(config, model.weights, model.batch, True, model.part).gradients
    used: Mapping[str, NDArray[np.int64]] = used_rows(config, model.batch, model.part)
    alike = gather(tensors, lambda name: (tensors[name].shape, tensors[name].dtype))

    def rolled(name: str) -> Bits:
        """Return a tensor whose heads stand one place further on."""
        axis = head_axis(name)
        assert axis is not None
        return np.roll(tensors[name].bits(), tensors[name].shape[axis] // heads, axis)

    for name, tensor in tensors.items():
        bits, dtype = tensor.bits(), tensor.dtype
        unseen = SOFTMAX * (name.endswith("attention.key.bias") and config.qkv_activation == "none")
        if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] > 1:
            yield TRANSPOSED, {name: np.transpose(bits)}, ""
        same = alike[tensor.shape, dtype]
        other = same[(same.index(name) + 1) % len(same)]
        if other != name:
            changed = {name: tensors[other].bits(), other: bits}
            yield SWAPPED, changed, unseen if other.endswith("attention.key.bias") else ""
        if head_axis(name) is not None and heads > 1:
            yield PERMUTED, {name: rolled(name)}, unseen
        # What padding looks up need not reach the output.
        hidden = (config.pad_id, config.token_padding_row) if name == "embeddings.token.weight" else ()
        read = [int(row) for row in used.get(name, ()) if row not in hidden]
        why = ULP if dtype == "float64" else unseen if bits.any() else ZERO
        yield NUDGED, {name: _nudged(dtype, bits, read, gradients.get(name))}, why
        unread = np.setdiff1d(range(tensor.shape[0]), used[name])[:1].tolist() if name in used else []
        if unread:
            yield UNUSED, {name: _nudged(dtype, bits, unread)}, NOT_READ
        yield ROUNDED, {name: _rounded(dtype, bits)}, unseen
    if heads > 1 and config.output_projection and config.mask_assignment == "per_sample":
        for inside in [name.removesuffix("output.weight") for name in tensors if name.endswith(OUTPUT)]:
            moved = [name for name in tensors if name.startswith(inside) and head_axis(name) is not None]
            yield TOGETHER, {name: rolled(name) for name in moved}, ALL_HEADS


def _nudged(
    dtype: str, bits: Bits, rows: Sequence[int], gradient: NDArray[np.floating] | None = None
) -> Bits:
    """Return bits with one number moved away from zero by one unit in the last place.

    Args:
        rows: of which it is one; none: of all.
        gradient: of the loss; None: the largest number is taken.
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
    return np.asarray(precision("bfloat16").round(np.asarray(bits))).astype(NUMPY[dtype])


WORK = 2e12
"""Multiplications and additions that the outputs of changed models may take together: of a larger model a
sample is run."""

AT_LEAST, CHANGES = 16, 4
"""About as many changes whose outputs are computed, however large the model, and changes of each tensor."""

IN_TOKENS = {"input_ids": 2, "segment_ids": 2, "cotangent": 3}
"""Inputs whose second axis is the tokens, where they have so many axes."""

ROWS = 2
"""Samples of the batch on which they are."""


def hunt(
    source: Job, side: PortSide, tensors: Tensors, asked: Asked, tell: Callable[[str], None]
) -> tuple[Finding, ...]:
    """Change each tensor in each way, and say which changes bits show, and which the judge of outputs does.

    Args:
        source: the model, which stands for a target that is right, with the batch on whose first rows the
            outputs are computed, the first of which has no padding but where the model needs it.
        side: what the certificate states of it.
        tensors: its parameters, as the file has them.
        asked: its seed chooses those whose outputs are computed, of a quick one few.
        tell: takes what is being done, in words.
    """
    model, found, about = narrowed(source), list[Finding](), CHANGES * len(tensors)
    shows, draw = _judge_of_outputs(model), random.Random(asked.seed)
    for number, one in enumerate(mutants(model, tensors)):
        chosen = draw.random() * about < affordable(model, asked.quick)
        found += _looked_for(*one, tensors, side, shows if chosen else None)
        if number % 50 == 49:
            tell(f"{number + 1} of about {about} changes")
    return tuple(found)


def affordable(model: Job, quick: bool) -> int:
    """Return of how many changes the outputs are computed at most."""
    kernels = sum(
        array.size
        for name, array in model.weights.items()
        if array.ndim == 2 and not name.startswith("embeddings.")
    )
    return AT_LEAST if quick else max(AT_LEAST, int(WORK / (2 * max(kernels, 1) * tokens_of(model.batch))))


def work(source: Job, quick: bool) -> int:
    """Return over about how many tokens the reference passes to try the changes of a model."""
    model = narrowed(source)
    run = min(CHANGES * len(model.weights), affordable(model, quick))
    return (FORWARD_PASSES + BACKWARD_PASSES + run) * tokens_of(model.batch)


def narrowed(model: Job) -> Job:
    """Return a model with the first rows of its batch, without the columns in which they all are padding."""
    arrays = {name: array[:ROWS] for name, array in model.batch.arrays().items()}
    if "input_ids" in arrays and not (model.part in POOLED and model.config.pooling == "flatten"):
        real = np.flatnonzero((arrays["input_ids"] != model.config.pad_id).any(0))
        for name, axes in IN_TOKENS.items():
            if name in arrays and arrays[name].ndim == axes:
                arrays[name] = arrays[name][:, : int(real.max(initial=0)) + 1]
    return replace(model, batch=from_arrays(arrays))


Shows = Callable[[Mapping[str, NDArray[Any]]], bool]
"""Says whether the judge of outputs notices that some weights are others."""


def _looked_for(
    kind: str, changed: Changed, why: str, tensors: Tensors, side: PortSide, shows: Shows | None
) -> Iterator[Finding]:
    """Yield who notices a change."""
    finding = partial(Finding, kind, tensor=next(iter(changed)))
    held = {name: (tensors[name].dtype, digest(bits)) for name, bits in changed.items()}
    if all(tensors[name].held == found for name, found in held.items()):
        yield finding(BITS, "equivalent", detail=SAME)
        return
    noticed = any(side.parameters[name].held != found for name, found in held.items())
    yield finding(BITS, "found" if noticed else "missed")
    if shows is None:
        return
    seen = shows({name: widened(bits, tensors[name].dtype) for name, bits in changed.items()})
    if why:
        yield finding(OUTPUTS, "alarm" if seen else "equivalent", detail=why)
    else:
        yield finding(OUTPUTS, "found" if seen else "missed")


def _judge_of_outputs(model: Job) -> Shows:
    """Return the judge of the outputs of a model some of whose weights are changed; in float64, forward."""
    problem = JudgedProblem(model.config, model.weights, model.batch, model.part, "float64", gradients=False)
    weights, batch = problem.rounded
    names = (output_name(model.config, model.part), "loss")
    expected = tolerance.end_to_end(problem)

    def shows(changed: Mapping[str, NDArray[Any]]) -> bool:
        computed: dict[str, NDArray[Any]] = {}

        def take(name: str, array: NDArray[Any]) -> None:
            if name in names:
                computed[name] = array

        others = {name: np.asarray(array, np.float64) for name, array in changed.items()}
        observe(model.config, {**weights, **others}, batch, Arithmetic("float64"), take, False, model.part)
        return any(
            judge_tensor(array, expected.values[name], expected.sigmas[name], "float64").status == "diverges"
            for name, array in computed.items()
        )

    return shows


def claims(found: Sequence[Finding], seed: int) -> Iterator[Claim]:
    """Yield what the changes prove, for both that look for them."""
    bits, outputs = (Counter(one.status for one in found if one.backend == by) for by in (BITS, OUTPUTS))
    changing, run = bits.total() - bits["equivalent"], outputs.total()
    said = f"of {changing} changes that change a bit, the comparison of bits notices {bits['found']}"
    said += f"; {bits['equivalent']} more change none" if bits["equivalent"] else ""
    yield Claim(
        "would notice, by bits",
        NOT_APPLICABLE if not changing else FAILED if bits["missed"] else PROVEN,
        said if changing else "there is nothing to change",
    )
    alarms, missed = (
        [f"{one.tensor} ({one.mutant})" for one in found if (one.backend, one.status) == (OUTPUTS, status)]
        for status in ("alarm", "missed")
    )
    said = (
        f"on the first rows of the first input, in float64: of {run} changes that were run the outputs show "
        f"{outputs['found']}; {outputs['equivalent']} compute the same, for reasons that are known"
    )
    said += f"; not run: {changing - run}, chosen by seed {seed}" if run < changing else ""
    if alarms:
        said += f"; said to compute the same, and do not: {first_of(alarms, NAMED)}"
    if missed:
        said += f"; not shown, and nobody knows why, {len(missed)}: {first_of(missed, NAMED)}; bits show them"
    yield Claim(
        "would notice, by outputs",
        FAILED if alarms else NOT_APPLICABLE if not run else UNVERIFIED if missed else PROVEN,
        said,
    )
