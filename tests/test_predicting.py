"""``concord predict``: what a model says of texts, in order, whatever they are."""

import json
import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import concord
from concord import porting, spec, using
from concord.model import reader
from concord.spec.training.recipe import recipe
from concord.training import checkpoint, data, prediction
from concord.training.data.ready import encoder_of
from concord.training.plan import TrainingPlan
from tests.test_data import VOCABULARY, written
from tests.toys.disturbed import name_of
from tests.toys.surroundings import refusal, toy

NUMPY = toy("NumpyBackend")
NAMES = ("bad", "good", "so so")


def trained(folder, config, names=NAMES, plan=None):
    """Write a checkpoint for prediction alone: a model with random weights that reads characters."""
    encoder = data.TextEncoder.of("characters", VOCABULARY, config)
    labels = data.Labels(tuple(names))
    config = data.fitted(config, encoder, labels)
    checkpoint.write(
        folder,
        checkpoint.TrainingCheckpoint(
            config,
            spec.initialize(config, 3),
            labels=labels,
            encoder=encoder,
            recipe=recipe("adamw"),
            progress=checkpoint.Progress(plan=plan or TrainingPlan()),
        ),
    )
    return folder


def by_the_reference(model):
    return lambda batch: spec.reference(model.config, model.weights, batch).logits


def texts_of(count):
    random = Random(5)
    return ["".join(random.choices("abcdefgh你好吗", k=random.randint(1, 15))) for _ in range(count)]


def farthest(found, expected):
    """Return by how much probabilities differ: alone and in a batch texts are summed in other orders."""
    return np.abs(np.subtract(list(found), list(expected))).max()


# Predicting.


def test_every_text_gets_what_it_gets_alone_in_the_order_of_the_texts(tmp_path, variant_config, monkeypatch):
    monkeypatch.setattr(prediction, "AT_ONCE", 7)
    config = variant_config.replace(mask_assignment="per_sample")
    model = reader(trained(tmp_path / "model", config), spelled=False)
    samples = [
        data.Sample(number, text, text[::-1] if number % 2 else None)
        for number, text in enumerate(texts_of(17))
    ]
    together = list(prediction.predict(model, by_the_reference(model), samples, 3, data.Complaints()))
    assert [(one["line"], one["text_a"], one.get("text_b")) for one in together] == [
        (one.number, one.text_a, one.text_b) for one in samples
    ]
    for sample, found in zip(samples, together, strict=True):
        (alone,) = prediction.predict(model, by_the_reference(model), [sample], 1, data.Complaints())
        same(found, alone)
        assert found["label"] == max(found["probabilities"], key=found["probabilities"].get)


def test_texts_are_read_as_they_are_predicted(tmp_path, small, monkeypatch):
    monkeypatch.setattr(prediction, "AT_ONCE", 5)
    model, read = reader(trained(tmp_path / "model", small("bert")), spelled=False), []

    def endless():
        number = 0
        while True:
            number += 1
            read.append(number)
            yield data.Sample(number, "abc")

    stream = prediction.predict(model, by_the_reference(model), endless(), 2, data.Complaints())
    for _ in range(11):
        next(stream)
    assert len(read) == 15


def same(found, line):
    assert farthest(found["probabilities"].values(), line["probabilities"].values()) < 1e-12
    assert {**found, "probabilities": 0} == {**line, "probabilities": 0}


@pytest.fixture
def predictions(entered):
    """Return a function that predicts in float64, and gives what is said of each text."""
    usual = f"--backend {NUMPY} --dtype float64".split()
    return lambda line: [json.loads(one) for one in entered(f"predict {line}", *usual)[0].splitlines()]


def test_single_texts_and_pairs_are_predicted(predictions, tmp_path, small):
    folder = trained(tmp_path / "model", small("bert"))
    (pair,) = predictions(f"{folder} abc 你好 --pair")
    assert (pair["text_a"], pair["text_b"]) == ("abc", "你好")
    path = written(tmp_path, "pairs.tsv", "abc\t你好\nabd\tc\n")
    first, second = predictions(f"{folder} --texts {path} --columns text_a,text_b")
    same(first, pair)
    assert farthest(first["probabilities"].values(), second["probabilities"].values()) > 1e-6
    (tmp_path / "given.jsonl").write_text('{"text_a": "abc", "text_b": "你好"}\n')
    (found,) = predictions(f"{folder} --texts {tmp_path / 'given.jsonl'}")
    same({**found, "line": 1}, pair)
    lines = predictions(f"{folder} abc 你好 d")
    assert [line["text_a"] for line in lines] == ["abc", "你好", "d"]
    assert not any("text_b" in line for line in lines)


def test_the_backend_is_that_of_training_or_of_the_format(tmp_path, small):
    folder = trained(tmp_path / "model", small("bert"))
    assert using.framework_of(folder) == "torch"
    found = porting.read(folder)
    for form, name in (("jax-msgpack", "jax"), ("keras-h5", "tf"), ("paddle", "paddle")):
        porting.write(found, tmp_path / form, form)
        assert using.framework_of(tmp_path / form) == name
    for name, line in (("single", "abc\tbad\n"), ("pairs", "abc\td\tbad\n")):
        plan = TrainingPlan(backend="jax", data=str(written(tmp_path, f"{name}.tsv", line)))
        folder = trained(tmp_path / name, small("bert"), plan=plan)
        assert (using.framework_of(folder), using.knows_pairs(folder)) == ("jax", name == "pairs")


