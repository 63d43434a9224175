import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord import porting
from tests.toys.checkpoints import CONFIG, SENTENCES, bits, drawn, in_bytes, saved
from tests.toys.surroundings import refusal


def pooled(pooling="mean", length=1e-12):
    return CONFIG.replace(pooling=pooling, pooler="none", length_epsilon=length)


def written(folder, config):
    # As the library writes it.
    return saved(folder, SENTENCES, config, part="pooled")


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "one", pooled())


@pytest.mark.parametrize(
    ("config", "listed"),
    [
        (pooled(), ["Transformer", "Pooling", "Normalize"]),
        (pooled("first", None), ["Transformer", "Pooling"]),
    ],
)
def test_a_sentence_embedding_comes_back_with_its_pooling(tmp_path, config, listed):
    written(tmp_path, config)
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == listed
    assert porting.recognise(tmp_path).format == SENTENCES
    read = porting.read(tmp_path)
    same = read.config.replace(num_classes=config.num_classes)
    assert (read.part, same, bits(read)) == ("pooled", config, in_bytes(drawn(config, "pooled")))


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"embedding_dimension": 14, "pooling_mode": "cls", "include_prompt": True}, "first"),
    ],
)
def test_a_pooling_is_read_in_older_and_newer_words(folder, said, pooling):
    (folder / "1_Pooling/config.json").write_text(json.dumps(said))
    assert porting.read(folder).config.pooling == pooling


@pytest.mark.parametrize(
    ("module", "said", "problem"),
    [
        (
            "1_Pooling",
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            ' pools by "mean" and "lasttoken"',
        ),
        (
            "1_Pooling",
            {"pooling_mode": "mean", "include_prompt": False},
            ": 'include_prompt' is false but must be",
        ),
        (
            "2_Normalize",
            {"module_input_name": "token_embeddings"},
            ": 'module_input_name' is \"token_embeddings\"",
        ),
    ],
)
def test_a_pooling_that_the_family_does_not_have_is_refused_by_name(folder, module, said, problem):
    (folder / module).mkdir(exist_ok=True)
    (folder / module / "config.json").write_text(json.dumps(said))
    (line,) = refusal(porting.read, folder)
    assert f"{module}/config.json{problem}" in line
    assert porting.read(folder, "hugging-face").part == "encoder"


@pytest.mark.parametrize("kind", ["sentence_transformers.models.Dense", "mine.Normalize"])
def test_other_modules_are_refused_by_name(folder, kind):
    path = folder / "modules.json"
    path.write_text(json.dumps([*json.loads(path.read_text())[:2], {"path": "2_Other", "type": kind}]))
    (line,) = refusal(porting.read, folder)
    name = kind.removeprefix("sentence_transformers.models.")
    assert f"lists Transformer, Pooling, {name} but must list" in line
    assert "--from hugging-face" in line


def test_a_folder_of_sentences_keeps_what_says_how_long_texts_may_be_and_lists_no_modules_elsewhere(tmp_path):
    source, native, back = (tmp_path / name for name in ("one", "native", "back"))
    written(source / "0_Transformer", pooled())
    for name in ("modules.json", "1_Pooling"):
        (source / "0_Transformer" / name).rename(source / name)
    modules = json.loads((source / "modules.json").read_text())
    (source / "modules.json").write_text(json.dumps([{**modules[0], "path": "0_Transformer"}, *modules[1:]]))
    (source / "0_Transformer/sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    porting.write(porting.read(source), native, "torch")
    assert (native / "sentence_bert_config.json").exists()
    assert not (native / "modules.json").exists()
    porting.write(porting.read(native), back, SENTENCES)
    assert bits(porting.read(back)) == bits(porting.read(source))
    # The file has no pooler, so the library is told not to make one.
    assert json.loads((back / "sentence_bert_config.json").read_text()) == {
        "max_seq_length": 7,
        "model_args": {"add_pooling_layer": False},
    }


def test_a_sentence_embedding_goes_into_a_plain_model_as_a_bare_encoder_alone(folder, tmp_path):
    path, out, pooler = folder / "model.safetensors", tmp_path / "out", "pooler.dense.weight"
    save_file({**load_file(path), pooler: np.ones((14, 14), np.float32)}, path)
    read = porting.read(folder)
    assert [entry.foreign for entry in read.ledger if entry.status == "ignored"] == [pooler]
    (line,) = refusal(porting.write, read, out, "hugging-face-flax")
    assert line.startswith("the part 'pooled' cannot be written as hugging-face-flax")
    porting.write(porting.read(folder, "hugging-face"), out, "hugging-face-flax")
    assert "modules.json" not in {path.name for path in out.iterdir()}
    assert bits(porting.read(out)) == bits(read)
