"""What is said of the model (SPEC CFG-1)."""

from __future__ import annotations

from typing import Any

from concord.porting.faults.fault import HUB, ConversionFault, Edit, stated

TRANSFORMERS = "huggingface/transformers"


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "configuration",
            "what": what,
            "clause": "CFG-1",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


FAULTS = (
    fault(
        "epsilon_of_another_framework",
        "Norms have the epsilon that the framework has by default, 1e-5.",
        stated(layer_norm_eps=1e-5),
        "named",
        "norm_epsilon = 1e-05 instead of 1e-12 (NRM-2)",
        "keras-team/keras-hub/issues/642",
        first="embeddings.norm",
        clause="NRM-2",
    ),
    fault(
        "epsilon_not_stated",
        "Epsilon is not stated, and so is BERT's.",
        stated(layer_norm_eps=None),
        "harmless",
        "",
        f"{TRANSFORMERS}/issues/532",
        clause="NRM-2",
    ),
    fault(
        "gelu_of_another_form",
        "GELU is approximated by tanh.",
        stated(hidden_act="gelu_new"),
        "named",
        "activation = gelu_tanh instead of gelu_erf (FFN-2)",
        "CyberZHG/keras-bert/issues/129",
        first="layers.0.feed_forward.activation",
        clause="FFN-2",
    ),
    fault(
        "gelu_by_another_name",
        "GELU is called by the name of a function that the family does not have.",
        stated(hidden_act="quick_gelu"),
        "refused",
        "'hidden_act' is 'quick_gelu'",
        "chengchingwen/Transformers.jl/pull/209",
        clause="FFN-2",
    ),
    fault(
        "heads_taken_for_layers",
        "There are as many heads as the model has columns in a head.",
        stated(num_attention_heads=7),
        "named",
        "",
        "rasbt/LLMs-from-scratch/issues/444",
        first="layers.0.attention.query",
        clause="ATT-2",
    ),
    fault(
        "heads_that_do_not_divide",
        "The number of heads does not divide the width.",
        stated(num_attention_heads=3),
        "refused",
        "num_heads",
        "ramanathanlab/genslm/issues/110",
        clause="ATT-2",
    ),
    fault(
        "padding_of_another_tokenizer",
        "The padding id is that of another tokenizer.",
        stated(pad_token_id=1),
        "named",
        "pad_id = 1 instead of 0 (MSK-1)",
        f"{TRANSFORMERS}/issues/10869",
        first="layers.0.attention.masked_scores",
        clause="MSK-1",
    ),
    fault(
        "model_of_another_type",
        "The model is of another type, which counts its positions otherwise.",
        stated(model_type="gpt2"),
        "refused",
        "'model_type' is \"gpt2\"",
        f"{TRANSFORMERS}/issues/16773",
    ),
    fault(
        "positions_relative",
        "Positions are relative, which the file has no tensors for.",
        stated(position_embedding_type="relative_key"),
        "refused",
        "'position_embedding_type' is \"relative_key\"",
        "",
    ),
    fault(
        "classes_not_numbered_from_zero",
        "Classes are numbered from one.",
        stated(id2label={"1": "a", "2": "b", "3": "c"}),
        "refused",
        "'id2label' must number its labels 0, 1",
        "",
    ),
    fault(
        "width_not_stated",
        "The width of the model is not stated.",
        stated(hidden_size=None),
        "refused",
        "hidden_size",
        "",
    ),
    fault(
        "entries_that_say_nothing",
        "Entries of newer versions stand beside the others.",
        stated(transformers_version="5.0.0", attn_implementation="sdpa", use_cache=True),
        "harmless",
        "",
        "",
    ),
)
