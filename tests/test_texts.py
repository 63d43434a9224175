import json

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer, Tokenizer, models, pre_tokenizers, processors

from concord import porting, spec
from concord.porting.texts import Text, TextEncoder, batch_of, read_texts
from tests.toys.ready import CONFIG, VOCABULARY, WORDS
from tests.toys.surroundings import refusal

FILES = {"vocab.txt": VOCABULARY.encode()}


def encoder(files=FILES, config=CONFIG):
    return TextEncoder(porting.Checkpoint(config, "model", {}, files=files))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.txt", "one\ntwo\tthree\r\n", [Text("one"), Text("two", "three")]),
        ("t.txt", "\ufeff天气 好\u2028吗", [Text("天气 好\u2028吗")]),
        ("t.jsonl", '{"text_a": "a", "text_b": "b", "label": "yes"}', [Text("a", "b", "yes")]),
    ],
)
def test_texts_are_read_as_the_name_of_the_file_says(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert read_texts(path) == expected


def test_lines_that_are_no_texts_are_listed_together(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("one\n\na\tb\tc\na\t \n")
    assert refusal(read_texts, path) == [
        f"{path}: line 2 is empty",
        f"{path}:3 has 3 columns but must have one text, or two separated by a tab",
        f"{path}:4: text 2 is empty",
    ]
    path = tmp_path / "t.jsonl"
    path.write_text('[1]\n{"text": 3, "label": 1}\n{"label": "a"}\n')
    assert refusal(read_texts, path) == [
        f"{path}:1 holds a value of type list but must hold a JSON object",
        f"{path}:2: 'text_a' is 3 but must be a string",
        f"{path}:2: 'label' is 1 but must be a string",
        f"{path}:3: 'text_a' is null but must be a string",
    ]


def test_the_longer_text_of_a_pair_is_cut_first():
    full, cut = (
        encoder({**FILES, "tokenizer_config.json": json.dumps({"model_max_length": most}).encode()}).encode(
            [Text("the cat", "a dog sat on the bank, quick")]
        )[0]
        for most in (19, 9)
    )
    assert (full.truncated, cut.truncated, len(cut.ids)) == (0, len(full.ids) - 9, 9)
    assert cut.tokens == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "sat", "on", "[SEP]"]
    assert cut.segment_ids == [0] * 4 + [1] * 5
    assert cut.places == [None, 0, 0, None, 1, 1, 1, 1, None]


def test_texts_are_those_of_a_roberta():
    marks = ["<s>", "<pad>", "</s>", "<unk>"]
    entries = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    tokenizer.add_special_tokens(marks)
    own = encoder(
        {"tokenizer.json": tokenizer.to_str().encode()},
        spec.variant("roberta", vocab_size=260, max_positions=41),
    )
    (text,) = own.encode([Text("café, 天气", "naïve")])
    assert text.ids == tokenizer.encode("café, 天气", "naïve").ids
    (long,) = own.encode([Text("a" * 99, "b" * 99)])
    assert (len(long.ids), long.ids.count(2), long.truncated) == (39, 3, 198 - 35)


@pytest.mark.parametrize(
    ("stated", "lower"),
    [
        ({"do_lower_case": False}, False),
        ({"do_lower_case": True, "tokenizer_class": "BertTokenizerFast"}, True),
        ({"tokenizer_class": "DistilBertTokenizer"}, True),  # transformers' default
        ({"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, None),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_a_bert_tokenizer_lowers_letters_as_its_configuration_says(stated, lower, stored):
    ids = {word: number for number, word in enumerate(WORDS)}
    own = encoder(
        {
            **{
                "tokenizer.json": BertWordPieceTokenizer(ids, lowercase=stored).to_str().encode(),
                "config.json": b'{"model_type": "bert"}',
            },
            "tokenizer_config.json": json.dumps(stated).encode(),
        }
    )
    (result,) = own.encode([Text("the CAT")])
    assert (result.tokens[2] == "cat") == (stored if lower is None else lower)


def test_a_batch_is_as_wide_as_its_longest_text_and_rounded_up():
    texts = encoder().encode([Text("short"), Text("who said the dog ran")])
    assert batch_of(CONFIG, texts).input_ids.shape == (2, 7)
    batch = batch_of(CONFIG, texts, multiple=16)
    assert batch.input_ids.shape == (2, 16)
    assert batch.input_ids[0].tolist() == [2, WORDS.index("short"), 3, *[0] * 13]
    flat = batch_of(CONFIG.replace(pooling="flatten", pooler="none"), texts)
    assert flat.input_ids.shape == (2, CONFIG.max_positions)
    assert not np.any(batch.segment_ids)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no tokenizer: it lacks tokenizer.json and vocab.txt"),
        ({"tokenizer.json": Tokenizer(models.BPE()).to_str().encode()}, "tokenizer.json has no 'post_proc"),
        (
            {**FILES, "added_tokens.json": b'{"the": 5, "new": 25}'},
            "vocab.txt is not a valid tokenizer: 'new' was added to it; save the tokenizer as tokenizer.json",
        ),
        (
            {**FILES, "config.json": b'{"tokenizer_class": "BertJapaneseTokenizer"}'},
            "vocab.txt is not a valid tokenizer: it belongs to BertJapaneseTokenizer; save the tokenizer as",
        ),
        ({"vocab.txt": b"[UNK]\n\xff\n"}, "vocab.txt is not a valid tokenizer: 'utf-8' codec can't decode"),
        ({"vocab.txt": b"[PAD]\n[UNK]\na\n"}, "vocab.txt is not a valid tokenizer: sep_token not found"),
        (
            {**FILES, "tokenizer_config.json": b"[]"},
            "tokenizer_config.json holds a value of type list but must",
        ),
        (
            {**FILES, "config_sentence_transformers.json": json.dumps({"default_prompt_name": "q"}).encode()},
            "config_sentence_transformers.json: 'default_prompt_name' is \"q\" but must be the name of one",
        ),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(files, problem):
    assert refusal(encoder, files)[0].startswith(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pad_id": WORDS.index("cat")}, "'cat' the id 7, but the model hides that id as padding"),
        ({"vocab_size": 11}, "'sat' the id 11, but the model has only 11 tokens: is it another model's?"),
    ],
)
def test_a_token_that_the_model_hides_or_lacks_is_refused(changes, problem):
    own = encoder(config=CONFIG.replace(**changes))
    assert refusal(own.encode, [Text("the"), Text("the cat sat")])[0] == (
        f"the cat sat: the tokenizer gives {problem}" + " [clause=MSK-1]" * ("pad_id" in changes)
    )
