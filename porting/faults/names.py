"""Which tensor is which (SPEC WGT-1)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from concord.porting.faults.fault import HUB, Arrays, ConversionFault, Edit, exchanged, renamed, tensors

TRANSFORMERS = "huggingface/transformers"

NO_FORMAT = "have names of no format"


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "names",
            "what": what,
            "clause": "WGT-1",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


def layers(number: Callable[[int, int], int]) -> Edit:
    """Return the edit that gives each layer another number, by its own and that of layers."""

    def change(found: Arrays) -> Arrays:
        numbers = {int(match[1]) for name in found if (match := re.search(r"\.layer\.(\d+)\.", name))}
        return {
            re.sub(
                r"\.layer\.(\d+)\.", lambda match: f".layer.{number(int(match[1]), len(numbers))}.", name
            ): array
            for name, array in found.items()
        }

    return tensors(change)


def among_texts(place: int, count: int) -> int:
    """Return the place of a number where numbers are sorted as texts."""
    return sorted(map(str, range(count))).index(str(place))


def older(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def as_position(found: Arrays) -> Arrays:
    """Take the table of positions for the offset of the norm, so that one overwrites the other."""
    table = "bert.embeddings.position_embeddings.weight"
    return {
        "bert.embeddings.LayerNorm.bias" if name == table else name: array for name, array in found.items()
    }


def slices(order: str) -> Edit:
    """Return the edit that takes query, key and value for others, by their first letters in order."""
    roles = dict(
        zip(
            ("query", "key", "value"),
            ({"q": "query", "k": "key", "v": "value"}[letter] for letter in order),
            strict=True,
        )
    )

    def change(found: Arrays) -> Arrays:
        return {
            name: found[re.sub(r"self\.(query|key|value)", lambda match: f"self.{roles[match[1]]}", name)]
            for name in found
        }

    return tensors(change)


FAULTS = (
    fault(
        "prefix_of_parallel_training",
        "All names begin with `module.`, as DataParallel saves them.",
        renamed(lambda name: f"module.{name}"),
        "refused",
        NO_FORMAT,
        "pytorch/pytorch/issues/3805",
    ),
    fault(
        "prefix_twice",
        "All names have their prefix twice.",
        renamed(lambda name: f"bert.{name}"),
        "refused",
        NO_FORMAT,
        f"{TRANSFORMERS}/issues/8407",
    ),
    fault(
        "prefix_left_out",
        "The encoder's names have no prefix, as BertModel saves them; the classifier's are there.",
        renamed(lambda name: name.removeprefix("bert.")),
        "harmless",
        "",
        f"{TRANSFORMERS}/issues/11843",
    ),
    fault(
        "names_in_a_scope",
        "All names lie in a scope of TensorFlow.",
        renamed(lambda name: f"scope/{name}"),
        "refused",
        NO_FORMAT,
        f"{TRANSFORMERS}/issues/10492",
        format="hugging-face-tf",
    ),
    fault(
        "names_of_another_version",
        "Attention is called otherwise by a newer version of the source.",
        renamed(lambda name: name.replace(".attention.self.", ".self_attention.")),
        "refused",
        "is missing but is required",
        f"{TRANSFORMERS}/pull/15820",
    ),
    fault(
        "gamma_and_beta_of_norms",
        "Gains and offsets are called gamma and beta, as before 2019.",
        renamed(older),
        "harmless",
        "under an older name",
        f"{TRANSFORMERS}/issues/11809",
    ),
    fault(
        "gamma_that_is_no_norm",
        "A parameter that is called gamma and belongs to no norm was renamed to weight, with those of norms.",
        tensors(lambda found: {**found, "bert.encoder.layer.0.weight": np.ones(14, np.float32)}),
        "refused",
        "'bert.encoder.layer.0.weight' is unexpected",
        f"{TRANSFORMERS}/issues/29554",
    ),
    fault(
        "layers_counted_from_one",
        "Layers are counted from one.",
        layers(lambda place, count: place + 1),
        "refused",
        "'bert.encoder.layer.0.attention.self.query.weight' is missing",
        "EleutherAI/gpt-neox/issues/971",
    ),
    fault(
        "layers_sorted_as_text",
        "Layers are sorted as texts, so that 10 comes before 2.",
        layers(among_texts),
        "named",
        "the weights of `layers.10",
        "vllm-project/llm-compressor/pull/2175",
        first="layers.2.attention.query",
        sizes={"num_layers": 11},
    ),
    fault(
        "layers_reversed",
        "Layers are in the other order.",
        layers(lambda place, count: count - 1 - place),
        "named",
        "the weights of `layers.1.attention.query`",
        "",
        first="layers.0.attention.query",
    ),
    fault(
        "key_from_the_slice_of_value",
        "The key is cut out of a fused weight where the value lies.",
        slices("qvv"),
        "named",
        "the weights of `layers.0.attention.value`",
        f"{TRANSFORMERS}/pull/40257",
        first="layers.0.attention.key",
    ),
    fault(
        "fused_as_key_value_query",
        "A fused weight has key, value and query in this order, and is cut as query, key and value.",
        slices("kvq"),
        "named",
        "the weights of `layers.0.attention.key`",
        f"{TRANSFORMERS}/pull/21519",
        first="layers.0.attention.query",
    ),
    fault(
        "query_and_key_exchanged",
        "Query and key are exchanged.",
        exchanged("self.query", "self.key"),
        "named",
        "the weights of `layers.0.attention.key`",
        "",
        first="layers.0.attention.query",
    ),
    fault(
        "gain_and_offset_exchanged",
        "Gain and offset of each norm are taken for each other.",
        exchanged("LayerNorm.weight", "LayerNorm.bias"),
        "named",
        "",
        "Vladkryvoruchko/PSPNet-Keras-tensorflow/issues/31",
        first="embeddings.norm",
    ),
    fault(
        "norms_of_a_layer_exchanged",
        "The norm behind attention and that behind the feed-forward layers are exchanged.",
        exchanged("attention.output.LayerNorm", "output.LayerNorm"),
        "named",
        "",
        "",
        first="layers.0.norm1",
    ),
    fault(
        "two_names_for_one",
        "Two tensors are given one name, and the first one is lost.",
        tensors(as_position),
        "refused",
        "'bert.embeddings.LayerNorm.bias' has shape (13, 14)",
        "bigscience-workshop/Megatron-DeepSpeed/pull/327",
    ),
)
