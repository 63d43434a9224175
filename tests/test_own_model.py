import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from concord.commands.speed import Models, _own
from concord.own_model import OwnModel
from concord.speed import Workload
from tests.toys.dumps import answer, leave
from tests.toys.ready import WORDS, hugging_face, texts
from tests.toys.surroundings import refusal, toy

NUMPY = toy("NumpyBackend")
ID = {word: number for number, word in enumerate(WORDS)}


# Texts.


def ids_of(words):
    return [ID[word] for word in words.split()]


def test_texts_become_the_ids_of_the_models_own_tokenizer(tmp_path):
    model = OwnModel(hugging_face(tmp_path / "bert"), texts=texts(tmp_path / "t.txt")).load(size=3)
    assert (model.part, [*model.batches]) == ("model", ["bert-t-1", "bert-t-4"])
    batch = model.batches["bert-t-1"]
    row = "[CLS] a quick dog ran , look ##ing in the bank ? [SEP]"
    assert batch.input_ids[1].tolist() == ids_of(row)
    assert batch.input_ids[2].tolist() == ids_of("[CLS] short . [SEP]") + [0] * 9
    assert model.batches["bert-t-4"].input_ids.shape == (2, 12)


def test_pairs_have_segments_and_labels_are_the_models(tmp_path):
    folder = hugging_face(tmp_path / "bert", id2label={"0": "no", "1": "so so", "2": "yes"})
    lines = [{"text_a": "the cat", "text_b": "the dog", "label": "yes"}, {"text": "who ran?", "label": "no"}]
    path = texts(tmp_path / "t.jsonl", *map(json.dumps, lines))
    (batch,) = OwnModel(folder, texts=path).load().batches.values()
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1], [0] * 7]
    assert batch.labels.tolist() == [2, 0]
    (line,) = refusal(OwnModel(folder, texts=texts(path, '{"text": "a", "label": "maybe"}')).load)
    assert line.endswith("t.jsonl:1: label is 'maybe' but must be one of 'no', 'so so', 'yes'")


LIMIT, SMALL, PROMPTS = "sentence_bert_config", "tokenizer_config", "config_sentence_transformers"

BESIDE = [
    # sentence-transformers ignores the limit of the tokenizer here
    ({LIMIT: {"max_seq_length": 4}, SMALL: {"model_max_length": 3}}, "[CLS] [UNK] [UNK] [SEP]"),
    ({LIMIT: {"do_lower_case": True}, SMALL: {"model_max_length": 5}}, "[CLS] the cat , [SEP]"),
    (
        {PROMPTS: {"prompts": {"query": "dog, "}, "default_prompt_name": "query"}},
        "[CLS] dog , [UNK] [UNK] , the [SEP]",
    ),
]


@pytest.mark.parametrize(("beside", "expected"), BESIDE)
def test_limit_prompt_and_small_letters_are_those_of_sentence_transformers(tmp_path, beside, expected):
    folder = hugging_face(tmp_path / "bert")
    for name, settings in ({SMALL: {}} | beside).items():
        (folder / f"{name}.json").write_text(json.dumps({"do_lower_case": False} | settings))
    model = OwnModel(folder, texts=texts(tmp_path / "t.txt", "THE Cat, the")).load()
    (batch,) = model.batches.values()
    assert batch.input_ids.tolist() == [ids_of(expected)]
    most = len(expected.split())
    cut = f"tokens cut off: {6 - most}; a text may have at most {most}"
    assert (cut in " ".join(model.remarks)) == (PROMPTS not in beside)


def test_texts_of_another_vocabulary_than_the_models_are_refused(tmp_path):
    folder = hugging_face(tmp_path / "bert")
    (folder / "vocab.txt").write_text("\n".join([*map(str, range(30)), *WORDS]))
    (line, *_) = refusal(OwnModel(folder, texts=texts(tmp_path / "t.txt")).load)
    assert "t.txt: The cat sat on the rain.: the tokenizer gives '[CLS]' the id 32, but the model has" in line


# Inputs.


