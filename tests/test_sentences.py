"""Folders of sentence-transformers: a model and its pooling, both ways, and what is refused."""

import dataclasses
import json

import numpy as np
import pytest

from concord import porting, spec
from concord.porting.containers import safetensors
from concord.porting.stored import in_memory
from tests.toys.checkpoints import SIZES, bits, drawn
from tests.toys.surroundings import refusal

CONFIGS = {
    "bert": spec.variant("bert", **SIZES),
    "roberta": spec.variant("roberta", **SIZES),
    "distilbert": spec.variant("distilbert", **SIZES, num_segments=0),
}
"""The models that such a folder can have, with pooling and classifier of their own."""


def pooled(kind="bert", pooling="mean", normalize=True):
    """Return a sentence embedding with random weights."""
    config = dataclasses.replace(
        CONFIGS[kind], pooling=pooling, pooler="none", length_epsilon=1e-12 if normalize else None
    )
    return porting.from_weights(
        config,
        drawn(config, "pooled"),
        "pooled",
    )


def folder_of(kind):
    return "sentence-transformers" + ("" if kind == "bert" else f"-{kind}")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_sentence_embedding_comes_back_with_its_pooling(tmp_path, kind, pooling, normalize):
    wanted = pooled(kind, pooling, normalize)
    porting.write(wanted, tmp_path / "one", folder_of(kind))
    said = json.loads((tmp_path / "one/config.json").read_text())
    assert (said["model_type"], {"pooling_mode", "normalize"} & set(said)) == (kind, set())
    modules = [
        module["type"].rpartition(".")[2]
        for module in json.loads((tmp_path / "one/modules.json").read_text())
    ]
    assert modules == ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    assert porting.recognise(tmp_path / "one").format == folder_of(kind)
    read = porting.read(tmp_path / "one")
    found = {
        name: getattr(read.config, name)
        for name in ("pooling", "pooler", "length_epsilon", "position_start", "num_segments")
    }
    assert found == {name: getattr(wanted.config, name) for name in found}
    assert (read.part, bits(read)) == ("pooled", bits(wanted))


@pytest.fixture
def folder(tmp_path):
    """A sentence embedding as the library writes it."""
    porting.write(pooled(), tmp_path / "one", "sentence-transformers")
    return tmp_path / "one"


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"embedding_dimension": 14, "pooling_mode": "cls", "include_prompt": True}, "first"),
        ({"pooling_mode": ["mean"], "pooling_mode_cls_token": True}, "mean"),
    ],
)
def test_a_pooling_is_read_in_older_and_newer_words(folder, said, pooling):
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    assert porting.read(folder).config.pooling == pooling


@pytest.mark.parametrize(
    ("module", "said", "problem"),
    [
        ("1_Pooling", {"pooling_mode_max_tokens": True}, 'pools by "max" but the family by one of mean, cls'),
        (
            "1_Pooling",
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            'pools by "mean" and "lasttoken"',
        ),
        (
            "1_Pooling",
            {"pooling_mode": "mean", "include_prompt": False},
            "'include_prompt' is false but must be true",
        ),
        ("1_Pooling", [], "holds a list but must hold a JSON object"),
        (
            "2_Normalize",  # by the length of another vector
            {"module_input_name": "token_embeddings"},
            '\'module_input_name\' is "token_embeddings" but must be "sentence_embedding"',
        ),
    ],
)
def test_a_pooling_that_the_family_does_not_have_is_refused_by_name(folder, module, said, problem):
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "config.json").write_text(json.dumps(said))
    (line,) = refusal(porting.read, folder)
    assert f"{module}/config.json: " in line
    assert problem in line
    assert porting.read(folder, "hugging-face").part == "encoder"


def test_other_modules_are_refused_by_name(tmp_path, refused):
    porting.write(pooled(normalize=False), tmp_path / "one", "sentence-transformers")
    path = tmp_path / "one/modules.json"
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), dense]))
    errors = refused("port", tmp_path / "one", "-o", tmp_path / "out", "--to", "torch")
    assert len(errors) == 1
    assert "lists Transformer, Pooling, Dense but must list" in errors[0]
    assert "--from hugging-face" in errors[0]


def test_a_folder_of_sentences_keeps_what_says_how_long_texts_may_be_and_lists_no_modules_elsewhere(tmp_path):
    (source := tmp_path / "one").mkdir()
    porting.write(pooled(), source / "0_Transformer", "sentence-transformers")
    for name in ("modules.json", "1_Pooling"):
        (source / "0_Transformer" / name).rename(source / name)
    modules = json.loads((source / "modules.json").read_text())
    (source / "modules.json").write_text(json.dumps([{**modules[0], "path": "0_Transformer"}, *modules[1:]]))
    (source / "0_Transformer/sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (source / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    porting.write(porting.read(source), tmp_path / "native", "torch")
    there = {path.name for path in (tmp_path / "native").iterdir()}
    assert there == {
        "config.toml",
        "part.json",
        "model.pt",
        "bert-hugging-face.config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    }
    porting.write(porting.read(tmp_path / "native"), tmp_path / "back", "sentence-transformers")
    assert bits(porting.read(tmp_path / "back")) == bits(porting.read(source))
    # Without a pooler in the file, the library is told to make none.
    assert json.loads((tmp_path / "back/sentence_bert_config.json").read_text()) == {
        "max_seq_length": 7,
        "model_args": {"add_pooling_layer": False},
    }


def test_a_sentence_embedding_goes_into_a_plain_model_as_a_bare_encoder_alone(folder, tmp_path):
    path, out = folder / "model.safetensors", tmp_path / "out"
    tensors = {name: in_memory(tensor.bits().copy()) for name, tensor in safetensors.read(path).items()}
    shapes = {"pooler.dense.bias": (14,), "pooler.dense.weight": (14, 14)}
    pooler = {name: in_memory(np.full(shape, 2, np.float32)) for name, shape in shapes.items()}
    safetensors.write(path, tensors | pooler)
    read = porting.read(folder)
    assert [entry.foreign for entry in read.ledger if entry.status == "ignored"] == [*pooler]
    assert refusal(porting.write, read, out, "hugging-face-flax") == [
        "the part 'pooled' cannot be written as hugging-face-flax, which has model or encoder; "
        "read with --from hugging-face it is an encoder, without its pooling"
    ]
    porting.write(porting.read(folder, "hugging-face"), out, "hugging-face-flax")
    assert "modules.json" not in {path.name for path in out.iterdir()}
    assert bits(porting.read(out)) == bits(read)
