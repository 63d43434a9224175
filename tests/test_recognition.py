import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord import porting, spec
from concord.porting import registry
from concord.porting.comparison import compare
from concord.spec.errors import SpecError
from concord.spec.sources import source_tables
from tests.toys.checkpoints import CONFIG, SIZES, WEIGHTS, bits, drawn, in_bytes, saved
from tests.toys.ready import hugging_face
from tests.toys.surroundings import state

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all


def test_of_the_files_of_a_folder_of_the_hub_the_first_is_read_as_by_transformers(tmp_path):
    order = ["hugging-face", "hugging-face-bin", "hugging-face-tf", "hugging-face-flax"]
    folder = tmp_path / order[0]
    for number, form in enumerate(order):
        weights = {name: array + number for name, array in WEIGHTS.items()}
        saved(tmp_path / form, form, weights=weights)
        name = registry.FORMATS[form].weights[0]
        (tmp_path / form / name).rename(folder / name)
    for number, form in enumerate(order):
        assert porting.recognise(folder).format == form
        assert bits(folder) == in_bytes({name: array + number for name, array in WEIGHTS.items()})
        (folder / registry.FORMATS[form].weights[0]).unlink()


def test_of_two_files_that_say_nothing_of_each_other_one_must_be_named(tmp_path):
    for form in ("torch", "torch-safetensors"):
        saved(tmp_path / form, form)
    (tmp_path / "torch/model.pt").rename(tmp_path / "torch-safetensors/model.pt")
    with pytest.raises(SpecError, match=r"model\.safetensors, model\.pt; name the one to read"):
        porting.read(tmp_path / "torch-safetensors")
    assert bits(tmp_path / "torch-safetensors/model.pt") == in_bytes(WEIGHTS)


def test_a_table_of_ones_own_is_read(tmp_path):
    def named(text):
        return text.replace("bert.encoder.layer", "bert.blocks").replace('"bert-hugging-face"', '"mine"')

    table = (source_tables.TABLES / "bert-hugging-face.toml").read_text()
    (tmp_path / "mine.toml").write_text(named(table))
    source = hugging_face(
        tmp_path / "source", change=lambda arrays: {named(name): array for name, array in arrays.items()}
    )
    assert porting.read(source, table=tmp_path / "mine.toml").weights().keys() == WEIGHTS.keys()
    with pytest.raises(SpecError, match="match no known format"):
        porting.read(source)


def bare(folder, config, format, **others):
    # Names without a prefix, next to other tensors.
    path = saved(folder, format, config, part="encoder", force=True) / "model.safetensors"
    plain = {name.partition(".")[2]: array for name, array in load_file(path).items()}
    save_file({**plain, **others}, path)


@pytest.mark.parametrize(
    ("kind", "format"), [("bert", "hugging-face"), ("xlm-roberta", "hugging-face-roberta")]
)
def test_bare_models_of_the_same_names_are_told_apart_by_their_kind(tmp_path, kind, format):
    config = CONFIG if kind == "bert" else spec.variant("roberta", **SIZES)
    bare(tmp_path, config, format)
    state(tmp_path / "config.json", model_type=kind)
    assert porting.recognise(tmp_path).format == format
    read = porting.read(tmp_path)
    assert (read.part, read.config.position_start) == ("encoder", 0 if kind == "bert" else 2)
    assert bits(read) == in_bytes(drawn(config, "encoder"))
    porting.write(read, tmp_path / "again", format)
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == kind


@pytest.mark.parametrize(
    ("variant", "end", "pretraining"),
    [
        ("bert", "", "cls.predictions"),
        ("roberta", "-roberta", "lm_head"),
        ("distilbert", "-distilbert", "vocab_transform"),
    ],
)
def test_other_heads_are_left_out_or_refused(tmp_path, variant, end, pretraining):
    segments = {"num_segments": 0} if variant == "distilbert" else {}
    model = spec.variant(variant, **SIZES, **segments), f"hugging-face{end}"
    for head, why in (("qa_outputs", "question-answering"), (pretraining, "pretraining")):
        bare(tmp_path, *model, **{f"{head}.weight": np.ones((2, 14), np.float32)})
        read = porting.read(tmp_path)
        ignored = [entry.foreign for entry in read.ledger if why in entry.reason]
        assert (read.part, ignored) == ("encoder", [f"{head}.weight"])
    # A token classifier has the tensor names of a text classifier.
    bare(tmp_path, *model, **{"classifier.weight": np.ones((2, 14), np.float32)})
    with pytest.raises(SpecError, match=r"classifier|pooler"):
        porting.read(tmp_path)


def test_formats_are_asked_for_by_their_frameworks_too():
    called = {"flax": "jax-msgpack", "pytorch": "torch-safetensors", "hf": "hugging-face", "tf": "keras"}
    assert {name: registry.find_format(name).name for name in called} == called


def test_a_folder_without_a_file_of_the_format_asked_for_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"has no file of the format keras \(model\.keras\)"):
        porting.read(tmp_path, "keras")


# Models outside of the family.


def test_a_refusal_says_what_a_checkpoint_is(tmp_path, entered):
    def change(arrays):
        return {name.replace("bert.", "h."): array for name, array in arrays.items()}

    source = hugging_face(tmp_path / "source", change=change, model_type="gen", architectures=["G"])
    _, lines = entered("port", source, "-o", tmp_path / "out", "--to", "concord", ends=2)
    assert any('{"model_type": "gen", "architectures": ["G"]}' in line for line in lines), lines
    assert all(len(line) < 900 and line.isprintable() for line in lines)


# ELECTRA.


def electra(folder, heads=None, **stated):
    def change(arrays):
        named = {name.replace("bert.", "electra.", 1): array for name, array in arrays.items()}
        return {name: named[name] for name in named if "pooler" not in name} | (heads or {})

    settings = {"model_type": "electra", "embedding_size": 14, **stated}
    return hugging_face(folder, "encoder", change, **settings)


def test_electra_with_wide_embeddings_is_the_encoder_that_bert_is(tmp_path):
    heads = {
        name: np.ones((14, 14), np.float32)
        for name in ("classifier.dense.weight", "discriminator_predictions.dense.weight")
    }
    source = electra(tmp_path / "electra", heads)
    assert porting.recognise(source).format == "hugging-face-electra"
    checkpoint, bert = porting.read(source), porting.read(hugging_face(tmp_path / "bert", "encoder"))
    assert (checkpoint.part, compare(checkpoint, bert).same) == ("encoder", len(bert.tensors))
    assert checkpoint.config == bert.config.replace(num_classes=checkpoint.config.num_classes)
    reasons = {entry.foreign: entry.reason for entry in checkpoint.ledger if entry.status == "ignored"}
    assert "a linear layer, GELU and another linear layer" in reasons["classifier.dense.weight"]
    assert "pretraining" in reasons["discriminator_predictions.dense.weight"]


def test_electra_that_is_no_bert_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"'embedding_size' is 5 but must be 14, the value of 'hidden_size'"):
        porting.read(electra(tmp_path / "small", embedding_size=5))
    classifier = {"classifier.weight": np.ones((2, 14), np.float32), "classifier.bias": np.ones(2)}
    with pytest.raises(SpecError, match=r"'classifier\.weight' is unexpected"):
        porting.read(electra(tmp_path / "tokens", classifier))
