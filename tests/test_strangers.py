"""Checkpoints that the family does not have: a refusal says what they are."""

import numpy as np
import pytest

from concord import porting
from concord.porting.comparison import compare
from concord.spec.errors import SpecError
from tests.toys.ready import hugging_face


def fused(found):
    """A model of other names altogether, with one tensor for queries, keys and values."""
    return {
        "h.0.attn.qkv.weight": np.ones((14, 42), np.float32),
        "wte.weight": found["bert.embeddings.word_embeddings.weight"],
    }


STRANGE = {
    "names that nothing has": (
        fused,
        {"model_type": "gen", "architectures": ["GenForCausalLM"]},
        'config.json says {"model_type": "gen", "architectures": ["GenForCausalLM"]}',
    ),
    "the same names under another type": (
        dict,
        {"model_type": "gen"},
        '\'model_type\' is "gen" but must be "bert"',
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_refusal_says_what_a_checkpoint_is_and_what_differs(tmp_path, what, entered):
    change, stated, said = STRANGE[what]
    source = hugging_face(tmp_path / "source", change=change, **stated)
    _, lines = entered("port", source, "-o", tmp_path / "out", "--to", "concord", ends=2)
    assert any(said in line for line in lines), lines
    assert all(len(line) < 900 and line.isprintable() for line in lines)
    with pytest.raises(SpecError, match="model_type"):
        porting.read(source, "hugging-face")


# ELECTRA.


def electra(folder, heads=None, **stated):
    def change(found):
        named = {name.replace("bert.", "electra.", 1): array for name, array in found.items()}
        return {name: named[name] for name in named if "pooler" not in name} | (heads or {})

    said = {"model_type": "electra", "embedding_size": 14, **stated}
    return hugging_face(folder, "encoder", change, **said)


def test_electra_with_wide_embeddings_is_the_encoder_that_bert_is(tmp_path):
    heads = {
        name: np.ones((14, 14), np.float32)
        for name in ("classifier.dense.weight", "discriminator_predictions.dense.weight")
    }
    source = electra(tmp_path / "electra", heads)
    assert porting.recognise(source).format == "hugging-face-electra"
    found, bert = porting.read(source), porting.read(hugging_face(tmp_path / "bert", "encoder"))
    assert (found.part, compare(found, bert).same) == ("encoder", len(bert.tensors))
    assert found.config == bert.config.replace(num_classes=found.config.num_classes)
    reasons = {entry.foreign: entry.reason for entry in found.ledger if entry.status == "ignored"}
    assert "a linear layer, GELU and another linear layer" in reasons["classifier.dense.weight"]
    assert "pretraining" in reasons["discriminator_predictions.dense.weight"]


def test_electra_that_is_no_bert_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"'embedding_size' is 5 but must be 14, as 'hidden_size'"):
        porting.read(electra(tmp_path / "small", embedding_size=5))
    classifier = {"classifier.weight": np.ones((2, 14), np.float32), "classifier.bias": np.ones(2)}
    with pytest.raises(SpecError, match=r"'classifier\.weight' is unexpected"):
        porting.read(electra(tmp_path / "tokens", classifier))