def test_a_loaded_checkpoint_says_what_the_command_says(predictions, tmp_path, small):
    folder = trained(tmp_path / "model", small("bert"))
    said = predictions(f"{folder} abc 你好 --pair")
    with concord.load(folder, NUMPY, "float64") as model:
        assert (model.backend, model.labels) == (NUMPY, NAMES)
        (found,) = model([("abc", "你好")])
        assert [found] == said
        alone = model("abc")
        assert alone["label"] == model(["abc", "d"])[0]["label"]
        assert refusal(model, ["a", ("a", "b", "c")]) == [
            "text 2 has 3 parts but must be a text, or two texts"
        ]


def test_bad_lines_are_told_in_their_place_or_end_it(entered, refused, tmp_path, small):
    folder, out = trained(tmp_path / "model", small("bert")), tmp_path / "out.jsonl"
    path = written(tmp_path, "texts.txt", b"abc\n\nd\xff\ne\n \n")
    usual = f"predict {folder} --texts {path} -o {out} --backend {NUMPY}".split()
    problems = [
        f"{path}:2: 'text_a' is empty",
        f"{path}:3: is no text in utf-8: invalid start byte at byte 1",
        f"{path}:5: 'text_a' is empty",
    ]
    assert refused(*usual) == problems
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model", "texts.txt"]
    entered(*usual, "--on-error", "skip")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("problem", line.get("line")) for line in lines] == [1, *problems[:2], 4, problems[2]]


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("model a b c --pair", ["--pair is given with 3 texts but takes them two by two"]),
        (
            "none a --backend troch",
            ["unknown backend 'troch': did you mean 'torch'?", "none: no such file or folder"],
        ),
        (
            "model a --dtype float46 --batch 0",
            [
                "unknown dtype 'float46': did you mean 'float64' or 'float16'",
                "--batch is 0 but must be at least 1",
            ],
        ),
        (
            "model --evaluate dev.tsv",
            ["dev.tsv:1: label is 'ugly' but must be one of 'bad', 'good', 'so so'"],
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(refused, tmp_path, small, monkeypatch, line, problems):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "model", small("bert"))
    written(tmp_path, "dev.tsv", "ab\tugly\n")
    usual = "" if "--backend" in line else f"--backend {NUMPY}"
    for said, problem in zip(refused(f"predict {line} {usual}"), problems, strict=True):
        assert said.startswith(problem)


def test_a_backend_that_gives_nothing_ends_with_its_own_exit_code(entered, tmp_path, small):
    folder = trained(tmp_path / "model", small("bert"))
    dies, out = name_of("SIGKILL"), tmp_path / "out.jsonl"
    _, errors = entered(f"predict {folder} abc --backend {dies} -o {out}", ends=3)
    assert not out.exists()
    assert dies in errors[0]


# Evaluating.


def test_an_evaluation_is_what_the_predictions_come_to(entered, predictions, tmp_path, small):
    folder, texts = trained(tmp_path / "model", small("bert")), texts_of(29)
    labels = [NAMES[number % 3] for number in range(29)]
    lines = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
    path = written(tmp_path, "dev.tsv", "\n".join([*lines, "no label", "", "x\tugly"]) + "\n")
    out, html = tmp_path / "out.json", tmp_path / "page.html"
    output, errors = entered(
        f"predict {folder} --evaluate {path} --backend {NUMPY} --dtype float64 --on-error skip "
        f"--json {out} --html {html}"
    )
    assert not errors
    found = json.loads(out.read_text())
    said = predictions(f"{folder} --texts {written(tmp_path, 'good.txt', chr(10).join(texts))}")
    right = [one["label"] == label for one, label in zip(said, labels, strict=True)]
    loss = -np.mean([math.log(one["probabilities"][label]) for one, label in zip(said, labels, strict=True)])
    assert (found["samples"], found["bad_lines"], found["labels"]) == (29, 3, list(NAMES))
    assert (found["accuracy"], abs(found["loss"] - loss) < 1e-12) == (sum(right) / 29, True)
    assert f"accuracy {found['accuracy']:.4f}, macro F1 {found['macro_f1']:.4f}" in output
    assert f"left out: {path}:31: has 1 columns but must have 2: text_a, label" in output
    page = html.read_text()
    assert [f'<td class="text">{text}</td>' not in page for text in texts] == right


def test_texts_are_those_of_a_roberta():
    marks = ["<s>", "<pad>", "</s>", "<unk>"]
    entries = [*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # As theirs are: of bytes, and it says no unknown token.
    tokenizer = Tokenizer(models.BPE({entry: number for number, entry in enumerate(entries)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    tokenizer.add_special_tokens(marks)
    config = spec.variant("roberta", vocab_size=260, max_positions=41)
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    made, own = (encoder_of(Path(), files, config, spelled=spelled) for spelled in (False, True))
    for pair in (("café, 天气", None), ("", "naïve")):
        assert made.encode(*pair).ids.tolist() == own.encode(*pair).ids.tolist()
    long = made.encode("a" * 99, "b" * 99)
    assert (len(long.ids), long.ids.tolist().count(2), long.truncated) == (39, 3, 198 - 35)
    assert [one.encode("a </s> b").ids.tolist().count(2) for one in (made, own)] == [1, 2]


def test_a_model_whose_logits_are_nan_is_undecided(entered, tmp_path, small):
    folder, nan = trained(tmp_path / "model", small("bert")), f"--backend {toy('ReturnsNaN')}"
    path, out = written(tmp_path, "dev.tsv", "ab\tbad\nc\tgood\n"), tmp_path / "out.json"
    output, _ = entered(f"predict {folder} --evaluate {path} --json {out} {nan}")
    found = json.loads(out.read_text())
    assert (found["undecided"], found["accuracy"], found["loss"]) == ([1, 1, 0], 0.0, None)
    assert "none: NaN" in output
    line = json.loads(entered(f"predict {folder} ab {nan}")[0])
    assert (line["label"], set(line["probabilities"].values())) == (None, {None})
