"""Bugs in which batches a step is given (SPEC OPT-10), and in what a resumed training goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from concord.conformance.faults.training.dropout import drawn
from concord.conformance.faults.training.fault import (
    HUB,
    Change,
    Place,
    Site,
    Tensor,
    Tensors,
    TrainingFault,
    Window,
)
from concord.spec.batch import Batch
from concord.spec.training.schedules import learning_rate


def fault(
    group: str,
    name: str,
    what: str,
    change: Change,
    source: str,
    run: str,
    clause: str = "OPT-10",
    **fields: Any,
) -> TrainingFault:
    return TrainingFault(
        name=name,
        group=group,
        what=what,
        clause=clause,
        change=change,
        run=run,
        source=source and HUB + source,
        **fields,
    )


def order(function: Callable[[Place, Sequence[Window]], Window]) -> Change:
    return Change(window=function)


def each(function: Callable[[Batch], Batch]) -> Change:
    """Return the change of each batch of a step."""
    return Change(window=lambda m, windows: [function(batch) for batch in windows[m.step]])


def of_step(m: Place, windows: Sequence[Window], step: int) -> Window:
    """Return the batches of another step; there are none after the last."""
    return windows[min(step, len(windows) - 1)]


def samples(batch: Batch, chosen: Sequence[int]) -> Batch:
    """Return some samples of a batch, in an order."""
    return dataclasses.replace(batch, **{name: array[list(chosen)] for name, array in batch.arrays().items()})


def labels_in_order(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=np.roll(batch.required("labels"), 1))


def filled_up(m: Place, windows: Sequence[Window]) -> Window:
    """A batch that is smaller than the one before is filled up with its own first samples."""
    window, size = list(windows[m.step]), 0
    for place, batch in enumerate(window):
        count = len(batch.required("labels"))
        size = max(size, count)
        window[place] = samples(batch, [number % count for number in range(size)])
    return window


def without_last_sample(batch: Batch) -> Batch:
    count = len(batch.required("labels"))
    return samples(batch, range(count - 1)) if count > 2 else batch


def without(*slots: str) -> Change:
    def load(m: Place, state: Tensors, steps: int) -> tuple[dict[str, Tensor], int]:
        return {name: tensor for name, tensor in state.items() if name.partition(".")[0] not in slots}, steps

    return Change(load=load)


def shortened(m: Place, state: Tensors, steps: int) -> tuple[dict[str, Tensor], int]:
    return {
        name: m.shortened(tensor, "bfloat16") if name.startswith("parameters.") else tensor
        for name, tensor in state.items()
    }, steps


def moments_shortened(m: Place, state: Tensors, steps: int) -> tuple[dict[str, Tensor], int]:
    return {
        name: tensor if name.startswith("parameters.") else m.shortened(tensor, "bfloat16")
        for name, tensor in state.items()
    }, steps


def counted_anew(m: Place, site: Site) -> Any:
    return drawn(dataclasses.replace(site, step=site.step - m.resumed))


MOMENTS = ("first_moment", "second_moment", "largest_second_moment", "momentum")

FAULTS = (
    fault(
        "data",
        "epoch_order_repeated",
        "Every epoch has the order of the first: the sampler is not told which epoch it is.",
        order(lambda m, windows: of_step(m, windows, m.step % 2)),
        "pytorch/pytorch/issues/31771",
        "epochs",
    ),
    fault(
        "data",
        "data_one_step_ahead",
        "The first step's batches are skipped, and each step has those of the next.",
        order(lambda m, windows: of_step(m, windows, m.step + 1)),
        "wyim-pgl/transgenic/issues/59",
        "adamw",
    ),
    fault(
        "data",
        "data_one_step_behind",
        "A step has the batches of the step before once more.",
        order(lambda m, windows: of_step(m, windows, max(m.step - 1, 0))),
        "",
        "adamw",
    ),
    fault(
        "data",
        "data_of_first_step",
        "Every step has the batches of the first.",
        order(lambda m, windows: windows[0]),
        "",
        "adamw",
    ),
    fault(
        "data",
        "first_batch_repeated",
        "All batches of a step are its first.",
        order(lambda m, windows: [windows[m.step][0]] * len(windows[m.step])),
        "",
        "adamw",
    ),
    fault(
        "data",
        "batches_in_reverse",
        "The batches of a step come in reverse.",
        order(lambda m, windows: windows[m.step][::-1]),
        "",
        "dropout",
    ),
    fault(
        "data",
        "last_batch_dropped",
        "The last batch of a step is dropped.",
        order(lambda m, windows: windows[m.step][:-1] or windows[m.step]),
        "huggingface/transformers/issues/14309",
        "adamw",
    ),
    fault(
        "data",
        "small_batch_filled_up",
        "A smaller batch is filled up with its own samples once more.",
        order(filled_up),
        "huggingface/accelerate/issues/1382",
        "adamw",
    ),
    fault(
        "data",
        "last_sample_dropped",
        "The last sample of each batch is dropped.",
        each(without_last_sample),
        "",
        "adamw",
    ),
    fault(
        "data",
        "labels_not_shuffled",
        "Labels are one sample behind their texts.",
        each(labels_in_order),
        "",
        "adamw",
    ),
    fault(
        "resume",
        "resumed_without_moments",
        "Training goes on without the moments of the checkpoint.",
        without(*MOMENTS),
        "KempnerInstitute/KempnerForge/pull/115",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_without_first_moment",
        "Training goes on without the first moment.",
        without("first_moment"),
        "",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_without_second_moment",
        "Training goes on without the second moment.",
        without("second_moment"),
        "",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_without_largest",
        "Training goes on without the largest second moment.",
        without("largest_second_moment"),
        "",
        "resumed",
        "OPT-4",
    ),
    fault(
        "resume",
        "resumed_weights_bfloat16",
        "Weights were written down in bfloat16.",
        Change(load=shortened),
        "vllm-project/speculators/issues/1027",
        "resumed",
        "PRC-3",
    ),
    fault(
        "resume",
        "resumed_moments_bfloat16",
        "Moments were written down in bfloat16.",
        Change(load=moments_shortened),
        "NVIDIA-NeMo/Automodel/pull/2419",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_correction_from_start",
        "The powers of beta begin anew, the moments do not.",
        Change(load=lambda m, state, steps: (dict(state), 0)),
        "deepspeedai/DeepSpeed/pull/564",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_correction_one_behind",
        "The powers of beta are one step behind.",
        Change(load=lambda m, state, steps: (dict(state), steps - 1)),
        "goodfire-ai/spd/issues/616",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_optimizer_anew",
        "The optimizer begins anew: neither its moments nor how many steps it has made are read.",
        Change(
            load=lambda m, state, steps: (
                {name: tensor for name, tensor in state.items() if name.startswith("parameters.")},
                0,
            )
        ),
        "TrenTorch/TrenTorch/pull/187",
        "resumed",
        "OPT-3",
    ),
    fault(
        "resume",
        "resumed_schedule_from_start",
        "The schedule begins anew, and warms up again.",
        Change(rate=lambda m: learning_rate(m.recipe, m.step - m.resumed)),
        "NVIDIA-NeMo/Automodel/issues/763",
        "resumed",
        "OPT-9",
    ),
    fault(
        "resume",
        "resumed_schedule_one_behind",
        "The schedule is one step behind: it was written down before it moved on.",
        Change(rate=lambda m: learning_rate(m.recipe, m.step - (m.resumed > 0))),
        "allenai/allennlp/pull/1650",
        "resumed",
        "OPT-9",
    ),
    fault(
        "resume",
        "resumed_masks_from_start",
        "Dropout begins anew with the masks of the first step.",
        Change(masks=counted_anew),
        "huggingface/transformers/issues/17032",
        "resumed",
        "DRP-3",
    ),
    fault(
        "resume",
        "resumed_masks_of_other_seed",
        "Dropout goes on with another seed.",
        Change(
            masks=lambda m, site: drawn(dataclasses.replace(site, seed=site.seed + (1 if m.resumed else 0)))
        ),
        "modelscope/ms-swift/pull/9935",
        "resumed",
        "DRP-3",
    ),
    fault(
        "resume",
        "resumed_data_from_start",
        "The data begin anew.",
        order(lambda m, windows: of_step(m, windows, m.step - m.resumed)),
        "huggingface/accelerate/pull/4232",
        "resumed",
    ),
    fault(
        "resume",
        "resumed_data_one_behind",
        "The last step before the checkpoint is made once more.",
        order(lambda m, windows: of_step(m, windows, m.step - (m.resumed > 0))),
        "AI-Hypercomputer/maxdiffusion/pull/484",
        "resumed",
    ),
    fault(
        "resume",
        "resumed_data_one_ahead",
        "A step's batches are skipped.",
        order(lambda m, windows: of_step(m, windows, m.step + (m.resumed > 0))),
        "huggingface/transformers/pull/46628",
        "resumed",
    ),
)
