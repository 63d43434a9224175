import numpy as np
import pytest

from concord import spec
from concord.spec.sources import source_tables
from concord.spec.sources.names import problem
from tests.toys.checkpoints import SIZES
from tests.toys.surroundings import refusal


def config_for(source, part):
    entry = source_tables.load(source).parts[part]
    return spec.variant(source_tables.load(source).variant, **{**SIZES, **entry.constants})


def test_all_problems_are_reported_at_once_in_the_source_s_names():
    config, source = config_for("tf1-text-classifier", "model"), source_tables.load("tf1-text-classifier")
    native = source_tables.native(source, config, spec.initialize(config))
    del native["dense_4/kernel"]
    native["dense_6/kernel"] = native["dense/kernel"]
    native["conv1d_1/kernel"] = native["conv1d_1/kernel"][0]
    native["embedding_w"] = native["embedding_w"].astype(np.int64)
    native["output_w"][2, 1] = np.nan
    raised = refusal(source_tables.canonical, source, config, native)
    text = "\n".join(raised)
    assert len(raised) == 5
    assert "'output_w' is nan at (2, 1) but must be finite" in text
    assert (
        "'conv1d_1/kernel' has shape (17, 14) but must be (1, 17, 14) "
        "[parameter=layers.0.feed_forward.outer.weight" in text
    )
    assert "'dense_4/kernel' is missing but is required [parameter=layers.1.attention.key.weight" in text
    assert "'dense_6/kernel' is unexpected" in text
    assert "'embedding_w' has dtype int64" in text


def test_a_configuration_that_the_source_cannot_hold_is_refused():
    config = config_for("nndl-paddle", "model").replace(norm_sharing="separate")
    raised = refusal(source_tables.native, source_tables.load("nndl-paddle"), config, spec.initialize(config))
    words = "'layers.0.norm1.weight' is required by this configuration but the source has no weight"
    assert raised[0].startswith(words)


@pytest.mark.parametrize("pattern", ["a{i*2}", "a{i"])
def test_placeholders_that_cannot_be_read_are_refused(pattern):
    assert "cannot be read" in str(problem(pattern))


def test_a_wrong_table_is_refused_with_everything_that_is_wrong(tmp_path):
    text = (source_tables.TABLES / "vanilla-encoder.toml").read_text()
    path = tmp_path / "wrong.toml"
    path.write_text(
        text.replace('layout = "out_in"', 'layout = "in_aut"', 1)
        .replace("under =", "udner =")
        .replace("w_k.bias", "w_k{j}.bias")
    )
    raised = refusal(source_tables.read, path)
    assert len(raised) == 3
    assert any("unknown key 'parts.encoder.gradients.udner'" in it for it in raised)
    path.write_text(text.replace('{i}.attention.query.weight"', '{i}.attention.quarry.weight"'))
    raised = "".join(refusal(source_tables.read, path))
    assert "'parts.encoder.weights' lacks 'layers.0.attention.query.weight'" in raised


def test_a_table_that_is_like_another_has_its_other_parts_too(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'source = "mine"\nvariant = "bert"\nlike = "bert-hugging-face"\n[parts.model.checkpoint]\nprefixes '
        "= []\n"
    )
    mine, bert = source_tables.read(tmp_path / "mine.toml"), source_tables.load("bert-hugging-face")
    assert mine.parts["model"].checkpoint.prefixes == []
    assert mine.parts["encoder"].checkpoint == bert.parts["encoder"].checkpoint
    for table in (mine, source_tables.load("sentence-bert-hugging-face")):
        assert source_tables.words(table) == "bert-hugging-face"


def test_a_model_that_the_source_does_not_have_is_refused_with_every_reason():
    config = spec.variant("bert", **SIZES, num_segments=0, norm_placement="pre")
    assert refusal(source_tables.stated, source_tables.load("bert-hugging-face"), config) == [
        "norm_placement is 'pre' but must be 'post' [source=bert-hugging-face]",
        "'embeddings.segment.weight' is required but the configuration has no such parameter "
        "[source=bert-hugging-face]",
    ]


def test_a_configuration_lists_every_missing_key():
    raised = refusal(
        source_tables.configure, source_tables.load("bert-pytorch"), {"hidden": 8, "gelu": "erf"}
    )
    assert len(raised) == 11
    assert "configuration: key 'gelu' is 'erf' but must be one of tanh [source=bert-pytorch]" in raised
