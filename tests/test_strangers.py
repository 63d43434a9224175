"""Checkpoints that the family does not have: a refusal says what they are.

And names that were made to do harm.
"""

import numpy as np
import pytest

from concord import porting
from concord.porting.comparison import compare
from concord.spec.errors import SpecError
from tests.toys.ready import headed, hugging_face


def begun(prefix):
    """Return the change of how names begin."""
    return lambda found: {name.replace("bert.", prefix, 1): array for name, array in found.items()}


def fused(found):
    """A model of other names altogether, with one tensor for queries, keys and values."""
    return {
        "h.0.attn.qkv.weight": np.ones((14, 42), np.float32),
        "wte.weight": found["bert.embeddings.word_embeddings.weight"],
    }


STRANGE = {
    "narrow embeddings": (
        begun("thin."),
        {"model_type": "thin", "embedding_size": 5},
        ('have names of no format that is known; config.json says {"model_type": "thin"',),
    ),
    "names that nothing has": (
        fused,
        {"model_type": "gen", "architectures": ["GenForCausalLM"]},
        ('config.json says {"model_type": "gen", "architectures": ["GenForCausalLM"]}',),
    ),
    "the same names under another type": (
        lambda found: found,
        {"model_type": "gen"},
        ('\'model_type\' is "gen" but must be "bert"',),
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_refusal_says_what_a_checkpoint_is_and_what_differs(tmp_path, what, entered):
    change, stated, said = STRANGE[what]
    source = hugging_face(tmp_path / "source", change=change, **stated)
    output, lines = entered("port", source, "-o", tmp_path / "out", "--to", "concord", ends=2)
    assert all(any(words in line for line in lines) for words in said), lines
    assert all(len(line) < 900 and line.isprintable() for line in lines)
    assert "\x1b" not in output
    with pytest.raises(SpecError, match="model_type"):
        porting.read(source, "hugging-face")


# ELECTRA.


def electra(folder, heads=None, **stated):
    def change(found):
        return {
            **{
                name.replace("bert.", "electra.", 1): array
                for name, array in found.items()
                if not name.startswith(("bert.pooler", "classifier"))
            },
            **(heads or {}),
        }

    said = {"model_type": "electra", "embedding_size": 14, **stated}
    return hugging_face(folder, change=change, **said)


def test_electra_with_wide_embeddings_is_the_encoder_that_bert_is(tmp_path):
    shape = {"weight": (14, 14), "bias": (14,)}
    heads = {
        f"classifier.{layer}.{leaf}": np.ones(shape[leaf], np.float32)
        for layer in ("dense", "out_proj")
        for leaf in shape
    }
    heads["discriminator_predictions.dense.weight"] = np.ones((14, 14), np.float32)
    source = electra(tmp_path / "electra", heads)
    assert porting.recognise(source).format == "hugging-face-electra"
    found, bert = porting.read(source), porting.read(hugging_face(tmp_path / "bert", "encoder"))
    assert (found.part, found.config) == (
        "encoder",
        bert.config.replace(num_classes=found.config.num_classes),
    )
    assert compare(found, bert).same == len(bert.tensors)
    reasons = {entry.foreign: entry.reason for entry in found.ledger if entry.status == "ignored"}
    assert "a linear layer, GELU and another linear layer" in reasons["classifier.dense.weight"]
    assert "pretraining" in reasons["discriminator_predictions.dense.weight"]


def test_electra_that_is_no_bert_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"'embedding_size' is 5 but must be 14, as 'hidden_size'"):
        porting.read(electra(tmp_path / "small", embedding_size=5))
    with pytest.raises(SpecError, match=r"'classifier\.weight' is unexpected"):
        porting.read(
            electra(
                tmp_path / "tokens",
                {
                    "classifier.weight": np.ones((2, 14), np.float32),
                    "classifier.bias": np.ones(2, np.float32),
                },
            )
        )


# Names.

LONG = "x" * 1_000_000
HARM = "\x1b]0;title\x07\n2 fakes\u202e"


def test_names_that_were_made_to_do_harm_are_shown_short_and_escaped(tmp_path, entered):
    others = {f"cls.{LONG}": np.ones(3, np.float32), f"cls.{HARM}": np.ones(3, np.float32)}
    one = headed(tmp_path / "one", **others)
    other = headed(tmp_path / "other", **{name: array + 1 for name, array in others.items()})
    for command, ends in (
        (("port", one, "-o", tmp_path / "out", "--to", "concord"), 0),
        (("diff", one, other), 1),
        (("diff", one, tmp_path / "out"), 0),
    ):
        output, lines = entered(*command, ends=ends)
        assert not lines
        assert all(len(line) < 4500 and line.isprintable() for line in output.splitlines())
        assert "\\x1b]0;title\\x07\\n2 fakes\\u202e" in output
        assert not any(line.startswith("2 fakes") for line in output.splitlines())
