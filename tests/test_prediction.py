import json

import numpy as np
import pytest
from scipy.special import expit, softmax

import concord
from concord import porting, spec
from concord.porting.prediction import TextPredictor, read_model
from concord.porting.texts import Text, batch_of
from concord.spec.batch import completed
from tests.toys.checkpoints import SIZES, saved
from tests.toys.disturbed import name_of
from tests.toys.ready import CONFIG, SENTENCES, VOCABULARY, hugging_face, texts
from tests.toys.surroundings import EACH_BACKEND_ANEW, refusal, toy

NUMPY = toy("NumpyBackend")
NAMES = {"id2label": {"0": "bad", "1": "good", "2": "so so"}}


@pytest.fixture
def folder(tmp_path):
    return hugging_face(tmp_path / "bert", **NAMES)


@pytest.fixture
def predictions(entered):
    # In float64; the function returns what is printed for each text.
    usual = f"--backend {NUMPY} --dtype float64".split()
    return lambda line: [json.loads(row) for row in entered(f"predict {line}", *usual)[0].splitlines()]


def written(folder, config, part="model"):
    return saved(folder, "concord", config, part=part, files={"vocab.txt": VOCABULARY.encode()})


def output_of(model, text):
    return spec.reference(
        *(
            model.config,
            model.weights,
            completed(model.config, batch_of(model.config, model.encoder.encode([Text(text)])), model.part),
        ),
        part=model.part,
    ).output[0]


def far(actual, expected):
    return np.abs(np.subtract(actual, expected)).max()


def test_probabilities_are_those_of_the_loss(folder):
    model = read_model(folder)
    with concord.load(folder, NUMPY, "float64") as predictor:
        results = predictor(SENTENCES)
        assert refusal(predictor, ["a", ("b", ""), " "]) == ["text 2 is empty", "text 3 is empty"]
    for text, result in zip(SENTENCES, results, strict=True):
        logits = output_of(model, text)
        assert far(list(result["probabilities"].values()), softmax(logits)) < 1e-12
        assert result["label"] == ("bad", "good", "so so")[logits.argmax()]
        assert (result["text_a"], result["truncated"]) == (text, 0)


@pytest.mark.clause("MSK-1")
def test_padding_is_what_the_tokenizer_says(tmp_path):
    first, *others = VOCABULARY.splitlines(keepends=True)  # XLM-R's vocabulary begins with "<s>"
    words = "".join([others[1], first, others[0], *others[2:]]).encode()
    results = []
    for name, stated in (("other", 0), ("right", 1)):
        folder = hugging_face(tmp_path / name, pad_token_id=stated, **NAMES)
        (folder / "vocab.txt").write_bytes(words)
        (folder / "tokenizer_config.json").write_text('{"pad_token": {"content": "[PAD]"}}')
        with concord.load(folder, NUMPY, "float64") as predictor:
            results += [predictor(["cat", *SENTENCES]), [predictor("cat"), *predictor(SENTENCES)]]
        porting.write(porting.read(folder), tmp_path / f"{name} again", "hugging-face-bin")
        again = tmp_path / f"{name} again"
        assert json.loads((again / "config.json").read_text())["pad_token_id"] == stated
        config = porting.read(again).config
        assert (config.pad_id, config.token_padding_row) == (1, stated)
    for result in results[1:]:
        for row, expected in zip(result, results[0], strict=True):
            assert far([*row["probabilities"].values()], [*expected["probabilities"].values()]) < 1e-12


def test_padding_that_determines_positions_is_the_tokenizers(tmp_path):
    config = spec.variant("roberta", **{**SIZES, "vocab_size": len(VOCABULARY.split()), "max_positions": 19})
    files = {"vocab.txt": VOCABULARY.encode(), "special_tokens_map.json": b'{"pad_token": "[MASK]"}'}
    folder = saved(tmp_path / "roberta", "hugging-face-roberta", config, files=files)
    assert refusal(porting.read, folder) == [
        f"{folder / 'config.json'}: the padding id is 1 but must be 4, as in the tokenizer beside it"
    ]


