"""Every bug of conversion, group by group."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.bugs.bug import (
    LABELS,
    TOKENS,
    Array,
    Arrays,
    ConversionBug,
    Edit,
    added,
    both,
    changed,
    exchanged,
    harmless,
    named,
    refused,
    renamed,
    section,
    stated,
    tensors,
    without,
)
from concord.porting.bugs.files import FILES
from concord.porting.folder import LENGTHS, PROMPTS
from concord.porting.registry import Format
from concord.porting.stored import StoredTensor, in_memory

TRANSFORMERS = "huggingface/transformers"


# Which tensor is which (SPEC WGT-1).

NO_FORMAT = "have names of no format"


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
    """Take the table of positions for the bias of the norm, so that one overwrites the other."""
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


NAMES = section(
    "names",
    "WGT-1",
    refused(
        "prefix_of_parallel_training",
        "All names begin with `module.`, as DataParallel saves them.",
        renamed(lambda name: f"module.{name}"),
        NO_FORMAT,
        "pytorch/pytorch/issues/3805",
    ),
    refused(
        "prefix_twice",
        "All names have their prefix twice.",
        renamed(lambda name: f"bert.{name}"),
        NO_FORMAT,
        f"{TRANSFORMERS}/issues/8407",
    ),
    harmless(
        "prefix_left_out",
        "The encoder's names have no prefix, as BertModel saves them; the classifier's are there.",
        renamed(lambda name: name.removeprefix("bert.")),
        source=f"{TRANSFORMERS}/issues/11843",
    ),
    refused(
        "names_in_a_scope",
        "All names lie in a scope of TensorFlow.",
        renamed(lambda name: f"scope/{name}"),
        NO_FORMAT,
        f"{TRANSFORMERS}/issues/10492",
        format="hugging-face-tf",
    ),
    refused(
        "names_of_another_version",
        "Attention is called otherwise by a newer version of the source.",
        renamed(lambda name: name.replace(".attention.self.", ".self_attention.")),
        "is missing but is required",
        f"{TRANSFORMERS}/pull/15820",
    ),
    harmless(
        "gamma_and_beta_of_norms",
        "Weights and biases of norms are called gamma and beta, as before 2019.",
        renamed(older),
        "under an older name",
        f"{TRANSFORMERS}/issues/11809",
    ),
    refused(
        "gamma_that_is_no_norm",
        "A parameter that is called gamma and belongs to no norm was renamed to weight, with those of norms.",
        tensors(lambda found: {**found, "bert.encoder.layer.0.weight": np.ones(14, np.float32)}),
        "'bert.encoder.layer.0.weight' is unexpected",
        f"{TRANSFORMERS}/issues/29554",
    ),
    refused(
        "layers_counted_from_one",
        "Layers are counted from one.",
        layers(lambda place, count: place + 1),
        "'bert.encoder.layer.0.attention.self.query.weight' is missing",
        "EleutherAI/gpt-neox/issues/971",
    ),
    named(
        "layers_sorted_as_text",
        "Layers are sorted as texts, so that 10 comes before 2.",
        layers(among_texts),
        "layers.2.attention.query",
        "the weights of `layers.10",
        "vllm-project/llm-compressor/pull/2175",
        sizes={"num_layers": 11},
    ),
    named(
        "layers_reversed",
        "Layers are in the other order.",
        layers(lambda place, count: count - 1 - place),
        "layers.0.attention.query",
        "the weights of `layers.1.attention.query`",
    ),
    named(
        "key_from_the_slice_of_value",
        "The key is cut out of a fused weight where the value lies.",
        slices("qvv"),
        "layers.0.attention.key",
        "the weights of `layers.0.attention.value`",
        f"{TRANSFORMERS}/pull/40257",
    ),
    named(
        "fused_as_key_value_query",
        "A fused weight has key, value and query in this order, and is cut as query, key and value.",
        slices("kvq"),
        "layers.0.attention.query",
        "the weights of `layers.0.attention.key`",
        f"{TRANSFORMERS}/pull/21519",
    ),
    named(
        "query_and_key_exchanged",
        "Query and key are exchanged.",
        exchanged("self.query", "self.key"),
        "layers.0.attention.query",
        "the weights of `layers.0.attention.key`",
    ),
    named(
        "gamma_and_beta_exchanged",
        "Gamma and beta of each norm are taken for each other.",
        exchanged("LayerNorm.weight", "LayerNorm.bias"),
        "embeddings.norm",
        source="Vladkryvoruchko/PSPNet-Keras-tensorflow/issues/31",
    ),
    named(
        "norms_of_a_layer_exchanged",
        "The norm behind attention and that behind the feed-forward layers are exchanged.",
        exchanged("attention.output.LayerNorm", "output.LayerNorm"),
        "layers.0.norm1",
    ),
    refused(
        "two_names_for_one",
        "Two tensors are given one name, and the first one is lost.",
        tensors(as_position),
        "'bert.embeddings.LayerNorm.bias' has shape (13, 14)",
        "bigscience-workshop/Megatron-DeepSpeed/pull/327",
    ),
)


# How tensors are laid out (SPEC WGT-2).

NAME = "bert.encoder.layer.0.attention.self"

HEADS, HEAD = 2, 7
"""How many heads the model has, and how wide each is."""


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
    """Bring the rows of each head into the order of another layout of rotary positions.

    Which BERT has not: even ones, then odd ones.
    """
    rows = np.concatenate([np.arange(0, HEAD, 2), np.arange(1, HEAD, 2)])
    return array.reshape(HEADS, HEAD, *array.shape[1:])[:, rows].reshape(array.shape)


def heads_exchanged(array: Array) -> Array:
    return array.reshape(HEADS, HEAD, *array.shape[1:])[::-1].reshape(array.shape)


def fused_by_head(found: Arrays) -> Arrays:
    """Cut a fused weight, which has query, key and value of each head in turn, into three parts."""
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


LAYOUTS = section(
    "layouts",
    "WGT-2",
    refused(
        "linear_not_transposed",
        "Linear weights are written to Paddle as PyTorch keeps them.",
        tensors(all_turned),
        "has shape (17, 14) but must be (14, 17)",
        "PaddlePaddle/PaddleMIX/issues/239",
        format="paddlenlp",
    ),
    refused(
        "kernels_transposed",
        "Linear weights are written to PyTorch as Flax keeps them.",
        tensors(all_turned),
        "has shape (14, 17) but must be (17, 14)",
        "google/flax/pull/1848",
    ),
    named(
        "square_kernel_transposed",
        "What fits by its shape is not transposed: square weights stay as they were.",
        tensors(square_turned),
        "layers.0.attention.query",
        "transposed (WGT-2)",
        "huggingface/transformers/issues/47031",
    ),
    named(
        "square_kernel_not_transposed_for_paddle",
        "The same on the way to Paddle.",
        tensors(square_turned),
        "layers.0.attention.query",
        "transposed (WGT-2)",
        format="paddlenlp",
    ),
    named(
        "one_kernel_transposed",
        "One square weight is transposed.",
        changed(layer__1__attention__output__dense__weight=np.transpose),
        "layers.1.attention.output",
        "transposed (WGT-2)",
    ),
    refused(
        "table_transposed",
        "Embedding tables are transposed with the linear weights.",
        changed(word_embeddings__weight=np.transpose),
        "has shape (14, 29) but must be (29, 14)",
        "PaddlePaddle/PaddleNLP/pull/7341",
    ),
    named(
        "view_saved_as_its_storage",
        "A transposed view is saved with the view's shape and the storage's order.",
        changed(layer__0__intermediate__dense__weight=storage_order),
        "layers.0.feed_forward.inner",
        "memory order",
        "PaddlePaddle/PaddleX/pull/5208",
    ),
    named(
        "heads_permuted_for_rotary",
        (
            "Rows of query and key are permuted for rotary positions, which this model has not; the scores "
            "are the same."
        ),
        changed(
            self__query__weight=rotary,
            self__query__bias=rotary,
            self__key__weight=rotary,
            self__key__bias=rotary,
        ),
        "layers.0.attention.query",
        source="meta-pytorch/gpt-fast/issues/190",
    ),
    named(
        "query_permuted_alone",
        "Rows of the query are permuted, and those of the key by another number of heads.",
        changed(self__query__weight=rotary, self__query__bias=rotary),
        "layers.0.attention.query",
        source="huggingface/transformers/pull/31788",
    ),
    named(
        "heads_in_another_order",
        "Each head has the value of another.",
        changed(self__value__weight=heads_exchanged, self__value__bias=heads_exchanged),
        "layers.0.attention.value",
        "heads",
        clause="ATT-2",
    ),
    named(
        "fused_by_head_cut_in_thirds",
        "A fused weight has query, key and value head by head, and is cut into thirds.",
        tensors(fused_by_head),
        "layers.0.attention.query",
        source="JieShibo/MoLE/issues/9",
    ),
    harmless(
        "head_of_pretraining_transposed",
        "The head for next sentences is transposed, as Google has it; no classifier needs it.",
        both(
            tensors(lambda found: {**found, "cls.seq_relationship.weight": np.zeros((14, 2), np.float32)}),
            stated(architectures=["BertForPreTraining"]),
        ),
        "heads of pretraining",
        "CyberZHG/keras-bert/issues/137",
    ),
)


# Which tensors there are, and how many rows they have (SPEC WGT-1).

TOKEN = "bert.embeddings.word_embeddings.weight"

BIAS = "bert.encoder.layer.0.output.dense.bias"


def padded(rows: int) -> Any:
    """Return the change that adds rows of zeros to a table."""
    return lambda array: np.concatenate([array, np.zeros((rows, array.shape[1]), array.dtype)])


def shifted(rows: int) -> Any:
    """Return the change that moves the rows of a table down."""
    return lambda array: np.roll(array, rows, axis=0)


def one_column(array: Array) -> Array:
    return np.ascontiguousarray(array[:2])


TENSORS = section(
    "tensors",
    "WGT-1",
    refused(
        "pooler_missing",
        "The pooler was not saved, and would be drawn anew.",
        without("pooler"),
        "'bert.pooler.dense.weight' is missing",
        f"{TRANSFORMERS}/issues/8887",
    ),
    refused("bias_missing", "A bias is left out.", without(BIAS), f"{BIAS!r} is missing"),
    refused(
        "layer_missing",
        "The configuration counts a layer more than there are.",
        stated(num_hidden_layers=3),
        "'bert.encoder.layer.2.attention.self.query.weight' is missing",
        "ggml-org/llama.cpp/pull/26942",
    ),
    refused(
        "layer_dropped",
        "The configuration counts a layer less than there are, and it would be dropped.",
        stated(num_hidden_layers=1),
        "'bert.encoder.layer.1.attention.self.query.weight' is unexpected",
        "RBLN-SW/vllm-rbln/pull/970",
    ),
    named(
        "classifier_missing",
        "The classifier was not saved, and would be drawn anew: what is there is an encoder.",
        without("classifier"),
        "",
        "an encoder",
        f"{TRANSFORMERS}/issues/19999",
    ),
    refused(
        "table_left_out_as_shared",
        "The token table shares its storage with the decoder, and only that is saved.",
        both(added(cls__predictions__decoder__weight=lambda found: found[TOKEN]), without("word_embeddings")),
        f"{TOKEN!r} is missing",
        f"{TRANSFORMERS}/issues/34759",
    ),
    harmless(
        "decoder_tied",
        "The decoder is saved besides the token table, a copy of it.",
        added(cls__predictions__decoder__weight=lambda found: found[TOKEN].copy()),
        f"a copy of {TOKEN!r}",
        f"{TRANSFORMERS}/issues/9635",
    ),
    harmless(
        "decoder_not_tied",
        "The decoder is no copy of the token table; no classifier needs it.",
        added(cls__predictions__decoder__weight=lambda found: found[TOKEN] + 1),
        "it is no copy of",
        f"{TRANSFORMERS}/issues/48154",
    ),
    harmless(
        "buffer_of_positions",
        "The numbers of positions are saved with the weights.",
        added(bert__embeddings__position_ids=lambda found: np.arange(13)[None]),
        "a buffer",
        f"{TRANSFORMERS}/issues/6882",
    ),
    harmless(
        "buffer_of_segments",
        "Segment ids of zeros are saved with the weights.",
        added(bert__embeddings__token_type_ids=lambda found: np.zeros((1, 13), np.int64)),
        "a buffer",
        f"{TRANSFORMERS}/issues/16779",
    ),
    refused(
        "buffer_of_positions_backwards",
        "The numbers of positions that are saved with the weights count backwards.",
        added(bert__embeddings__position_ids=lambda found: np.arange(13)[None, ::-1].copy()),
        "element 0 is 12 but must be 0",
    ),
    refused(
        "buffer_of_segments_of_ones",
        "The segment ids that are saved with the weights are not zeros.",
        added(bert__embeddings__token_type_ids=lambda found: np.ones((1, 13), np.int64)),
        "element 0 is 1 but must be 0",
    ),
    refused(
        "slots_of_another_model",
        "An optimizer's moments have not the shape of the tensor that they are kept for.",
        added(**{"bert/pooler/dense/bias/adam_m": lambda found: np.ones(3, np.float32)}),
        "has shape (3,) but must be (14,)",
        format="google-bert",
    ),
    harmless(
        "slots_of_adam",
        "Adam's moments and the number of steps lie among the weights, as TensorFlow saves them.",
        tensors(
            lambda found: {
                **found,
                **{
                    f"{name}/adam_{moment}": np.ones_like(array)
                    for name, array in found.items()
                    for moment in "mv"
                },
                "global_step": np.array(7),
            }
        ),
        "belongs to the optimizer",
        f"{TRANSFORMERS}/issues/98",
        format="google-bert",
    ),
    refused(
        "slots_of_an_unknown_optimizer",
        "An optimizer's state lies among the weights of a format that has no place for it.",
        added(exp_avg__0=lambda found: np.ones(3, np.float32)),
        "'exp_avg.0' is unexpected",
        f"{TRANSFORMERS}/issues/9797",
    ),
    refused(
        "adapters_beside",
        "Weights of adapters, which the model does not have, lie among them.",
        added(bert__encoder__layer__0__adapter__weight=lambda found: np.ones((3, 14), np.float32)),
        "is unexpected",
    ),
    refused(
        "vocabulary_padded_in_the_file_alone",
        "The token table is padded to a multiple of eight; the configuration says otherwise.",
        changed(word_embeddings__weight=padded(3)),
        "has shape (32, 14) but must be (29, 14)",
        "NVIDIA/DeepLearningExamples/issues/1275",
        clause="EMB-1",
    ),
    harmless(
        "vocabulary_padded",
        "The token table is padded to a multiple of eight, and the configuration says so.",
        both(changed(word_embeddings__weight=padded(3)), stated(vocab_size=32)),
        source="THUDM/Chinese-Transformer-XL/issues/3",
        clause="EMB-1",
    ),
    named(
        "special_tokens_moved",
        "The token table has rows for special tokens first, the vocabulary has them last.",
        changed(word_embeddings__weight=shifted(4)),
        "embeddings.token",
        source="facebookresearch/fairseq/issues/2004",
        clause="EMB-1",
    ),
    refused(
        "segments_counted_otherwise",
        "The configuration counts another number of segments than the table has.",
        stated(type_vocab_size=3),
        "has shape (2, 14) but must be (3, 14)",
        "castorini/duobert/issues/4",
        clause="EMB-5",
    ),
    named(
        "segments_exchanged",
        "The two rows of the segment table are exchanged.",
        changed(token_type_embeddings__weight=shifted(1)),
        "embeddings.segment",
        clause="EMB-5",
    ),
    named(
        "positions_shifted_by_padding",
        "The rows of positions are moved by the padding id and one, as RoBERTa counts.",
        changed(position_embeddings__weight=shifted(2)),
        "embeddings.position",
        source="huggingface/sentence-transformers/pull/3879",
        clause="POS-5",
    ),
    refused(
        "positions_with_rows_for_padding",
        "The table of positions has two more rows, as RoBERTa's has.",
        changed(position_embeddings__weight=padded(2)),
        "has shape (15, 14) but must be (13, 14)",
        f"{TRANSFORMERS}/issues/1363",
        clause="POS-5",
    ),
    refused(
        "positions_cut",
        "The configuration has fewer positions than the table.",
        stated(max_position_embeddings=5),
        "has shape (13, 14) but must be (5, 14)",
        "huggingface/sentence-transformers/issues/3347",
        clause="POS-5",
    ),
    refused(
        "classifier_of_another_size",
        "The classifier has another number of classes than the configuration.",
        changed(classifier__weight=one_column, classifier__bias=one_column),
        "'classifier.weight' has shape (2, 14) but must be (3, 14)",
        f"{TRANSFORMERS}/issues/14218",
        clause="HED-3",
    ),
)


# What is in tensors (SPEC WGT-3, WGT-4).


OUTER = "layer__1__output__dense__weight"


def cast(dtype: str) -> Any:
    """Return the change of all tensors to a dtype."""
    return tensors(lambda found: {name: array.astype(dtype) for name, array in found.items()})


def upper_half(array: Array) -> StoredTensor:
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


NUMBERS = section(
    "numbers",
    "WGT-4",
    named(
        "weights_in_float16",
        "All weights were cast to float16.",
        cast("float16"),
        "embeddings.token",
        "float16",
        "google/saxml/issues/28",
    ),
    named(
        "one_tensor_in_bfloat16",
        "One tensor is saved in bfloat16, all others as they were.",
        changed(word_embeddings__weight=upper_half),
        "embeddings.token",
        "bfloat16",
        "huggingface/transformers/issues/46167",
    ),
    harmless(
        "weights_widened",
        "All weights were cast to float64, which changes none.",
        cast("float64"),
        source="huggingface/transformers/issues/12062",
    ),
    refused(
        "weights_in_whole_numbers",
        "A quantised weight, without its scale, stands where the weight should.",
        changed(**{OUTER: lambda array: np.round(array * 100).astype(np.int8)}),
        "has dtype int8 but must be a floating-point type",
        clause="WGT-3",
    ),
    refused(
        "weight_not_a_number",
        "A weight is NaN.",
        changed(**{OUTER: with_element(float("nan"))}),
        "holds NaN or infinity",
        "NVIDIA/FasterTransformer/issues/221",
        clause="WGT-3",
    ),
    refused(
        "weight_beyond_float16",
        "A weight was too large for float16, and is infinite.",
        tensors(overflowing),
        "holds NaN or infinity",
        "microsoft/onnxruntime/issues/11384",
        clause="WGT-3",
    ),
    named(
        "weight_of_another_run",
        "One tensor is another checkpoint's.",
        changed(
            **{
                OUTER: lambda array: (
                    np.random.default_rng(1).permutation(array.reshape(-1)).reshape(array.shape)
                )
            }
        ),
        "layers.1.feed_forward.outer",
    ),
    named(
        "element_nudged",
        "One element is off by a hundredth.",
        changed(**{OUTER: lambda array: with_element(float(array[3, 5]) * 1.01)(array)}),
        "layers.1.feed_forward.outer",
    ),
    named(
        "weight_zero",
        "A weight was allocated, and never filled.",
        changed(**{OUTER: np.zeros_like}),
        "layers.1.feed_forward.outer",
        source="GeeeekExplorer/nano-vllm/pull/264",
    ),
    named(
        "bytes_in_the_other_order",
        "Norms were written by a machine that has the most significant byte first.",
        changed(embeddings__LayerNorm__weight=lambda array: array.byteswap()),
        "embeddings.norm",
        source="safetensors/safetensors/issues/307",
    ),
)


# What is said of the model (SPEC CFG-1).


CONFIGURATION = section(
    "configuration",
    "CFG-1",
    named(
        "epsilon_of_another_framework",
        "Norms have the epsilon that the framework has by default, 1e-5.",
        stated(layer_norm_eps=1e-5),
        "embeddings.norm",
        "norm_epsilon = 1e-05 instead of 1e-12 (NRM-2)",
        "keras-team/keras-hub/issues/642",
        clause="NRM-2",
    ),
    harmless(
        "epsilon_not_stated",
        "Epsilon is not stated, and so is BERT's.",
        stated(layer_norm_eps=None),
        source=f"{TRANSFORMERS}/issues/532",
        clause="NRM-2",
    ),
    named(
        "gelu_of_another_form",
        "GELU is approximated by tanh.",
        stated(hidden_act="gelu_new"),
        "layers.0.feed_forward.activation",
        "activation = gelu_tanh instead of gelu_erf (FFN-2)",
        "CyberZHG/keras-bert/issues/129",
        clause="FFN-2",
    ),
    refused(
        "gelu_by_another_name",
        "GELU is called by the name of a function that the family does not have.",
        stated(hidden_act="quick_gelu"),
        "'hidden_act' is 'quick_gelu'",
        "chengchingwen/Transformers.jl/pull/209",
        clause="FFN-2",
    ),
    named(
        "heads_taken_for_layers",
        "There are as many heads as the model has columns in a head.",
        stated(num_attention_heads=7),
        "layers.0.attention.query",
        source="rasbt/LLMs-from-scratch/issues/444",
        clause="ATT-2",
    ),
    refused(
        "heads_that_do_not_divide",
        "The number of heads does not divide the width.",
        stated(num_attention_heads=3),
        "num_heads",
        "ramanathanlab/genslm/issues/110",
        clause="ATT-2",
    ),
    named(
        "padding_of_another_tokenizer",
        "The padding id is that of another tokenizer.",
        stated(pad_token_id=1),
        "layers.0.attention.masked_scores",
        "pad_id = 1 instead of 0 (MSK-1)",
        f"{TRANSFORMERS}/issues/10869",
        clause="MSK-1",
    ),
    refused(
        "model_of_another_type",
        "The model is of another type, which counts its positions otherwise.",
        stated(model_type="gpt2"),
        "'model_type' is \"gpt2\"",
        f"{TRANSFORMERS}/issues/16773",
    ),
    refused(
        "positions_relative",
        "Positions are relative, which the file has no tensors for.",
        stated(position_embedding_type="relative_key"),
        "'position_embedding_type' is \"relative_key\"",
    ),
    refused(
        "classes_not_numbered_from_zero",
        "Classes are numbered from one.",
        stated(id2label={"1": "a", "2": "b", "3": "c"}),
        "'id2label' must number its labels 0, 1",
    ),
    refused(
        "width_not_stated", "The width of the model is not stated.", stated(hidden_size=None), "hidden_size"
    ),
    harmless(
        "entries_that_say_nothing",
        "Entries of newer versions stand beside the others.",
        stated(transformers_version="5.0.0", attn_implementation="sdpa", use_cache=True),
    ),
)


# What lies beside the weights and belongs to the model: labels and the tokenizer.


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Edit:
    """Return the edit of a file beside the weights."""

    def edit(folder: Path, form: Format) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return edit


def entries(name: str, **said: Any) -> Edit:
    """Return the edit of what a file says."""
    return rewritten(name, lambda content: json.dumps({**json.loads(content), **said}).encode())


def left_out(*names: str) -> Edit:
    """Return the edit that does not copy files."""

    def edit(folder: Path, form: Format) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def labelled(*names: str) -> Edit:
    """Return the edit of the names of classes."""
    return stated(
        id2label={str(number): name for number, name in enumerate(names)},
        label2id={name: number for number, name in enumerate(names)},
    )


WITHOUT_A_LINE = "\n".join([*TOKENS[:5], *TOKENS[6:], ""]).encode()


BESIDE = section(
    "beside the weights",
    "INP-1",
    named(
        "labels_in_another_order",
        "Classes are named in the order of another data set.",
        labelled(*LABELS[1:], LABELS[0]),
        "",
        'labels: 0 is "no" in the right one and "maybe" in the wrong one',
        "QData/TextAttack/issues/684",
        clause="INP-3",
    ),
    named(
        "labels_of_nobody",
        "The names of the classes were not carried over, and are those of a model that nobody has named.",
        labelled("LABEL_0", "LABEL_1", "LABEL_2"),
        "",
        "labels: only the right one has it",
        clause="INP-3",
    ),
    refused(
        "labels_left_out",
        "The names of the classes were left out, and with them how many there are.",
        stated(id2label=None, label2id=None),
        "has shape (3,) but must be (2,)",
        clause="INP-3",
    ),
    named(
        "tokenizer_left_out",
        "The tokenizer was not copied.",
        left_out("tokenizer.json", "vocab.txt"),
        "",
        "tokenizer.json: only the right one has it",
        f"{TRANSFORMERS}/issues/1030",
    ),
    named(
        "vocabulary_of_another_order",
        "An empty line of the vocabulary was not counted, and all that follow are one too low.",
        rewritten("vocab.txt", lambda _: WITHOUT_A_LINE),
        "",
        'vocab.txt: line 6 is "t5"',
        "pytorch/text/issues/1840",
    ),
    named(
        "letters_kept_large",
        "The tokenizer of a model of small letters keeps large ones.",
        entries("tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": False}),
        "",
        "normalizer.lowercase is true in the right one and false in the wrong one",
        "huggingface/tokenizers/issues/695",
    ),
    named(
        "accents_kept",
        "The tokenizer keeps accents, as an older version did.",
        entries(
            "tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": True, "strip_accents": False}
        ),
        "",
        "normalizer.strip_accents is absent",
        f"{TRANSFORMERS}/issues/2917",
    ),
    named(
        "texts_cut_shorter",
        "Texts may be shorter than before.",
        entries("tokenizer_config.json", model_max_length=7),
        "",
        "model_max_length is 13 in the right one and 7 in the wrong one",
        "huggingface/text-embeddings-inference/issues/146",
        clause="INP-2",
    ),
    named(
        "letters_of_sentences_made_small",
        (
            "What a folder of sentence-transformers does to letters before its tokenizer was taken for what "
            "the tokenizer does."
        ),
        entries(LENGTHS, do_lower_case=True),
        "",
        "do_lower_case is false",
        "vllm-project/vllm/pull/11815",
        format="torch",
    ),
    named(
        "prompt_forgotten",
        "The text that was put before each text is not put there any more.",
        entries(PROMPTS, default_prompt_name=None),
        "",
        'default_prompt_name is "query"',
        format="torch",
    ),
    harmless(
        "tokenizer_saved_anew",
        "The tokenizer was saved by another version, which writes the same entries otherwise.",
        rewritten(
            "tokenizer.json",
            lambda content: json.dumps(json.loads(content), indent=4, sort_keys=True).encode(),
        ),
    ),
    harmless(
        "versions_of_another_machine",
        "The versions of libraries that wrote the folder are others.",
        entries(PROMPTS, __version__={"pytorch": "1.6.0"}),
        format="torch",
    ),
)


ALL: tuple[ConversionBug, ...] = (*NAMES, *LAYOUTS, *TENSORS, *NUMBERS, *CONFIGURATION, *BESIDE, *FILES)

CONVERSION = {bug.name: bug for bug in ALL}
"""By name."""
