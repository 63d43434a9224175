"""How tensors are laid out (SPEC WGT-2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.porting.faults.fault import (
    HUB,
    Array,
    Arrays,
    ConversionFault,
    Edit,
    both,
    changed,
    stated,
    tensors,
)

NAME = "bert.encoder.layer.0.attention.self"

HEADS, HEAD = 2, 7
"""How many heads the model has, and how wide each is."""


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "layouts",
            "what": what,
            "clause": "WGT-2",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


def kernel(name: str, array: Array) -> bool:
    return array.ndim == 2 and "embeddings" not in name


def all_turned(found: Arrays) -> Arrays:
    return {name: array.T if kernel(name, array) else array for name, array in found.items()}


def square_turned(found: Arrays) -> Arrays:
    return {
        name: array.T if kernel(name, array) and len(set(array.shape)) == 1 else array
        for name, array in found.items()
    }


def storage_order(array: Array) -> Array:
    """Return what is read back of a transposed view whose storage is saved under the view's shape."""
    return np.ascontiguousarray(array.T).reshape(array.shape)


def rotary(array: Array) -> Array:
    """Bring the rows of each head into the order of another layout of rotary positions, which BERT has not: even ones, then odd ones."""
    rows = np.concatenate([np.arange(0, HEAD, 2), np.arange(1, HEAD, 2)])
    return array.reshape(HEADS, HEAD, *array.shape[1:])[:, rows].reshape(array.shape)


def heads_exchanged(array: Array) -> Array:
    return array.reshape(HEADS, HEAD, *array.shape[1:])[::-1].reshape(array.shape)


def fused_by_head(found: Arrays) -> Arrays:
    """Cut a fused weight that has query, key and value of each head in turn into three parts, one after the other."""
    new = dict(found)
    for leaf in ("weight", "bias"):
        parts = [found[f"{NAME}.{role}.{leaf}"] for role in ("query", "key", "value")]
        fused = np.concatenate(
            [part.reshape(HEADS, HEAD, *part.shape[1:]) for part in parts], axis=1
        ).reshape(-1, *parts[0].shape[1:])
        new |= {
            f"{NAME}.{role}.{leaf}": third
            for role, third in zip(("query", "key", "value"), np.split(fused, 3), strict=True)
        }
    return new


FAULTS = (
    fault(
        "linear_not_transposed",
        "Linear weights are written to Paddle as PyTorch keeps them.",
        tensors(all_turned),
        "refused",
        "has shape (17, 14) but must be (14, 17)",
        "PaddlePaddle/PaddleMIX/issues/239",
        format="paddlenlp",
    ),
    fault(
        "kernels_transposed",
        "Linear weights are written to PyTorch as Flax keeps them.",
        tensors(all_turned),
        "refused",
        "has shape (14, 17) but must be (17, 14)",
        "google/flax/pull/1848",
    ),
    fault(
        "square_kernel_transposed",
        "What fits by its shape is not transposed: square weights stay as they were.",
        tensors(square_turned),
        "named",
        "transposed (WGT-2)",
        "huggingface/transformers/issues/47031",
        first="layers.0.attention.query",
    ),
    fault(
        "square_kernel_not_transposed_for_paddle",
        "The same on the way to Paddle.",
        tensors(square_turned),
        "named",
        "transposed (WGT-2)",
        "",
        first="layers.0.attention.query",
        format="paddlenlp",
    ),
    fault(
        "one_kernel_transposed",
        "One square weight is transposed.",
        changed(layer__1__attention__output__dense__weight=np.transpose),
        "named",
        "transposed (WGT-2)",
        "",
        first="layers.1.attention.output",
    ),
    fault(
        "table_transposed",
        "Embedding tables are transposed with the linear weights.",
        changed(word_embeddings__weight=np.transpose),
        "refused",
        "has shape (14, 29) but must be (29, 14)",
        "PaddlePaddle/PaddleNLP/pull/7341",
    ),
    fault(
        "view_saved_as_its_storage",
        "A transposed view is saved with the view's shape and the storage's order.",
        changed(layer__0__intermediate__dense__weight=storage_order),
        "named",
        "memory order",
        "PaddlePaddle/PaddleX/pull/5208",
        first="layers.0.feed_forward.inner",
    ),
    fault(
        "heads_permuted_for_rotary",
        "Rows of query and key are permuted for rotary positions, which this model has not; the scores are the same.",
        changed(
            self__query__weight=rotary,
            self__query__bias=rotary,
            self__key__weight=rotary,
            self__key__bias=rotary,
        ),
        "named",
        "",
        "meta-pytorch/gpt-fast/issues/190",
        first="layers.0.attention.query",
    ),
    fault(
        "query_permuted_alone",
        "Rows of the query are permuted, and those of the key by another number of heads.",
        changed(self__query__weight=rotary, self__query__bias=rotary),
        "named",
        "",
        "huggingface/transformers/pull/31788",
        first="layers.0.attention.query",
    ),
    fault(
        "heads_in_another_order",
        "Each head has the value of another.",
        changed(self__value__weight=heads_exchanged, self__value__bias=heads_exchanged),
        "named",
        "heads",
        "",
        first="layers.0.attention.value",
        clause="ATT-2",
    ),
    fault(
        "fused_by_head_cut_in_thirds",
        "A fused weight has query, key and value head by head, and is cut into thirds.",
        tensors(fused_by_head),
        "named",
        "",
        "JieShibo/MoLE/issues/9",
        first="layers.0.attention.query",
    ),
    fault(
        "head_of_pretraining_transposed",
        "The head for next sentences is transposed, as Google has it; no classifier needs it.",
        both(
            tensors(lambda found: {**found, "cls.seq_relationship.weight": np.zeros((14, 2), np.float32)}),
            stated(architectures=["BertForPreTraining"]),
        ),
        "harmless",
        "heads of pretraining",
        "CyberZHG/keras-bert/issues/137",
    ),
)
