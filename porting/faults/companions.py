"""What lies beside the weights and belongs to the model: labels and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from concord.porting.faults.fault import HUB, LABELS, TOKENS, ConversionFault, Edit, stated
from concord.porting.folder import LENGTHS, PROMPTS
from concord.porting.registry import Format

TRANSFORMERS = "huggingface/transformers"


def fault(
    name: str, what: str, edit: Edit, expected: Any, says: str, source: str, **fields: Any
) -> ConversionFault:
    return ConversionFault(
        **{
            "name": name,
            "group": "companions",
            "what": what,
            "clause": "INP-1",
            "edit": edit,
            "expected": expected,
            "says": says,
            "source": source and HUB + source,
            **fields,
        }
    )


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

FAULTS = (
    fault(
        "labels_in_another_order",
        "Classes are named in the order of another data set.",
        labelled(*LABELS[1:], LABELS[0]),
        "named",
        'labels: 0 is "no" in the right one and "maybe" in the wrong one',
        "QData/TextAttack/issues/684",
        clause="INP-3",
    ),
    fault(
        "labels_of_nobody",
        "The names of the classes were not carried over, and are those of a model that nobody has named.",
        labelled("LABEL_0", "LABEL_1", "LABEL_2"),
        "named",
        "labels: only the right one has it",
        "",
        clause="INP-3",
    ),
    fault(
        "labels_left_out",
        "The names of the classes were left out, and with them how many there are.",
        stated(id2label=None, label2id=None),
        "refused",
        "has shape (3,) but must be (2,)",
        "",
        clause="INP-3",
    ),
    fault(
        "tokenizer_left_out",
        "The tokenizer was not copied.",
        left_out("tokenizer.json", "vocab.txt"),
        "named",
        "tokenizer.json: only the right one has it",
        f"{TRANSFORMERS}/issues/1030",
    ),
    fault(
        "vocabulary_of_another_order",
        "An empty line of the vocabulary was not counted, and all that follow are one too low.",
        rewritten("vocab.txt", lambda _: WITHOUT_A_LINE),
        "named",
        'vocab.txt: line 6 is "t5"',
        "pytorch/text/issues/1840",
    ),
    fault(
        "letters_kept_large",
        "The tokenizer of a model of small letters keeps large ones.",
        entries("tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": False}),
        "named",
        "normalizer.lowercase is true in the right one and false in the wrong one",
        "huggingface/tokenizers/issues/695",
    ),
    fault(
        "accents_kept",
        "The tokenizer keeps accents, as an older version did.",
        entries(
            "tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": True, "strip_accents": False}
        ),
        "named",
        "normalizer.strip_accents is absent",
        f"{TRANSFORMERS}/issues/2917",
    ),
    fault(
        "texts_cut_shorter",
        "Texts may be shorter than before.",
        entries("tokenizer_config.json", model_max_length=7),
        "named",
        "model_max_length is 13 in the right one and 7 in the wrong one",
        "huggingface/text-embeddings-inference/issues/146",
        clause="INP-2",
    ),
    fault(
        "letters_of_sentences_made_small",
        "What a folder of sentence-transformers does to letters before its tokenizer was taken for what the tokenizer does.",
        entries(LENGTHS, do_lower_case=True),
        "named",
        "do_lower_case is false",
        "vllm-project/vllm/pull/11815",
        format="torch",
    ),
    fault(
        "prompt_forgotten",
        "The text that was put before each text is not put there any more.",
        entries(PROMPTS, default_prompt_name=None),
        "named",
        'default_prompt_name is "query"',
        "",
        format="torch",
    ),
    fault(
        "tokenizer_saved_anew",
        "The tokenizer was saved by another version, which writes the same entries otherwise.",
        rewritten(
            "tokenizer.json",
            lambda content: json.dumps(json.loads(content), indent=4, sort_keys=True).encode(),
        ),
        "harmless",
        "",
        "",
    ),
    fault(
        "versions_of_another_machine",
        "The versions of libraries that wrote the folder are others.",
        entries(PROMPTS, __version__={"pytorch": "1.6.0"}),
        "harmless",
        "",
        "",
        format="torch",
    ),
)
