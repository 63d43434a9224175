"""What is in tensors (SPEC WGT-3, WGT-4)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.porting.faults.fault import HUB, Array, Arrays, ConversionFault, Edit, changed, stored, tensors
from concord.porting.stored import Stored, in_memory

TABLE = "bert.embeddings.word_embeddings.weight"

OUTER = "layer__1__output__dense__weight"


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "numbers",
            "what": what,
            "clause": "WGT-4",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


def cast(dtype: str) -> Any:
    """Return the change of all tensors to a dtype."""
    return tensors(lambda found: {name: array.astype(dtype) for name, array in found.items()})


def upper_half(array: Array) -> Stored:
    """Return float32 cut off to bfloat16."""
    return in_memory((array.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bfloat16")


def with_element(value: float) -> Any:
    """Return the change of one element."""

    def change(array: Array) -> Array:
        array[3, 5] = value
        return array

    return change


def overflowing(found: Arrays) -> Arrays:
    """Cast a weight that float16 cannot hold."""
    with np.errstate(over="ignore"):
        return {
            name: with_element(1e5)(array).astype(np.float16)
            if name.endswith("pooler.dense.weight")
            else array.astype(np.float16)
            for name, array in found.items()
        }


FAULTS = (
    fault(
        "weights_in_float16",
        "All weights were cast to float16.",
        cast("float16"),
        "named",
        "float16",
        "google/saxml/issues/28",
        first="embeddings.token",
    ),
    fault(
        "one_tensor_in_bfloat16",
        "One tensor is saved in bfloat16, all others as they were.",
        stored(TABLE, upper_half),
        "named",
        "bfloat16",
        "huggingface/transformers/issues/46167",
        first="embeddings.token",
    ),
    fault(
        "weights_widened",
        "All weights were cast to float64, which changes none.",
        cast("float64"),
        "harmless",
        "",
        "huggingface/transformers/issues/12062",
    ),
    fault(
        "weights_in_whole_numbers",
        "A quantised weight, without its scale, stands where the weight should.",
        changed(**{OUTER: lambda array: np.round(array * 100).astype(np.int8)}),
        "refused",
        "has dtype int8 but must be a floating-point type",
        "",
        clause="WGT-3",
    ),
    fault(
        "weight_not_a_number",
        "A weight is NaN.",
        changed(**{OUTER: with_element(float("nan"))}),
        "refused",
        "holds NaN or infinity",
        "NVIDIA/FasterTransformer/issues/221",
        clause="WGT-3",
    ),
    fault(
        "weight_beyond_float16",
        "A weight was too large for float16, and is infinite.",
        tensors(overflowing),
        "refused",
        "holds NaN or infinity",
        "microsoft/onnxruntime/issues/11384",
        clause="WGT-3",
    ),
    fault(
        "weight_of_another_run",
        "One tensor is another checkpoint's.",
        changed(
            **{
                OUTER: lambda array: (
                    np.random.default_rng(1).permutation(array.reshape(-1)).reshape(array.shape)
                )
            }
        ),
        "named",
        "",
        "",
        first="layers.1.feed_forward.outer",
    ),
    fault(
        "element_nudged",
        "One element is off by a hundredth.",
        changed(**{OUTER: lambda array: with_element(float(array[3, 5]) * 1.01)(array)}),
        "named",
        "",
        "",
        first="layers.1.feed_forward.outer",
    ),
    fault(
        "weight_zero",
        "A weight was allocated, and never filled.",
        changed(**{OUTER: np.zeros_like}),
        "named",
        "",
        "GeeeekExplorer/nano-vllm/pull/264",
        first="layers.1.feed_forward.outer",
    ),
    fault(
        "bytes_in_the_other_order",
        "Norms were written by a machine that has the most significant byte first.",
        changed(embeddings__LayerNorm__weight=lambda array: array.byteswap()),
        "named",
        "",
        "safetensors/safetensors/issues/307",
        first="embeddings.norm",
    ),
)
