"""What is written for Hugging Face's transformers, loaded by transformers: version 5.

And the last one with TensorFlow and Flax, each in an environment of its own.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from concord import porting, spec
from concord.conformance import tolerance
from concord.conformance.scoring import judge_tensor
from concord.porting.recognition import AUTO
from tests.toys.surroundings import PATIENCE

pytestmark = pytest.mark.slow

MINUTES = 10 * PATIENCE

# What of an installation is not here already: everything but TensorFlow, which tf_keras would have under
# another name.
NEW, OLD = (
    (("transformers==5.23.0", "sentence-transformers==6.2.0"), ()),
    (("transformers==4.57.6",), ("tf_keras==2.21.0",)),
)

MAKES = """
import json, sys, torch, transformers
kind, head, sizes, folder = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
torch.manual_seed(7)
model = getattr(transformers, kind + head)(getattr(transformers, kind + "Config")(**sizes))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) / 3)
model.save_pretrained(folder)
"""

LOADS = """
import json, os, sys, warnings
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, transformers
framework, head, folder, inputs, out = sys.argv[1:]
said, given = {}, dict(np.load(inputs))
loaded = getattr(transformers, {"torch": "", "tf": "TF", "flax": "Flax"}[framework] + "AutoModel" +
head).from_pretrained
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model, said = (loaded(folder), {}) if framework == "flax" else loaded(folder, output_loading_info=True)
if framework == "torch":
    import torch
    with torch.no_grad():
        found = model.eval()(**{name: torch.tensor(array) for name, array in given.items()})[0].numpy()
else:
    found = np.asarray(model(**given)[0])