def test_inputs_are_taken_as_they_are_and_refused_where_they_do_not_fit(tmp_path):
    inputs = {
        "input_ids": np.array([[2, 7, 3], [2, 3, 0]], np.int32),
        "token_type_ids": np.zeros((2, 3), np.int64),
        "attention_mask": np.array([[1, 1, 1], [1, 1, 0]]),
    }
    path = tmp_path / "i.safetensors"
    own = OwnModel(hugging_face(tmp_path / "bert", "encoder"), inputs=path)
    save_file(inputs, path)
    model = own.load()
    (batch,) = model.batches.values()
    assert (model.part, batch.input_ids.tolist()) == ("encoder", inputs["input_ids"].tolist())
    assert batch.cotangent.shape == (2, 3, 14)
    assert "cotangent is random, because none was given" in " ".join(model.remarks)
    save_file(inputs | {"attention_mask": np.array([[1, 0, 1], [1, 1, 0]])}, path)
    (line,) = refusal(own.load)
    message = "the mask is 0 at (0, 1), where 'input_ids' is 7, but must hide exactly the tokens with"
    assert f"{message} 'pad_id' 0" in line
    assert str(path) in line


# Commands.


def test_a_plugin_is_judged_on_a_checkpoint_and_texts(entered, tmp_path):
    folder, path = hugging_face(tmp_path / "bert", "encoder"), texts(tmp_path / "t.txt")
    output, _ = entered(
        f"check {folder} --texts {path} --backend {NUMPY} --dtype float32 --json {tmp_path / 'r.json'}"
    )
    assert "Conformance: encoder" in output
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert (result["case"], result["status"]) == ("bert-t-1", "agrees")
    assert any(row["tensor"].startswith("gradients.") for row in result["verdict"]["table"])


def test_options_about_a_checkpoint_need_one_and_exclude_standard_cases(refused, tmp_path):
    folder = hugging_face(tmp_path / "bert")
    lines = refused(f"check --texts {texts(tmp_path / 't.txt')} --backend {NUMPY}")
    assert lines == ["--texts is given but CHECKPOINT, which must provide the weights, is not"]
    lines = refused(f"check {folder} --variant bert --case bert-tiny --backend {NUMPY}")
    assert [line.partition(" is given with CHECKPOINT")[0].split()[-1] for line in lines] == [
        "--variant",
        "--case",
    ]
    lines = refused(f"check {folder} --part stack --backend {NUMPY}")
    assert "--part is 'stack' but must be model or pooled or encoder" in lines[-1]


# Files only.


def test_a_port_that_hands_back_its_output_alone_is_judged_on_it(entered, refused, tmp_path):
    cases, checkpoint = tmp_path / "cases", hugging_face(tmp_path / "bert", "encoder")
    options = f"--texts {texts(tmp_path / 't.txt')} --forward-only --dtype float32"
    entered(f"case export {cases} {checkpoint} {options}")
    (path,) = answer(cases).rglob("case.json")
    leave(path.with_name("run.safetensors"), "output")
    path.with_name("run.json").unlink()
    case = json.loads(path.read_text())
    assert (case["gradients"], case["wanted"]["gradients"]) == (False, [])
    assert "loss" not in case["wanted"]["taps"]
    assert "1 run: 1 agrees" in entered(f"check --from-dump {cases}")[0]
    # Gradients need a cotangent.
    tensors_path = path.with_name("case.safetensors")
    leave(tensors_path, *load_file(tensors_path).keys() - {"inputs/cotangent"})
    entered(f"check --from-dump {cases}")
    path.write_text(json.dumps({**case, "gradients": True}))
    assert "'cotangent' is missing but is required" in refused(f"check --from-dump {cases}")[0]


def test_a_workload_is_as_long_as_texts_are(tmp_path):
    preset = _own(
        OwnModel(hugging_face(tmp_path / "bert", "encoder"), texts=texts(tmp_path / "t.txt")), Models()
    )
    assert (preset.batch, preset.tokens, preset.config.num_layers) == (5, 13, 2)
    assert Workload(preset, padding="ragged").lengths == [9, 13, 4, 12, 6]
