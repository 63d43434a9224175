"""Texts, batches and training of the course's text matching (NNDL, practice 8.3 and 8.4)."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from data import order
from datasets import Features, Value, disable_progress_bars, load_dataset
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from concord import porting, spec
from concord.backends.interface import Request
from concord.spec.errors import refuse
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
CSV_WITHOUT_QUOTES = 3

disable_progress_bars()


# Texts.


def read(folder: Path, *needed: str) -> dict[str, list[dict[str, str]]]:
    """The samples of ``*.tsv`` by split: text_a, optionally text_b, and label."""
    files = {path.stem: str(path) for path in sorted(folder.glob("*.tsv"))}
    refuse([f"{folder / split}.tsv is missing" for split in needed if split not in files])
    with open(files[needed[0]], encoding="utf-8") as file:
        first = file.readline().rstrip("\r\n").split("\t")
    header = "label" in first
    columns = first if header else [*["text_a", "text_b"][: len(first) - 1], "label"]
    datasets = load_dataset(
        "csv",
        data_files=files,
        sep="\t",
        column_names=columns,
        skiprows=int(header),
        features=Features({name: Value("string") for name in columns}),
        quoting=CSV_WITHOUT_QUOTES,
        keep_default_na=False,  # otherwise a text such as "NA" would be missing
    )
    return {split: rows.to_list() for split, rows in datasets.items()}


def learn_tokenizer(samples: list[dict[str, str]], vocabulary: int, tokens: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False, handle_chinese_chars=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocabulary, min_frequency=2, show_progress=False, special_tokens=SPECIAL
    )
    texts = (sample[name] for sample in samples for name in ("text_a", "text_b") if name in sample)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.enable_truncation(tokens, strategy="longest_first")
    return tokenizer


class Encoded(NamedTuple):
    ids: list[list[int]]
    segments: list[list[int]]
    labels: np.ndarray


def encode(samples: list[dict[str, str]], tokenizer: Tokenizer, labels: list[str]) -> Encoded:
    texts = [
        (sample["text_a"], sample["text_b"]) if "text_b" in sample else sample["text_a"] for sample in samples
    ]
    encoded = tokenizer.encode_batch(texts)
    classes = np.array([labels.index(sample["label"]) for sample in samples], np.int64)
    return Encoded([text.ids for text in encoded], [text.type_ids for text in encoded], classes)


# Batches depend only on seed and epoch, so every framework gets the same ones.


def batches(data: Encoded, size: int, seed: int | None = None, epoch: int = 0) -> Iterator[spec.Batch]:
    """Yield an epoch of batches of texts with similar lengths, which need little padding.

    Args:
        seed: shuffles them; None sorts them by length, for an evaluation.
    """
    lengths = np.array([len(ids) for ids in data.ids])
    indices = np.arange(len(lengths)) if seed is None else order(len(lengths), seed, epoch)
    buckets = np.split(indices, range(64 * size, len(indices), 64 * size))
    indices = np.concatenate([bucket[np.argsort(-lengths[bucket], kind="stable")] for bucket in buckets])
    groups = np.split(indices, range(size, len(indices), size))
    if seed is not None:
        full = len(lengths) // size  # a short batch stays the last
        groups = [groups[number] for number in order(full, seed, epoch)] + groups[full:]
    for rows in groups:
        # Widths are multiples of 16, because frameworks compile for each width.
        width = -(-lengths[rows].max() // 16) * 16
        ids, segments = (np.zeros((len(rows), width), np.int64) for _ in range(2))
        for place, row in enumerate(rows):
            ids[place, : lengths[row]], segments[place, : lengths[row]] = data.ids[row], data.segments[row]
        yield spec.Batch(input_ids=ids, segment_ids=segments, labels=data.labels[rows])


# Training.


def first_weights(config: spec.EncoderConfig, seed: int) -> dict[str, np.ndarray]:
    # Embeddings are as small as BERT's, and so are queries and keys: at first, attention is nearly uniform.
    weights = spec.initialize(config, seed)
    for name, entry in spec.parameters(config).items():
        if entry.kind in ("bias", "beta"):
            weights[name][:] = 0
        elif entry.kind == "gamma":
            weights[name][:] = 1
        elif entry.kind == "embedding" or name.endswith(("query.weight", "key.weight")):
            weights[name] *= 0.02 / weights[name].std()
    return weights


@dataclass
class Course:
    """Data and recipe, the same for every framework and seed."""

    data: dict[str, Encoded]
    tokenizer: Tokenizer
    labels: list[str]
    recipe: Recipe
    epochs: int
    batch: int = 32

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, epochs: int, tokens: int, vocabulary: int) -> "Course":
        samples = read(folder, "train", "dev")
        labels = sorted({sample["label"] for sample in samples["train"]})
        unseen = {sample["label"] for rows in samples.values() for sample in rows} - {*labels}
        refuse([f"{folder}: train.tsv has no text with the label {label!r}" for label in sorted(unseen)])
        tokenizer = learn_tokenizer(samples["train"], vocabulary, tokens)
        data = {split: encode(rows, tokenizer, labels) for split, rows in samples.items()}
        course = cls(data, tokenizer, labels, recipe, epochs)
        if recipe.total_steps is not None:  # the schedule ends with the run
            steps = epochs * math.ceil(len(data["train"].ids) / course.batch)
            course.recipe = recipe.replace(total_steps=steps)
        return course

    def config(self, variant: str, tokens: int, **sizes: int) -> spec.EncoderConfig:
        fitted = {"vocab_size": self.tokenizer.get_vocab_size(), "num_classes": len(self.labels)}
        return spec.variant(variant, max_positions=-(-tokens // 16) * 16, **fitted, **sizes)


@dataclass
class Result:
    """The weights of the best epoch, and every epoch's figures."""

    config: spec.EncoderConfig
    weights: dict[str, np.ndarray]
    epochs: list[dict[str, float]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return max(epoch["accuracy"] for epoch in self.epochs)


def evaluate(predict, data: Encoded) -> tuple[float, float]:
    right, loss = 0, 0.0
    for batch in batches(data, 128):
        logits = np.asarray(predict(batch), np.float64)
        right += int((logits.argmax(1) == batch.labels).sum())
        largest = logits.max(1)
        log_sums = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
        loss += float((log_sums - logits[np.arange(len(logits)), batch.labels]).sum())
    return right / len(data.labels), loss / len(data.labels)


def train(
    worker,
    course: Course,
    config: spec.EncoderConfig,
    seed: int = 0,
    report=print,
    improved=lambda result: None,
) -> Result:
    """Train in a framework's worker; seed and epoch decide weights, order and dropout.

    Args:
        report: gets a line for each epoch.
        improved: gets the result after each epoch that is the best so far.
    """
    result = Result(config, first_weights(config, seed))
    first = next(batches(course.data["train"], course.batch, seed))
    request = Request(config, result.weights, first, training=Training(course.recipe, [], seed))
    session, best = worker.train(request), (-1.0, 0.0)
    for epoch in range(course.epochs):
        epoch_batches = batches(course.data["train"], course.batch, seed, epoch)
        losses = [float(session.step([batch])["losses.0"]) for batch in epoch_batches]
        accuracy, loss = evaluate(session.predict, course.data["dev"])
        line = {"epoch": epoch + 1, "loss": float(np.mean(losses)), "accuracy": accuracy, "dev loss": loss}
        result.epochs.append(line)
        report(", ".join(f"{name} {value:.4g}" for name, value in line.items()))
        if (accuracy, -loss) > best:
            best, state = (accuracy, -loss), session.state()
            result.weights |= {
                name.removeprefix("parameters."): array
                for name, array in state.items()
                if name.startswith("parameters.")
            }
            improved(result)
    return result


def save(folder: Path, course: Course, result: Result) -> None:
    files = {
        "tokenizer.json": course.tokenizer.to_str().encode(),
        "labels.json": json.dumps({"format": "concord.labels/1", "names": course.labels}).encode(),
    }
    weights = {name: np.asarray(array, np.float32) for name, array in result.weights.items()}
    porting.write(porting.from_weights(result.config, weights, files=files), folder, "concord", force=True)
    (folder / "epochs.json").write_text(json.dumps(result.epochs, indent=1) + "\n")
