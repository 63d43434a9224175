"""Which tensors there are, and how many rows they have (SPEC WGT-1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from concord.porting.faults.fault import (
    HUB,
    Array,
    ConversionFault,
    Edit,
    added,
    both,
    changed,
    stated,
    tensors,
    without,
)

TRANSFORMERS = "huggingface/transformers"

TOKEN = "bert.embeddings.word_embeddings.weight"

BIAS = "bert.encoder.layer.0.output.dense.bias"


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "tensors",
            "what": what,
            "clause": "WGT-1",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


def padded(rows: int) -> Any:
    """Return the change that adds rows of zeros to a table."""
    return lambda array: np.concatenate([array, np.zeros((rows, array.shape[1]), array.dtype)])


def shifted(rows: int) -> Any:
    """Return the change that moves the rows of a table down."""
    return lambda array: np.roll(array, rows, axis=0)


def one_column(array: Array) -> Array:
    return np.ascontiguousarray(array[:2])


FAULTS = (
    fault(
        "pooler_missing",
        "The pooler was not saved, and would be drawn anew.",
        without("pooler"),
        "refused",
        "'bert.pooler.dense.weight' is missing",
        f"{TRANSFORMERS}/issues/8887",
    ),
    fault("bias_missing", "A bias is left out.", without(BIAS), "refused", f"{BIAS!r} is missing", ""),
    fault(
        "layer_missing",
        "The configuration counts a layer more than there are.",
        stated(num_hidden_layers=3),
        "refused",
        "'bert.encoder.layer.2.attention.self.query.weight' is missing",
        "ggml-org/llama.cpp/pull/26942",
    ),
    fault(
        "layer_dropped",
        "The configuration counts a layer less than there are, and it would be dropped.",
        stated(num_hidden_layers=1),
        "refused",
        "'bert.encoder.layer.1.attention.self.query.weight' is unexpected",
        "RBLN-SW/vllm-rbln/pull/970",
    ),
    fault(
        "classifier_missing",
        "The classifier was not saved, and would be drawn anew: what is there is an encoder.",
        without("classifier"),
        "named",
        "an encoder",
        f"{TRANSFORMERS}/issues/19999",
    ),
    fault(
        "table_left_out_as_shared",
        "The token table shares its storage with the decoder, and only that is saved.",
        both(added(cls__predictions__decoder__weight=lambda found: found[TOKEN]), without("word_embeddings")),
        "refused",
        f"{TOKEN!r} is missing",
        f"{TRANSFORMERS}/issues/34759",
    ),
    fault(
        "decoder_tied",
        "The decoder is saved besides the token table, a copy of it.",
        added(cls__predictions__decoder__weight=lambda found: found[TOKEN].copy()),
        "harmless",
        f"a copy of {TOKEN!r}",
        f"{TRANSFORMERS}/issues/9635",
    ),
    fault(
        "decoder_not_tied",
        "The decoder is no copy of the token table; no classifier needs it.",
        added(cls__predictions__decoder__weight=lambda found: found[TOKEN] + 1),
        "harmless",
        "it is no copy of",
        f"{TRANSFORMERS}/issues/48154",
    ),
    fault(
        "buffer_of_positions",
        "The numbers of positions are saved with the weights.",
        added(bert__embeddings__position_ids=lambda found: np.arange(13)[None]),
        "harmless",
        "a buffer",
        f"{TRANSFORMERS}/issues/6882",
    ),
    fault(
        "buffer_of_segments",
        "Segment ids of zeros are saved with the weights.",
        added(bert__embeddings__token_type_ids=lambda found: np.zeros((1, 13), np.int64)),
        "harmless",
        "a buffer",
        f"{TRANSFORMERS}/issues/16779",
    ),
    fault(
        "buffer_of_positions_backwards",
        "The numbers of positions that are saved with the weights count backwards.",
        added(bert__embeddings__position_ids=lambda found: np.arange(13)[None, ::-1].copy()),
        "refused",
        "element 0 is 12 but must be 0",
        "",
    ),
    fault(
        "buffer_of_segments_of_ones",
        "The segment ids that are saved with the weights are not zeros.",
        added(bert__embeddings__token_type_ids=lambda found: np.ones((1, 13), np.int64)),
        "refused",
        "element 0 is 1 but must be 0",
        "",
    ),
    fault(
        "slots_of_another_model",
        "An optimizer's moments have not the shape of the tensor that they are kept for.",
        added(**{"bert/pooler/dense/bias/adam_m": lambda found: np.ones(3, np.float32)}),
        "refused",
        "has shape (3,) but must be (14,)",
        "",
        format="google-bert",
    ),
    fault(
        "slots_of_adam",
        "Adam's moments and the number of steps lie among the weights, as TensorFlow saves them.",
        tensors(
            lambda found: {
                **found,
                **{
                    f"{name}/adam_{slot}": np.ones_like(array)
                    for name, array in found.items()
                    for slot in "mv"
                },
                "global_step": np.array(7),
            }
        ),
        "harmless",
        "belongs to the optimizer",
        f"{TRANSFORMERS}/issues/98",
        format="google-bert",
    ),
    fault(
        "slots_of_an_unknown_optimizer",
        "An optimizer's state lies among the weights of a format that has no place for it.",
        added(exp_avg__0=lambda found: np.ones(3, np.float32)),
        "refused",
        "'exp_avg.0' is unexpected",
        f"{TRANSFORMERS}/issues/9797",
    ),
    fault(
        "adapters_beside",
        "Weights of adapters, which the model does not have, lie among them.",
        added(bert__encoder__layer__0__adapter__weight=lambda found: np.ones((3, 14), np.float32)),
        "refused",
        "is unexpected",
        "",
    ),
    fault(
        "vocabulary_padded_in_the_file_alone",
        "The token table is padded to a multiple of eight; the configuration says otherwise.",
        changed(word_embeddings__weight=padded(3)),
        "refused",
        "has shape (32, 14) but must be (29, 14)",
        "NVIDIA/DeepLearningExamples/issues/1275",
        clause="EMB-1",
    ),
    fault(
        "vocabulary_padded",
        "The token table is padded to a multiple of eight, and the configuration says so.",
        both(changed(word_embeddings__weight=padded(3)), stated(vocab_size=32)),
        "harmless",
        "",
        "THUDM/Chinese-Transformer-XL/issues/3",
        clause="EMB-1",
    ),
    fault(
        "special_tokens_moved",
        "The token table has rows for special tokens first, the vocabulary has them last.",
        changed(word_embeddings__weight=shifted(4)),
        "named",
        "",
        "facebookresearch/fairseq/issues/2004",
        first="embeddings.token",
        clause="EMB-1",
    ),
    fault(
        "segments_counted_otherwise",
        "The configuration counts another number of segments than the table has.",
        stated(type_vocab_size=3),
        "refused",
        "has shape (2, 14) but must be (3, 14)",
        "castorini/duobert/issues/4",
        clause="EMB-5",
    ),
    fault(
        "segments_exchanged",
        "The two rows of the segment table are exchanged.",
        changed(token_type_embeddings__weight=shifted(1)),
        "named",
        "",
        "",
        first="embeddings.segment",
        clause="EMB-5",
    ),
    fault(
        "positions_shifted_by_padding",
        "The rows of positions are moved by the padding id and one, as RoBERTa counts.",
        changed(position_embeddings__weight=shifted(2)),
        "named",
        "",
        "huggingface/sentence-transformers/pull/3879",
        first="embeddings.position",
        clause="POS-5",
    ),
    fault(
        "positions_with_rows_for_padding",
        "The table of positions has two more rows, as RoBERTa's has.",
        changed(position_embeddings__weight=padded(2)),
        "refused",
        "has shape (15, 14) but must be (13, 14)",
        f"{TRANSFORMERS}/issues/1363",
        clause="POS-5",
    ),
    fault(
        "positions_cut",
        "The configuration has fewer positions than the table.",
        stated(max_position_embeddings=5),
        "refused",
        "has shape (13, 14) but must be (5, 14)",
        "huggingface/sentence-transformers/issues/3347",
        clause="POS-5",
    ),
    fault(
        "classifier_of_another_size",
        "The classifier has another number of classes than the configuration.",
        changed(classifier__weight=one_column, classifier__bias=one_column),
        "refused",
        "'classifier.weight' has shape (2, 14) but must be (3, 14)",
        f"{TRANSFORMERS}/issues/14218",
        clause="HED-3",
    ),
)