def test_a_model_with_one_output_has_two_classes(tmp_path):
    written(tmp_path / "one", CONFIG.replace(num_classes=1))
    (logit,) = output_of(read_model(tmp_path / "one"), "the cat")
    with concord.load(tmp_path / "one", NUMPY, "float64") as predictor:
        result = predictor("the cat")
    assert abs(result["probabilities"]["1"] - expit(logit)) < 1e-12
    assert result["label"] == str(int(logit > 0))


def test_each_class_has_its_own_name(tmp_path):
    folder = hugging_face(tmp_path / "same", id2label={"0": "bad", "1": "good", "2": "bad"})
    assert refusal(read_model, folder) == [f"{folder}: two classes have the same name: bad, good, bad"]
    single = porting.Checkpoint(CONFIG.replace(num_classes=1), "model", {}, labels=("score",))
    assert single.classes == ("0", "1")


def test_texts_and_pairs_are_predicted_in_their_order_however_many(predictions, folder, tmp_path):
    (pair,) = predictions(f"{folder} cat dog --pair")
    assert (pair["text_a"], pair["text_b"]) == ("cat", "dog")
    both = texts(tmp_path / "pairs.txt", "cat\tdog")
    (again,) = predictions(f"{folder} --texts {both}")
    assert far(list(again["probabilities"].values()), list(pair["probabilities"].values())) < 1e-12
    many = [f"{'quick ' * (number % 7)}cat" for number in range(11)]
    assert [
        result["text_a"] for result in predictions(f"{folder} --texts {texts(tmp_path / 'many.txt', *many)}")
    ] == many


def test_numbers_have_the_digits_of_their_dtype(entered, folder):
    for number in json.loads(entered(f"predict {folder} cat --backend {NUMPY}")[0])["probabilities"].values():
        assert str(np.float32(number)) == str(number)


@pytest.mark.parametrize("worker", EACH_BACKEND_ANEW, indirect=True)
def test_every_framework_embeds_sentences_as_the_reference_does(worker, tmp_path):
    model = read_model(
        written(
            tmp_path / "pooled", CONFIG.replace(pooling="mean", pooler="none", length_epsilon=1e-12), "pooled"
        )
    )
    result = TextPredictor(model, worker, "float64")("the cat")
    assert {*result} == {"text_a", "embedding", "truncated"}
    assert abs(np.linalg.norm(result["embedding"]) - 1) < 1e-6
    assert far(result["embedding"], output_of(model, "the cat")) < 1e-10


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("bert a ''", ["text 2 is empty"]),
        ("bert --texts t --pair", ["--pair is for TEXT arguments; in a file, a tab separates the two texts"]),
        ("bert a b c --pair", ["--pair is given with 3 TEXT arguments but needs an even number, 2 or more"]),
        (
            "none a --backend troch",
            ["unknown backend 'troch': did you mean 'torch'?", "none: no such file or folder"],
        ),
        ("encoder a", ["encoder holds the part 'encoder' but must hold one of model, pooled"]),
    ],
)
def test_what_cannot_be_predicted_is_refused(refused, tmp_path, folder, monkeypatch, line, problems):
    monkeypatch.chdir(tmp_path)
    hugging_face(tmp_path / "encoder", "encoder")
    usual = "" if "--backend" in line else f"--backend {NUMPY}"
    for message, problem in zip(refused(f"predict {line} {usual}"), problems, strict=True):
        assert message.startswith(problem)


def test_a_backend_that_gives_nothing_ends_with_its_own_exit_code(entered, folder):
    dies = name_of("SIGKILL")
    output, errors = entered(f"predict {folder} cat --backend {dies}", ends=3)
    assert not output
    assert dies in errors[0]


def test_a_model_whose_logits_are_nan_says_so(entered, folder):
    line = json.loads(entered(f"predict {folder} cat --backend {toy('ReturnsNaN')}")[0])
    assert (line["label"], line["probabilities"]) == (None, None)