np.save(out, found)
wrong = [str(one.message) for one in caught if "deprecat" not in str(one.message)]
print(json.dumps({"warnings": wrong, **{name: sorted(map(str, names)) for name, names in said.items()}}))
"""

MAKES_SENTENCES = """
import sys, transformers
from sentence_transformers import SentenceTransformer, models
inner, pooling, normalize, folder = sys.argv[1:]
with open(inner + "/vocab.txt", "w") as file:
    print("[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "a", "b", sep="\\n", file=file)
transformers.BertTokenizerFast(inner + "/vocab.txt").save_pretrained(inner)
model = models.Transformer(inner, max_seq_length=19)
behind = [models.Pooling(model.get_word_embedding_dimension(), pooling_mode=pooling), *([models.Normalize()]
if normalize else [])]
SentenceTransformer(modules=[model, *behind], device="cpu").save(folder)
"""

LOADS_SENTENCES = """
import json, logging, sys
import numpy as np, torch
from sentence_transformers import SentenceTransformer
folder, inputs, out = sys.argv[1:]
said = []
class Told(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
for name in ("transformers", "sentence_transformers"):
    logging.getLogger(name).addHandler(Told(logging.WARNING))
model = SentenceTransformer(folder, device="cpu").eval()
with torch.no_grad():
    found = model({name: torch.tensor(array) for name, array in np.load(inputs).items()})
np.save(out, found["sentence_embedding"].numpy())
print(json.dumps({"warnings": said}))
"""


@dataclass(frozen=True)
class Place:
    """An environment with a version of transformers.

    Attributes:
        python: its interpreter.
        folder: for files.
    """

    python: Path
    folder: Path

    def run(self, program, *arguments):
        """Return what a program prints on its last line."""
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(
            [str(self.python), "-c", program, *arguments],
            env={**surroundings, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=MINUTES,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout.splitlines()[-1] if ran.stdout else ""

    def output(self, folder, head, batch, pad, framework="torch"):
        """Return what a model computes that is loaded from a folder, without a word about its tensors."""
        return self._output(batch, pad, LOADS, framework, head, str(folder))

    def embeddings(self, folder, batch, pad):
        """Return what sentence-transformers makes of a folder, likewise."""
        return self._output(batch, pad, LOADS_SENTENCES, str(folder))

    def _output(self, batch, pad, *command):
        arrays = batch.arrays()
        given = {
            "input_ids": arrays["input_ids"],
            "attention_mask": (arrays["input_ids"] != pad).astype(np.int64),
        }
        given |= {"token_type_ids": arrays["segment_ids"]} if "segment_ids" in arrays else {}
        np.savez(self.folder / "inputs.npz", **given)
        said = json.loads(self.run(*command, str(self.folder / "inputs.npz"), str(self.folder / "found.npy")))
        assert not any(said.values()), said
        found = np.load(self.folder / "found.npy")
        return found


@pytest.fixture(scope="module")
def place(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    venv.create(folder / "environment", with_pip=False, symlinks=True)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "environment" / "bin" / "python"
    whole, alone = request.param
    for packages in (whole, ("--no-deps", *alone) if alone else ()):
        if packages:
            subprocess.run(
                [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *packages],
                check=True,
                capture_output=True,
                timeout=MINUTES,
            )
    return Place(python, folder)


SIZES = {
    "vocab_size": 29,
    "hidden_size": 14,
    "num_attention_heads": 2,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
    "max_position_embeddings": 23,
    "num_labels": 3,
}
DISTIL = {
    "vocab_size": 29,
    "dim": 14,
    "n_heads": 2,
    "hidden_dim": 17,
    "n_layers": 2,
    "max_position_embeddings": 23,
    "num_labels": 3,
}
KINDS = {
    "Bert": (SIZES, "hugging-face"),
    "Roberta": ({**SIZES, "pad_token_id": 1, "type_vocab_size": 1}, "hugging-face-roberta"),
    "DistilBert": (DISTIL, "hugging-face-distilbert"),
}
HEADS = {"ForSequenceClassification": "model", "Model": "encoder", "ForMaskedLM": "encoder"}


def judged(checkpoint, batch, found):
    """Return how far an output lies from the oracle's, in tolerances."""
    expected = tolerance.expect(checkpoint.config, checkpoint.weights(), batch, checkpoint.part, "float32")
    name = spec.output_name(checkpoint.config, checkpoint.part)
    return judge_tensor(found, expected.values[name], expected.sigmas[name], "float32").ratio


def batch_for(checkpoint):
    """Return rows of several lengths.

    Of one that is nothing but padding transformers' own kinds of attention make several things.
    """
    return spec.example_batch(
        checkpoint.config, batch=3, tokens=11, seed=3, padding="ragged", part=checkpoint.part
    )


@pytest.mark.parametrize("place", [NEW], indirect=True, ids=["5"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_computes_the_same_bits(place, tmp_path, kind, head):
    sizes, format = KINDS[kind]
    place.run(MAKES, kind, head, json.dumps(sizes), str(tmp_path / "one"))
    read = porting.read(tmp_path / "one", AUTO)
    assert (porting.recognise(tmp_path / "one").format, read.part) == (format, HEADS[head])
    porting.write(
        read, tmp_path / "other", "hugging-face-bin" if format == "hugging-face" else f"{format}-bin"
    )
    porting.write(porting.read(tmp_path / "other"), tmp_path / "back", format)
    batch, loader = batch_for(read), head.replace("Model", "")
    first, other, back = (
        place.output(tmp_path / name, loader, batch, read.config.pad_id) for name in ("one", "other", "back")
    )
    assert first.tobytes() == other.tobytes() == back.tobytes()
    if (
        head != "ForMaskedLM"
    ):  # the family has no such head: what stands before it is judged as that of the bare model
        assert judged(read, batch, first) < 1


@pytest.mark.parametrize("place", [NEW], indirect=True, ids=["5"])
@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [
        ("Bert", "mean", True),
        ("Bert", "cls", False),
        ("Roberta", "mean", True),
        ("DistilBert", "mean", False),
    ],
)
def test_what_is_written_embeds_sentences_with_the_same_bits(place, tmp_path, kind, pooling, normalize):
    sizes, plain = KINDS[kind]
    format = plain.replace("hugging-face", "sentence-transformers")
    place.run(MAKES, kind, "Model", json.dumps(sizes), str(tmp_path / "bare"))
    place.run(MAKES_SENTENCES, str(tmp_path / "bare"), pooling, "yes" * normalize, str(tmp_path / "one"))
    read = porting.read(tmp_path / "one", AUTO)
    assert (porting.recognise(tmp_path / "one").format, read.part) == (format, "pooled")
    porting.write(read, tmp_path / "native", "jax-msgpack")
    porting.write(porting.read(tmp_path / "native"), tmp_path / "back", format)
    porting.write(porting.read(tmp_path / "native"), tmp_path / "older", f"{format}-bin")
    batch = batch_for(read)
    first, back, older = (
        place.embeddings(tmp_path / name, batch, read.config.pad_id) for name in ("one", "back", "older")
    )
    assert first.tobytes() == back.tobytes() == older.tobytes()
    assert judged(read, batch, first) < 1


@pytest.mark.parametrize("place", [OLD], indirect=True, ids=["4"])
@pytest.mark.parametrize("framework", ["tf", "flax"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", ""])
def test_the_last_version_with_other_frameworks_agrees(place, tmp_path, framework, head):
    place.run(MAKES, "Bert", head or "Model", json.dumps(SIZES), str(tmp_path / "one"))
    read = porting.read(tmp_path / "one")
    porting.write(read, tmp_path / "other", f"hugging-face-{framework}")
    batch = batch_for(read)
    assert (
        judged(read, batch, place.output(tmp_path / "other", head, batch, read.config.pad_id, framework)) < 1
    )
    assert judged(read, batch, place.output(tmp_path / "one", head, batch, read.config.pad_id)) < 1
