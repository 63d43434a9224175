"""Two checkpoints, tensor by tensor: each way in which ports go wrong has a name, and a likely cause."""

import dataclasses
import json

import numpy as np
import pytest

from concord import porting
from concord.porting.comparison import classify as classify_in
from concord.porting.comparison import compare
from concord.spec.precision import precision
from tests.toys.checkpoints import CONFIG, POOLED, WEIGHTS
from tests.toys.ready import headed

QUERY = "layers.0.attention.query.weight"
TOKEN, POSITION, GAMMA = "embeddings.token.weight", "embeddings.position.weight", "embeddings.norm.weight"


def classify(first, second):
    return classify_in(first, second, "", CONFIG)


def interleaved(array):
    return array.reshape(14, 2, 7).swapaxes(1, 2).reshape(14, 14)


WRONG = {
    "transposed": (QUERY, lambda a: a.T, "transposed", "since it is square"),
    "permuted": (
        QUERY,
        lambda a: np.roll(a, 7, 1),
        "2 heads stand in another order, the first at 0, 1",
        "reordered",
    ),
    "interleaved": (QUERY, interleaved, "heads interleaved", "(head_dim, heads)"),
    "shifted": (
        POSITION,
        lambda a: np.concatenate([a[-2:], a[:-2]]),
        "rows are shifted by 2",
        "counted from the padding id",
    ),
    "reordered": (
        TOKEN,
        lambda a: a[np.r_[0, 3, 2, 1, 4:29]],
        "2 rows stand in another order, the first at 1, 3",
        "vocabulary was reordered",
    ),
    "reordered units": (
        "layers.0.feed_forward.inner.weight",
        lambda a: a[:, ::-1],
        "16 columns stand in another order, the first at 0, 1",
        "model computes the same if all",
    ),
    "reordered classes": (
        "classifier.weight",
        lambda a: a[:, [0, 2, 1]],
        "2 columns stand in another order, the first at 1, 2",
        "the classes were reordered",
    ),
    "bfloat16": (QUERY, lambda a: precision("bfloat16").round(a), "rounded to bfloat16", "saved in"),
    "scaled": (TOKEN, lambda a: a * np.float32(np.sqrt(14)), "B is A times 3.7416", "the root of d_model"),
    "never loaded": (GAMMA, np.ones_like, "all numbers of B are 1", "never loaded"),
    "computed again": (
        QUERY,
        lambda a: np.nextafter(a, np.float32(9)),
        "the same but for the last digits",
        "computed again",
    ),
    "padding zeroed": (
        TOKEN,
        lambda a: a * (np.arange(29) > 0)[:, None],
        "1 rows differ, the first at 0",
        "row of padding",
    ),
    "different": (QUERY, lambda a: a[::-1] * a, "different: 196 of 196 numbers differ", ""),
}


def compared(weights, config=CONFIG, part="model"):
    """Return the comparison of the usual checkpoint with one of these."""
    return compare(porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(config, weights, part))


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_has_a_name_and_a_cause(mistake):
    name, change, words, cause = WRONG[mistake]
    other = {**WEIGHTS, name: np.asarray(change(WEIGHTS[name]), np.float32, order="C")}
    found = compared(other)
    (pair,) = found.pairs
    assert (pair.name, found.same, found.exit_code) == (name, len(WEIGHTS) - 1, 1)
    assert words in pair.words
    assert cause in pair.cause
    assert bool(pair.cause) == bool(cause)


def test_tensors_in_each_others_place_are_named():
    key, value = "layers.0.attention.key.weight", "layers.1.attention.value.weight"
    other = {
        **WEIGHTS,
        key: WEIGHTS[QUERY],
        QUERY: WEIGHTS[key],
        value: WEIGHTS["layers.0.attention.value.weight"],
    }
    pairs = {pair.name: pair for pair in compared(other).pairs}
    assert (pairs[key].other, pairs[QUERY].other) == (QUERY, key)
    assert "the wrong way" in pairs[key].cause
    assert "another" in pairs[value].cause


def test_the_same_numbers_in_another_dtype_are_told_from_others():
    wide = {name: array.astype(np.float64) for name, array in WEIGHTS.items()}
    found = compared(wide)
    assert {pair.kind for pair in found.pairs} == {"same numbers"}
    assert "float32 in A, float64 in B" in found.pairs[0].words


def test_rows_that_one_alone_has_and_options_are_named():
    padded = CONFIG.replace(vocab_size=31)
    other = {**WEIGHTS, TOKEN: np.concatenate([WEIGHTS[TOKEN], np.zeros((2, 14), np.float32)])}
    found = compared(other, padded)
    assert found.pairs[0].words == "B has 2 more rows; all others are the same"
    assert found.config == {"vocab_size": ("29", "31")}
    found = compared(POOLED, part="encoder")
    assert found.missing == ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    assert "4 missing in B" in found.summary
    assert found.exit_code == 1


