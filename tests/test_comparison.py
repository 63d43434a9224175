import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord import porting
from concord.porting.comparison import compare
from concord.spec.precision import precision
from tests.toys.checkpoints import CONFIG, WEIGHTS
from tests.toys.ready import headed
from tests.toys.surroundings import state

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all

QUERY = "layers.0.attention.query.weight"
A = porting.from_weights(CONFIG, WEIGHTS)


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        (b"[" * 100_000, b"[]", "all of it is 100000 bytes, SHA-256 13f86ea1 in A and [] in B"),
        (
            b'{"a\\nb": "' + b"x" * 99 + b'"}',
            b'{"a\\nb": [1]}',
            'x" in A and absent in B; a\\nb[0] is absent in A and 1 in B',
        ),
    ],
)
def test_files_beside_the_weights_that_cannot_be_understood_are_told_in_a_line(mine, other, words):
    first, second = (replace(A, files={"tokenizer.json": content}) for content in (mine, other))
    text = compare(first, second).files["tokenizer.json"]
    assert text.endswith(words)
    assert "\n" not in text


def test_the_command_compares_formats_and_tells_one_reason_once(entered, tmp_path):
    porting.write(A, tmp_path / "a", "concord")
    porting.write(A, tmp_path / "b", "jax-msgpack")
    rounded = {name: precision("bfloat16").round(array) for name, array in WEIGHTS.items()}
    rounded[QUERY] = WEIGHTS[QUERY].T.copy()
    porting.write(porting.from_weights(CONFIG, rounded), tmp_path / "c", "torch")
    output, _ = entered("diff", tmp_path / "a", tmp_path / "b")
    assert "41 of 41 parameters have the same bits; the same configuration" in output
    output, _ = entered("diff", tmp_path / "b", tmp_path / "c", "--json", tmp_path / "diff.json", ends=1)
    assert f"{QUERY}: transposed" in output
    assert output.count("saved in, or went through, bfloat16") == 1
    assert "  likewise 39 more: " in output
    pairs = json.loads((tmp_path / "diff.json").read_text())["pairs"]
    assert {pair["kind"] for pair in pairs} == {"rounded", "transposed"}


@pytest.mark.parametrize(
    ("name", "form", "exit_code"),
    [
        ("sentence_bert_config.json", "torch", 1),
        ("sentence_bert_config.json", "nndl-paddle-api", 0),
        ("labels", "nndl-paddle-api", 1),
    ],
)
def test_a_file_counts_if_the_format_that_lacks_it_has_a_place_for_it(name, form, exit_code):
    having = replace(A, files={name: b"{}"}, labels=("a",) * (name == "labels"))
    lacking = replace(A, format=form)
    one, other = compare(having, lacking), compare(lacking, having)
    assert one.exit_code == other.exit_code == exit_code
    assert one.alone == other.alone[::-1] == (() if exit_code else (name,), ())
    assert compare(lacking, having, ported=True).exit_code == 0  # a port may add files


def test_the_same_values_in_another_dtype_are_no_difference_and_others_are():
    wide = porting.from_weights(CONFIG, {n: precision("bfloat16").round(a) for n, a in WEIGHTS.items()})
    tensors = {
        name: replace(
            tensor, dtype="bfloat16", bits=lambda tensor=tensor: tensor.read().view("<u2")[..., 1::2]
        )
        for name, tensor in wide.tensors.items()
    }
    narrow = replace(wide, tensors=tensors)
    comparison = compare(narrow, wide)
    assert not comparison.exit_code
    assert "a different dtype (bfloat16 in A, float32 in B): 41" in comparison.summary
    assert compare(narrow, A).exit_code == compare(A, narrow).exit_code == 1


# Tensors that are not parameters.

DENSE, OUTPUT = "cls.predictions.transform.dense.weight", "cls.predictions.decoder.weight"


def test_heads_are_compared_across_names_and_layouts(tmp_path):
    source = porting.read(headed(tmp_path / "one"))
    porting.write(source, tmp_path / "ported", "hugging-face-flax")
    comparison = compare(source, porting.read(tmp_path / "ported"))
    assert (
        comparison.others.same,
        comparison.others.pairs,
        comparison.others.apart,
        comparison.exit_code,
    ) == (7, (), {}, 0)
    other = headed(tmp_path / "other", **{DENSE.replace(".", "__"): np.eye(14, dtype=np.float32)})
    comparison = compare(porting.read(other), porting.read(tmp_path / "ported"))
    assert ([pair.name for pair in comparison.others.pairs], comparison.exit_code) == ([DENSE], 1)


def test_what_cannot_be_compared_is_named_and_never_the_same(entered, tmp_path):
    path = headed(tmp_path / "one", cls__strange=np.arange(7))
    porting.write(porting.read(path), tmp_path / "own", "concord")
    output = entered("diff", path, tmp_path / "own")[0]
    assert "cls.strange: only in A; not part of this model, so not compared\n  likewise 7 more" in output
    assert "8 not compared" in output
    source = porting.read(path)
    porting.write(replace(source, source="", others={}), tmp_path / "flax", "hugging-face-flax")
    comparison = compare(
        source,
        replace(
            porting.read(tmp_path / "flax"),
            others={"cls.strange": replace(source.others["cls.strange"], bits=lambda: np.arange(7)[::-1])},
        ),
    )
    assert comparison.others.apart["cls.strange"] == "no table gives its layout in both kinds of file"
    assert comparison.others.pairs[0].words == "missing in B"  # the pooler


def with_head(folder, tied, output):
    # `tied` is what the configuration says, or nothing if None. Without `output` the head has no tensor of
    # its own.
    headed(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tied_to = tensors.pop(OUTPUT)
    save_file({**tensors, OUTPUT: tied_to[::-1].copy()} if output else tensors, path)
    state(folder / "config.json", tie_word_embeddings=tied)
    return folder


@pytest.mark.parametrize("tied", [True, None, False])
@pytest.mark.parametrize("order", [1, -1])
def test_an_untied_output_that_is_missing_is_a_difference(tied, order, tmp_path):
    comparison = compare(
        *map(
            porting.read,
            (with_head(tmp_path / "a", False, True), with_head(tmp_path / "b", tied, False))[::order],
        )
    )
    assert comparison.config == ({} if tied is False else {"tie_word_embeddings": ("False", "True")[::order]})
    (pair,) = comparison.others.pairs
    have, lack = "AB"[::order]
    assert pair.sentence == (
        f"is only in {have}, and is not a copy of 'bert.embeddings.word_embeddings.weight'; "
        f"tie_word_embeddings is {tied is not False} in {lack}; likely: tie_word_embeddings was ignored"
    )
