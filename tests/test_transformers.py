"""Checkpoints load in transformers 5, and in the last version with TensorFlow and Flax."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from concord import porting, spec
from concord.conformance.judging import family
from concord.conformance.judging.scoring import judge_tensor
from concord.porting.recognition import AUTO
from tests.toys import elsewhere
from tests.toys.elsewhere import Place

pytestmark = pytest.mark.slow

# Packages that the current environment lacks. TensorFlow is left out, since tf_keras requires it under
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
class Library:
    """A version of transformers in its own environment."""

    place: Place

    def run(self, program, *arguments):
        # The last line that a program prints.
        ran = self.place.run("-c", program, *arguments, CUDA_VISIBLE_DEVICES="")
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout.splitlines()[-1] if ran.stdout else ""

    def output(self, folder, batch, pad, *command):
        # The program must report no missing or unexpected tensors.
        arrays = batch.arrays()
        ids = arrays["input_ids"]
        feed = {"input_ids": ids, "attention_mask": (ids != pad).astype(np.int64)}
        feed |= {"token_type_ids": arrays["segment_ids"]} if "segment_ids" in arrays else {}
        inputs, outputs = (self.place.folder / name for name in ("inputs.npz", "found.npy"))
        np.savez(inputs, **feed)
        report = json.loads(self.run(*command, folder, inputs, outputs))
        assert not any(report.values()), report
        return np.load(outputs)


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    folder, (packages, alone) = tmp_path_factory.mktemp("transformers"), request.param
    environment = elsewhere.place(folder / "environment", folder)
    environment.install(*packages)
    if alone:
        environment.install("--no-deps", *alone)
    return Library(environment)


COMMON = {"vocab_size": 29, "max_position_embeddings": 23, "num_labels": 3}
SIZES = {
    **COMMON,
    "hidden_size": 14,
    "num_attention_heads": 2,
    "intermediate_size": 17,
    "num_hidden_layers": 2,
}
DISTIL = {**COMMON, "dim": 14, "n_heads": 2, "hidden_dim": 17, "n_layers": 2}
KINDS = {
    "Bert": (SIZES, "hugging-face"),
    "Roberta": ({**SIZES, "pad_token_id": 1, "type_vocab_size": 1}, "hugging-face-roberta"),
    "DistilBert": (DISTIL, "hugging-face-distilbert"),
}
HEADS = {"ForSequenceClassification": "model", "Model": "encoder", "ForMaskedLM": "encoder"}


def judged(checkpoint, batch, output):
    expected = family.expect(checkpoint.config, checkpoint.weights(), batch, checkpoint.part, "float32")
    name = spec.output_name(checkpoint.config, checkpoint.part)
    return judge_tensor(output, expected.values[name], expected.sigmas[name], "float32").ratio


def batch_for(checkpoint):
    # No row is all padding: the attention implementations of transformers disagree on such rows.
    return spec.example_batch(
        checkpoint.config, batch=3, tokens=11, seed=3, padding="ragged", part=checkpoint.part
    )


@pytest.mark.parametrize("library", [NEW], indirect=True, ids=["5"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_computes_the_same_bits(library, tmp_path, kind, head):
    sizes, format = KINDS[kind]
    library.run(MAKES, kind, head, json.dumps(sizes), str(tmp_path / "one"))
    read = porting.read(tmp_path / "one", AUTO)
    assert (porting.recognise(tmp_path / "one").format, read.part) == (format, HEADS[head])
    porting.write(read, tmp_path / "other", f"{format}-bin")
    porting.write(porting.read(tmp_path / "other"), tmp_path / "back", format)
    batch, loader = batch_for(read), head.replace("Model", "")
    first, other, back = (
        library.output(tmp_path / name, batch, read.config.pad_id, LOADS, "torch", loader)
        for name in ("one", "other", "back")
    )
    assert first.tobytes() == other.tobytes() == back.tobytes()
    # The family has no language-model head. The encoder in front of it is judged as part of `Model`.
    assert head == "ForMaskedLM" or judged(read, batch, first) < 1


@pytest.mark.parametrize("library", [NEW], indirect=True, ids=["5"])
@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [("Bert", "cls", False), ("Roberta", "mean", True), ("DistilBert", "mean", False)],
)
def test_what_is_written_embeds_sentences_with_the_same_bits(library, tmp_path, kind, pooling, normalize):
    sizes, plain = KINDS[kind]
    format = plain.replace("hugging-face", "sentence-transformers")
    library.run(MAKES, kind, "Model", json.dumps(sizes), str(tmp_path / "bare"))
    library.run(MAKES_SENTENCES, str(tmp_path / "bare"), pooling, "yes" * normalize, str(tmp_path / "one"))
    read = porting.read(tmp_path / "one", AUTO)
    assert (porting.recognise(tmp_path / "one").format, read.part) == (format, "pooled")
    porting.write(read, tmp_path / "native", "jax-msgpack")
    for name, written in (("back", format), ("older", f"{format}-bin")):
        porting.write(porting.read(tmp_path / "native"), tmp_path / name, written)
    batch = batch_for(read)
    first, back, older = (
        library.output(tmp_path / name, batch, read.config.pad_id, LOADS_SENTENCES)
        for name in ("one", "back", "older")
    )
    assert first.tobytes() == back.tobytes() == older.tobytes()
    assert judged(read, batch, first) < 1


@pytest.mark.parametrize("library", [OLD], indirect=True, ids=["4"])
@pytest.mark.parametrize("framework", ["tf", "flax"])
@pytest.mark.parametrize("head", ["ForSequenceClassification", ""])
def test_the_last_version_with_other_frameworks_agrees(library, tmp_path, framework, head):
    library.run(MAKES, "Bert", head or "Model", json.dumps(SIZES), str(tmp_path / "one"))
    read = porting.read(tmp_path / "one")
    porting.write(read, tmp_path / "other", f"hugging-face-{framework}")
    batch = batch_for(read)
    for name, by in (("other", framework), ("one", "torch")):
        output = library.output(tmp_path / name, batch, read.config.pad_id, LOADS, by, head)
        assert judged(read, batch, output) < 1