def beside(first, second, labels=("abc", "abc")):
    mine, other = (
        dataclasses.replace(porting.from_weights(CONFIG, WEIGHTS, files=files), labels=tuple(names))
        for files, names in zip((first, second), labels, strict=True)
    )
    return compare(mine, other)


def test_what_lies_beside_the_weights_is_compared_by_what_it_says():
    cased = {
        "tokenizer.json": b'{"normalizer": {"lowercase": true, "strip": null}, "marks": [1, 2]}',
        "vocab.txt": b"a\nb\nc",
        "merges.txt": b"a",
    }
    found = beside(
        cased,
        {
            "tokenizer.json": b'{"marks": [1, 2, 3], "normalizer": {"lowercase": false}}',
            "vocab.txt": b"a\nc\nb",
            "text.json": b"{}",
        },
        ("abc", "acb"),
    )
    assert found.files == {
        "labels": '1 is "b" in A and "c" in B; 2 is "c" in A and "b" in B',
        "tokenizer.json": (
            "normalizer.lowercase is true in A and false in B; normalizer.strip is null in A and "
            "absent in B; marks[2] is absent in A and 3 in B"
        ),
        "vocab.txt": 'line 2 is "b" in A and "c" in B; line 3 is "c" in A and "b" in B',
    }
    assert (found.exit_code, found.alone) == (1, (("merges.txt",), ("text.json",)))
    assert found.summary.endswith("the same configuration; labels, tokenizer.json, vocab.txt differ")


def test_what_says_the_same_in_other_bytes_is_the_same():
    lengths, prompts = "sentence_bert_config.json", "config_sentence_transformers.json"
    mine = {
        "tokenizer.json": b'{"a": 1, "b": 2}',
        lengths: b'{"max_seq_length": 7}',
        prompts: b'{"__version__": {"pytorch": "1"}, "prompts": {}}',
    }
    found = beside(
        mine,
        {
            "tokenizer.json": b'{"b":2,"a":1}',
            lengths: b'{"max_seq_length": 7, "model_args": {}}',
            prompts: b'{"prompts": {}}',
        },
    )
    assert (found.files, found.exit_code) == ({}, 0)
    assert beside({"vocab.txt": "a\u2028\nb\n".encode()}, {"vocab.txt": "a\u2028\r\nb".encode()}).files == {}
    assert beside({"vocab.txt": "a\u2028\nb\n".encode()}, {"vocab.txt": "a\u2028\nc\n".encode()}).files == {
        "vocab.txt": 'line 2 is "b" in A and "c" in B'
    }
    assert beside(mine, {}).exit_code == 0  # one that has no tokenizer says nothing else
    token = beside(
        {"vocab.json": b'{"__version__": 1, "model_args": 2}'},
        {"vocab.json": b'{"__version__": 2, "model_args": 2}'},
    )
    assert token.files == {"vocab.json": "__version__ is 1 in A and 2 in B"}  # a token, there


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (b"\xff\xfe", b"{}", "all of it is 2 bytes, SHA-256 b3d510ef in A and {} in B"),
        (b"[" * 97 + b"1" + b"]" * 97, b"[" * 97 + b"2" + b"]" * 97, "[0] is 1 in A and 2 in B"),
        (b"[" * 100_000, b"[]", "all of it is 100000 bytes, SHA-256 13f86ea1 in A and [] in B"),
        (
            b'{"a\\nb": "' + b"x" * 99 + b'"}',
            b'{"a\\nb": [1]}',
            'x" in A and absent in B; a\\nb[0] is absent in A and 1 in B',
        ),
    ],
)
def test_files_beside_the_weights_that_cannot_be_understood_are_told_in_a_line(mine, other, words):
    said = beside({"tokenizer.json": mine}, {"tokenizer.json": other}).files["tokenizer.json"]
    assert said.endswith(words)
    assert "\n" not in said


def test_the_command_compares_formats(entered, tmp_path):
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "a", "concord")
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "b", "jax-msgpack")
    porting.write(
        porting.from_weights(CONFIG, {**WEIGHTS, QUERY: WEIGHTS[QUERY].T.copy()}), tmp_path / "c", "torch"
    )
    output, _ = entered("diff", tmp_path / "a", tmp_path / "b")
    assert "41 of 41 parameters have the same bits; the same configuration" in output
    output, _ = entered("diff", tmp_path / "b", tmp_path / "c", "--json", tmp_path / "diff.json", ends=1)
    assert f"{QUERY}: transposed" in output
    said = json.loads((tmp_path / "diff.json").read_text())
    assert [(pair["name"], pair["kind"]) for pair in said["pairs"]] == [(QUERY, "transposed")]


