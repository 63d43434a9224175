"""Two checkpoints, tensor by tensor: each way in which ports go wrong has a name, and a likely cause."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord import porting
from concord.porting.comparison import compare
from concord.porting.difference import classify as classify_in
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


def test_another_dtype_other_sizes_and_what_is_missing_are_named():
    found = compared({name: array.astype(np.float64) for name, array in WEIGHTS.items()})
    assert {pair.kind for pair in found.pairs} == {"same numbers"}
    assert "float32 in A, float64 in B" in found.pairs[0].words
    other = {**WEIGHTS, TOKEN: np.concatenate([WEIGHTS[TOKEN], np.zeros((2, 14), np.float32)])}
    found = compared(other, CONFIG.replace(vocab_size=31))
    assert found.pairs[0].words == "B has 2 more rows; all others are the same"
    assert found.config == {"vocab_size": ("29", "31")}
    found = compared(POOLED, part="encoder")
    assert found.missing == ("pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias")
    assert found.exit_code == 1


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
    one, two = (porting.from_weights(CONFIG, WEIGHTS, files={"tokenizer.json": x}) for x in (mine, other))
    said = compare(one, two).files["tokenizer.json"]
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


def with_number(value):
    found = WEIGHTS[QUERY].copy()
    found[3, 5] = value
    return found


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (0.5, np.nan, "1 of 196 numbers differ; of these 1 is not finite"),
        (np.nan, OTHER_NAN, "1 of 196 numbers differ; of these 1 is not finite"),
        (np.nan, -np.inf, "1 of 196 numbers differ; of these 1 is not finite"),
        (0.0, -0.0, "the same but for the last digits: 1 of 196 numbers differ"),
    ],
)
def test_what_is_not_finite_is_called_what_it_is(one, other, words):
    found = classify(with_number(one), with_number(other))
    assert found.words.endswith(words)


@pytest.mark.parametrize("seed", range(12))
def test_numbers_that_are_not_finite_are_named_with_their_place_before_all_else(seed):
    draw = np.random.default_rng(seed)
    right = WEIGHTS[draw.choice([TOKEN, POSITION, QUERY, GAMMA, "classifier.weight"])]
    wrong, value = right.copy(), draw.choice([np.nan, np.inf, -np.inf])
    places = np.unravel_index(draw.choice(right.size, draw.integers(1, 4), replace=False), right.shape)
    wrong[places] = value
    first = tuple(np.argwhere(~np.isfinite(wrong))[0].tolist())
    for pair, which in (((right, wrong), "B"), ((wrong, right), "A")):
        found = classify_in(*pair, TOKEN, CONFIG)
        assert found.kind == "not finite"
        assert found.words.startswith(f"{which} is {value} at {first}, where the other is {right[first]:g}")
        assert ("more that are not finite" in found.words) == (len(places[0]) > 1)
        assert found.cause == ""


def test_a_number_out_of_the_range_of_a_dtype_is_said_to_be_that():
    large = with_number(1e5)
    with np.errstate(over="ignore"):
        narrow = large.astype(np.float16)
    assert classify(large, narrow).cause == "100000 is out of the range of float16"


def test_the_row_of_padding_was_zeroed_only_if_it_is_zeros():
    table = WEIGHTS[TOKEN]
    zeroed, trained = table.copy(), table.copy()
    zeroed[CONFIG.pad_id], trained[CONFIG.pad_id] = 0, table[CONFIG.pad_id] + 1
    said = [
        classify_in(*pair, TOKEN, CONFIG).cause
        for pair in ((table, zeroed), (zeroed, table), (table, trained))
    ]
    assert said == ["the row of padding is zeroed in B", "the row of padding is zeroed in A", ""]


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
    monkeypatch.setattr("concord.porting.difference.WHOLE", 53)
    array = np.random.default_rng(3).standard_normal((97, 7))
    for changed in (np.nextafter(array, 9), array * 3):
        assert classify(array, changed).kind in ("rounding", "scaled")
        wrong = changed.copy()
        wrong[31:] += np.random.default_rng(4).standard_normal((66, 7))
        assert classify(array, wrong).kind == "different"


# What is no parameter.

DENSE = "cls.predictions.transform.dense.weight"


@pytest.mark.parametrize("format", ["hugging-face-flax", "hugging-face-tf", "paddlenlp"])
def test_heads_are_compared_across_names_and_layouts(tmp_path, format):
    one = porting.read(headed(tmp_path / "one"))
    porting.write(one, tmp_path / "ported", format)
    found = compare(one, porting.read(tmp_path / "ported"))
    assert (found.others.same, found.others.pairs, found.others.apart, found.exit_code) == (7, (), {}, 0)
    other = headed(tmp_path / "other", **{DENSE.replace(".", "__"): np.eye(14, dtype=np.float32)})
    found = compare(porting.read(other), porting.read(tmp_path / "ported"))
    assert ([pair.name for pair in found.others.pairs], found.exit_code) == ([DENSE], 1)


def test_what_cannot_be_compared_is_named_and_never_the_same(entered, tmp_path):
    one = headed(tmp_path / "one", cls__strange=np.arange(7))
    porting.write(porting.read(one), tmp_path / "own", "concord")
    said = entered("diff", one, tmp_path / "own")[0]
    assert (
        "cls.strange: is no parameter, and was not compared: is in A alone\n  likewise 7 more: bert" in said
    )
    assert "8 not compared" in said
    source = porting.read(one)
    porting.write(dataclasses.replace(source, source="", others={}), tmp_path / "flax", "hugging-face-flax")
    moved = dataclasses.replace(source.others["cls.strange"], bits=lambda: np.arange(7)[::-1])
    flax = dataclasses.replace(porting.read(tmp_path / "flax"), others={"cls.strange": moved})
    found = compare(source, flax)
    assert found.others.apart["cls.strange"] == "no table says how it is laid out in files of both kinds"


OUTPUT = "cls.predictions.decoder.weight"


def with_head(folder, tied, output):
    """Write a checkpoint with a head.

    Args:
        tied: what its configuration says; None: nothing.
        output: whether its output has numbers of its own; if not, it is left out.
    """
    headed(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tied_to = tensors.pop(OUTPUT)
    save_file({**tensors, OUTPUT: tied_to[::-1].copy()} if output else tensors, path)
    if tied is not None:
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | {"tie_word_embeddings": tied}))
    return folder


@pytest.mark.parametrize("tied", [True, None, False])
@pytest.mark.parametrize("order", [1, -1])
def test_an_untied_output_that_is_missing_is_a_difference(tied, order, entered, tmp_path):
    sides = with_head(tmp_path / "a", False, True), with_head(tmp_path / "b", tied, False)
    found = compare(*map(porting.read, sides[::order]))
    assert found.config == ({} if tied is False else {"tie_word_embeddings": ("False", "True")[::order]})
    (pair,) = found.others.pairs
    have, lack = "AB"[::order]
    owner = "bert.embeddings.word_embeddings.weight"
    assert pair.said == (
        f"is in {have} alone, where it is no copy of '{owner}'; tie_word_embeddings is {tied is not False} "
        f"in {lack}; likely: tie_word_embeddings was not heeded"
    )
    said, _ = entered("diff", *sides[::order], ends=1)
    assert "tie_word_embeddings" in said


def test_what_is_tied_in_one_and_not_in_the_other_is_not_the_same_configuration(tmp_path):
    one = porting.read(with_head(tmp_path / "a", None, False))
    two = porting.read(with_head(tmp_path / "b", False, False))
    assert compare(one, two).config == {"tie_word_embeddings": ("True", "False")}
    same = with_head(tmp_path / "c", True, False)
    assert compare(one, porting.read(same)).exit_code == 0
    bare = [dataclasses.replace(side, others={}) for side in (one, two)]
    assert compare(*bare).exit_code == 0  # nothing is there that could be tied


def test_tensors_with_one_reason_are_told_in_one_line(entered, tmp_path):
    rounded = {name: precision("bfloat16").round(array) for name, array in WEIGHTS.items()}
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "a", "concord")
    porting.write(porting.from_weights(CONFIG, rounded), tmp_path / "b", "concord")
    lines = entered("diff", tmp_path / "a", tmp_path / "b", ends=1)[0].splitlines()
    assert len(lines) < 12
    assert sum("saved in, or went through, bfloat16" in line for line in lines) == 1
    assert "  likewise 40 more: " in "\n".join(lines)
