"""Conversion bugs, each an edit of a right checkpoint: refused, named by `diff`, or harmless.

A comment names the project in which an edit was seen, and its number there.
"""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from concord import porting
from concord.porting import registry
from concord.porting.comparison import compare
from concord.porting.containers.container import INDEX
from concord.porting.file_tensors import in_memory
from concord.porting.folder import LENGTHS, PROMPTS
from tests.toys.checkpoints import CONFIG, SECOND, WEIGHTS, shards
from tests.toys.surroundings import refusal, state

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "", *(f"t{number}" for number in range(5, 29)))
BESIDE = {
    "vocab.txt": "\n".join((*TOKENS, "")).encode(),
    "tokenizer.json": b'{"version": "1.0", "normalizer": {"type": "BertNormalizer", "lowercase": true}}',
    "tokenizer_config.json": b'{"do_lower_case": true, "model_max_length": 13}',
    "sentencepiece.bpe.model": b"\n\x0e\n\x05<unk>",
    LENGTHS: b'{"max_seq_length": 13, "do_lower_case": false}',
    PROMPTS: b'{"__version__": {"pytorch": "2.13.0"}, "default_prompt_name": "query"}',
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943\nsize 440473133\n"
# Edits of a checkpoint's folder, in the names and layouts of its format.


def tensors(change):
    def edit(folder, form):
        path = folder / form.weights[0]
        arrays = {name: np.array(stored.array()) for name, stored in form.container.read(path).items()}
        changed = {name: in_memory(np.asarray(array, order="C")) for name, array in change(arrays).items()}
        form.container.write(path, changed)

    return edit


def renamed(pattern, other):
    return tensors(lambda arrays: {re.sub(pattern, other, name): array for name, array in arrays.items()})


def added(name, array):
    return tensors(lambda arrays: {**arrays, name: array})


def each(change, end=""):
    return tensors(
        lambda arrays: {
            name: change(array) if name.endswith(end) else array for name, array in arrays.items()
        }
    )


def layers(*numbers):
    return renamed(r"\.layer\.(\d+)\.", lambda match: f".layer.{numbers[int(match[1])]}.")


def entries(name, **changes):
    return lambda folder, form: state(folder / name, **changes)


def config(**changes):
    return entries("config.json", **changes)


def content(change, name=""):
    # By default the file of the weights.
    def edit(folder, form):
        path = folder / (name or form.weights[0])
        path.write_bytes(change(path.read_bytes()))

    return edit


def gone(name):
    return lambda folder, form: (folder / name).unlink()


def in_shards(*edits):
    return lambda folder, form: [edit(folder, form) for edit in (lambda *_: shards(folder), *edits)]


def indexed(change):
    return in_shards(
        lambda folder, form: (path := folder / f"model.safetensors{INDEX}").write_text(
            json.dumps({"weight_map": change(json.loads(path.read_text())["weight_map"])})
        )
    )


WORDS, OUT, DECODER = (
    "word_embeddings.weight",
    "layer.1.output.dense.weight",
    "cls.predictions.decoder.weight",
)
TABLE, POSITIONS = f"bert.embeddings.{WORDS}", "bert.embeddings.position_ids"

# Edits that are refused, and the words of the refusal.

REFUSED = {
    "prefix twice": (renamed("^", "bert."), "match no known format"),  # transformers 8407
    "layers counted from one": (
        layers(1, 2),  # gpt-neox 971
        "'bert.encoder.layer.0.attention.self.query.weight' is missing",
    ),
    "kernels transposed": (each(np.transpose), "has shape (14, 17) but must be (17, 14)"),  # flax 1848
    "table left out as shared": (renamed(TABLE, DECODER), f"'{TABLE}' is missing"),  # transformers 34759
    "positions backwards": (
        added(POSITIONS, np.arange(12, -1, -1)[None]),
        "is 12 at element 0 but must be 0",
    ),
    "an unknown optimizer": (
        added("exp_avg.0", np.ones(3)),
        "'exp_avg.0' is unexpected",
    ),  # transformers 9797
    "not a number": (
        each(lambda array: np.where(array == array.max(), np.nan, array), OUT),
        "holds NaN or infinity",  # FasterTransformer 221
    ),
    "heads that do not divide": (config(num_attention_heads=3), "num_heads"),  # genslm 110
    "relative positions": (config(position_embedding_type="relative_key"), "'position_embedding_type' is"),
    "classes from one": (
        config(id2label={"1": "a", "2": "b", "3": "c"}),
        "'id2label' must number its labels 0, 1",
    ),
    "fewer names than classes": (
        config(num_labels=3, id2label={"0": "a", "1": "b"}),
        "names 2 classes but the classifier has 3",
    ),
    "shard left out": (in_shards(gone(SECOND)), "no such file"),  # sglang 32279
    "index names the other file": (
        indexed(lambda places: {**places, "classifier.bias": SECOND}),  # torchtitan 3764
        "but it is not",
    ),
    "tensor not in the index": (
        indexed(lambda places: {key: place for key, place in places.items() if key != "classifier.bias"}),
        "but the index does not say so",  # mlx-vlm 1827
    ),
    "cut off": (content(lambda blob: blob[:-100]), "file not fully covered"),  # vmlx-swift 217
    "an adapter beside it": (
        lambda folder, form: (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "holds adapter_config.json",
    ),
    "data of TensorFlow left out": (
        gone("bert_model.ckpt.data-00000-of-00001"),
        "needs its data",
        "google-bert",
    ),
    "pooler without tanh": (config(pool_act="relu"), "key 'pool_act' is", "paddlenlp"),
    "pointer of Git": (content(lambda blob: POINTER), "not a complete safetensors file"),  # diffusers 13559
}

# Edits that are read, and what `diff` says about the first tensor, the configuration or a file.

SWAPPED = "taken for those of another"
NAMED = {
    "layers reversed": (layers(1, 0), SWAPPED),  # sorted as texts: llm-compressor 2175
    "square kernels transposed": (
        each(lambda array: array.T if array.shape == (14, 14) else array),
        "transposed; likely: a kernel of (out, in)",
    ),  # transformers 47031
    "classifier missing": (
        tensors(lambda arrays: {name: arrays[name] for name in arrays if "classifier" not in name}),
        "part is model in A and encoder in B",
    ),  # transformers 19999
    "special tokens moved": (
        each(lambda array: np.roll(array, 4, axis=0), WORDS),  # fairseq 2004
        "embeddings.token.weight: rows are shifted by 4",
    ),
    "positions of RoBERTa": (
        each(lambda array: np.roll(array, 2, axis=0), "position_embeddings.weight"),
        "counted from the padding id",  # sentence-transformers 3879
    ),
    "float16": (each(np.float16), "went through, float16"),  # saxml 28
    "never filled": (
        each(np.zeros_like, OUT),
        "all values of B are 0; likely: it was never loaded",
    ),  # nano-vllm 264
    "padding of another tokenizer": (
        config(pad_token_id=1),
        "pad_id is 0 in A and 1 in B",
    ),  # transformers 10869
    "labels in another order": (
        config(id2label={"0": "maybe", "1": "yes", "2": "no"}, label2id=None),  # TextAttack 684
        'labels: 0 is "no" in A and "maybe" in B',
    ),
    "tokenizer left out": (gone("tokenizer.json"), "tokenizer.json: missing in B"),  # transformers 1030
    "vocabulary of SentencePiece left out": (
        gone("sentencepiece.bpe.model"),
        "sentencepiece.bpe.model: missing in B",
    ),
    "letters kept large": (
        entries("tokenizer.json", normalizer={"type": "BertNormalizer", "lowercase": False}),
        "normalizer.lowercase is true in A and false in B",  # tokenizers 695
    ),
    "prompt forgotten": (
        entries(PROMPTS, default_prompt_name=None),
        'default_prompt_name is "query"',
        "torch",
    ),
}

# Harmless edits, and what the ledger says about them.

OLDER = {"weight": "gamma", "bias": "beta"}
HARMLESS = {
    "parallel training": (renamed("^", "module."), ""),  # pytorch 3805
    "prefix left out": (renamed(r"^bert\.", ""), ""),  # transformers 11843
    "gamma and beta of norms": (
        renamed(r"(?<=Norm\.)(weight|bias)", lambda match: OLDER[match[0]]),
        "under an older name",  # transformers 11809
    ),
    "head of pretraining": (added("cls.seq_relationship.weight", np.zeros((14, 2))), "pretraining heads"),
    "decoder tied": (
        tensors(lambda arrays: {**arrays, DECODER: arrays[TABLE]}),
        f"a copy of '{TABLE}'",  # transformers 9635
    ),
    "moments of Adam": (
        tensors(
            lambda arrays: {
                **arrays,
                **{f"{name}/adam_{moment}": np.ones_like(arrays[name]) for name in arrays for moment in "mv"},
                "global_step": np.array(7),
            }
        ),
        "belongs to the optimizer",  # transformers 98
        "google-bert",
    ),
    "versions of another machine": (entries(PROMPTS, __version__={"pytorch": "1.6.0"}), "", "torch"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")

    def made(form):
        if not (folder / form).exists():
            porting.write(
                dataclasses.replace(
                    porting.from_weights(CONFIG, WEIGHTS, files=BESIDE), labels=("no", "maybe", "yes")
                ),
                folder / form,
                form,
            )
        return folder / form

    return made


def edited(right, folder, edit, words, form="hugging-face"):
    # The right folder, an edited copy of it, and the words that are expected.
    shutil.copytree(right(form), folder / "wrong")
    edit(folder / "wrong", registry.find_format(form))
    return right(form), folder / "wrong", words


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_checkpoint_is_refused_in_lines(right, tmp_path, name):
    _, wrong, words = edited(right, tmp_path, *REFUSED[name])

    def read(form):
        porting.read(wrong, form).checked()

    forms = ("auto", *(REFUSED[name][2:] or ["hugging-face"]))
    lines = [line for form in forms for line in refusal(read, form)]
    assert any(words in line for line in lines), lines


@pytest.mark.parametrize("name", NAMED)
def test_what_is_wrong_is_named_by_the_difference(right, tmp_path, name):
    *sides, expected = edited(right, tmp_path, *NAMED[name])
    comparison = compare(*map(porting.read, sides))
    lines = [f"{pair.name}: {pair.sentence}" for pair in comparison.pairs]
    lines += [f"{key} is {mine} in A and {other} in B" for key, (mine, other) in comparison.config.items()]
    lines += [f"{file}: {words}" for file, words in comparison.files.items()]
    assert any(expected in line for line in lines), lines
    assert comparison.exit_code == 1


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_alarms_nobody(right, tmp_path, name):
    *sides, words = edited(right, tmp_path, *HARMLESS[name])
    source, other = map(porting.read, sides)
    other.checked()
    comparison = compare(source, other)
    assert (comparison.exit_code, comparison.alone[0]) == (0, ())
    assert any(words in entry.reason for entry in other.ledger)