# What is not finite, and zeros.

OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
PLACE = (3, 5)


def with_number(value):
    found = WEIGHTS[QUERY].copy()
    found[PLACE] = value
    return found


ODD = {
    "NaN in one": (
        0.5,
        np.nan,
        "1 rows differ, the first at 3: 1 of 196 numbers differ; of these 1 is not finite",
    ),
    "NaN in both": (
        np.nan,
        OTHER_NAN,
        "1 rows differ, the first at 3: 1 of 196 numbers differ; of these 1 is not finite",
    ),
    "NaN for infinity": (
        np.nan,
        -np.inf,
        "1 rows differ, the first at 3: 1 of 196 numbers differ; of these 1 is not finite",
    ),
    "zeros": (0.0, -0.0, "the same but for the last digits: 1 of 196 numbers differ"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_finite_is_called_what_it_is(what):
    one, other, words = ODD[what]
    found = classify(with_number(one), with_number(other))
    assert found.words == words


def test_the_same_nan_is_no_difference_and_hides_none():
    array = with_number(np.nan)
    assert classify(array, array.copy()).kind == "same"
    assert classify(array, array.T.copy()).kind == "transposed"
    assert classify(array, array.astype(np.float64)).kind == "same numbers"
    near = classify(array, np.nextafter(array, np.float32(9)))
    assert near.words.startswith("the same but for the last digits: 195 of 196 numbers differ, by")
    assert "of these" not in near.words
    assert classify(array, np.full_like(array, np.nan)).words == "all numbers of B are nan"


def test_the_end_of_a_large_tensor_is_looked_at_too(monkeypatch):
    monkeypatch.setattr("concord.porting.comparison.difference.WHOLE", 53)
    array = np.random.default_rng(3).standard_normal((97, 7))
    for change in (
        lambda numbers: np.nextafter(numbers, 9),
        lambda numbers: numbers * 3,
    ):
        assert classify(array, change(array)).kind in ("rounding", "scaled")
        wrong = change(array)
        wrong[31:] += np.random.default_rng(4).standard_normal((66, 7))
        assert classify(array, wrong).kind == "different"


# What is no parameter.

DENSE = "cls.predictions.transform.dense.weight"


@pytest.mark.parametrize(
    "format", ["hugging-face-bin", "hugging-face-flax", "hugging-face-tf", "google-bert", "paddlenlp"]
)
def test_heads_are_compared_across_names_and_layouts(tmp_path, format):
    one = porting.read(headed(tmp_path / "one"))
    porting.write(one, tmp_path / "ported", format)
    found = compare(one, porting.read(tmp_path / "ported"))
    assert (found.others.same, found.others.pairs, found.others.apart, found.exit_code) == (7, (), {}, 0)
    other = porting.read(
        headed(tmp_path / "other", cls__predictions__transform__dense__weight=np.eye(14, dtype=np.float32))
    )
    found = compare(other, porting.read(tmp_path / "ported"))
    assert ([pair.name for pair in found.others.pairs], found.exit_code) == ([DENSE], 1)


def test_what_cannot_be_compared_is_named_and_never_the_same(entered, tmp_path):
    one = headed(tmp_path / "one", cls__strange=np.arange(7))
    porting.write(porting.read(one), tmp_path / "own", "concord")
    said = entered("diff", one, tmp_path / "own")[0].replace("\n", " ")
    assert f"{DENSE}, which is no parameter, was not compared: is in A alone" in said
    assert "8 not compared" in said
    porting.write(
        dataclasses.replace(porting.read(one), source="", others={}),
        tmp_path / "flax",
        "hugging-face-flax",
    )
    flax = porting.read(tmp_path / "flax")
    strange = porting.read(one).others["cls.strange"]
    moved = dataclasses.replace(strange, bits=lambda: np.arange(7)[::-1])
    found = compare(porting.read(one), dataclasses.replace(flax, others={"cls.strange": moved}))
    assert found.others.apart["cls.strange"] == "no table says how it is laid out in files of both kinds"


def test_a_decoder_that_is_no_copy_differs_from_one_that_is(tmp_path):
    untied = headed(tmp_path / "untied", cls__predictions__decoder__weight=np.zeros((25, 14), np.float32))
    found = compare(porting.read(headed(tmp_path / "tied")), porting.read(untied))
    assert ([pair.name for pair in found.others.pairs], found.exit_code) == (
        ["cls.predictions.decoder.weight"],
        1,
    )
