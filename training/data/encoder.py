"""Texts and pairs of texts as ids: ``[CLS] a [SEP] b [SEP]``, or with RoBERTa's second mark between them; segment ids, and truncation that keeps both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located
from concord.spec.files import read_as, read_text, write_text
from concord.training.data import tokenizers
from concord.training.data.labels import Labels

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE, TEXT_FILE = "tokenizer.json", "text.json"

MOST_BETWEEN = 4
"""Marks that may stand between two texts besides the one after the first."""

AT_ONCE = 512
"""Texts that are encoded at once."""


@dataclass(frozen=True)
class Text:
    """How ids of texts are put together; the content of ``text.json``.

    Attributes:
        max_tokens: of a sample, with the special ones.
        segments: the segment ids of the first text, of the second, and of padding.
        padding: the token that fills up a batch.
        unknown: the token in place of those that the vocabulary does not have.
        first: the token before the first text.
        separator: the token after each text.
        between: how many more of it stand between two texts: RoBERTa has one.
    """

    max_tokens: int
    segments: tuple[int, int, int] = (0, 1, 0)
    padding: str = "[PAD]"
    unknown: str = "[UNK]"
    first: str = "[CLS]"
    separator: str = "[SEP]"
    between: int = 0
    format: Literal["concord.text/1"] = "concord.text/1"


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text, or a pair, as a model gets it.

    Attributes:
        ids: int64 (T,), the tokens.
        segment_ids: int64 (T,).
        tokens: what each token stands for: the characters of the text as they were written, or the name of a special token.
        offsets: for each token its text, 0 or 1, and from which character to which; None for a special token.
        truncated: how many tokens of each text were cut off at its end.
    """

    ids: NDArray[np.int64]
    segment_ids: NDArray[np.int64]
    tokens: tuple[str, ...]
    offsets: tuple[tuple[int, int, int] | None, ...]
    truncated: tuple[int, int]


class TextEncoder:
    """A tokenizer, and how what it yields is put together.

    Args:
        tokenizer: of ``tokenizers``. What it does after dividing a text (special tokens, truncation, padding) is left out.
        text: how ids are put together.

    Raises:
        SpecError: if its vocabulary lacks a special token, or there is no room for any text.
    """

    def __init__(self, tokenizer: Tokenizer, text: Text) -> None:
        self.tokenizer, self.text = tokenizer, text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        names = (text.padding, text.unknown, text.first, text.separator)
        problems = [
            f"the tokenizer's vocabulary lacks {name!r}"
            for name in dict.fromkeys(names)
            if tokenizer.token_to_id(name) is None
        ]
        if len(set(names)) < len(names):
            problems.append(f"special tokens are {', '.join(names)} but must be four")
        if not 0 <= text.between <= MOST_BETWEEN:
            problems.append(f"'between' is {text.between} but must be at least 0 and at most {MOST_BETWEEN}")
        elif text.max_tokens < 5 + text.between:
            problems.append(
                f"'max_tokens' is {text.max_tokens} but must be at least {5 + text.between}: two texts of a token, and {3 + text.between} special ones"
            )
        if min(text.segments) < 0 or max(text.segments) > 127:
            problems.append(f"'segments' are {', '.join(map(str, text.segments))} but must lie in [0, 128)")
        if problems:
            raise SpecError(problems)
        ids = tokenizer.get_vocab()
        self.pad_id, self.unknown_id, self.first_id, self.separator_id = (ids[name] for name in names)
        self.vocab_size = 1 + max(ids.values())

    @classmethod
    def learn(
        cls,
        texts: Iterable[str],
        config: EncoderConfig,
        tokenization: str = "characters",
        size: int | None = None,
        max_tokens: int | None = None,
        lowercase: bool = True,
    ) -> TextEncoder:
        """Learn a vocabulary from texts, and encode as a configuration needs it.

        Args:
            tokenization: one of :data:`~concord.training.data.tokenizers.TOKENIZATIONS`.
            size: of the vocabulary, at most; by default ``vocab_size`` of the configuration.
            max_tokens: of a sample; by default as many as the configuration has positions for.

        Raises:
            SpecError: if there is nothing to learn.
        """
        vocabulary = tokenizers.learnt(tokenization, texts, size or config.vocab_size, lowercase=lowercase)
        return cls(
            tokenizers.from_vocabulary(tokenization, vocabulary, lowercase), text_for(config, max_tokens)
        )

    @classmethod
    def from_vocabulary(
        cls,
        path: Path,
        config: EncoderConfig,
        tokenization: str = "wordpiece",
        max_tokens: int | None = None,
        lowercase: bool = True,
    ) -> TextEncoder:
        """Take the vocabulary of a ``vocab.txt``, and encode as a configuration needs it; the arguments are those of :meth:`learn`.

        Raises:
            SpecError: if the file cannot be read, or is no vocabulary.
        """
        with located(str(path)):
            tokenizer = tokenizers.from_vocabulary(tokenization, tokenizers.read_vocabulary(path), lowercase)
        return cls(tokenizer, text_for(config, max_tokens))

    @classmethod
    def read(cls, folder: Path) -> TextEncoder:
        """Read the two files that :meth:`write` writes.

        Raises:
            SpecError: if they cannot be read, or do not fit each other.
        """
        text = read_as(folder / TEXT_FILE, Text, written_by="'concord train'")
        tokenizer = tokenizers.from_json(read_text(folder / TOKENIZER_FILE), str(folder / TOKENIZER_FILE))
        with located(str(folder / TEXT_FILE)):
            return cls(tokenizer, text)

    def files(self) -> dict[str, str]:
        """Return the texts of those files by name."""
        return {
            TOKENIZER_FILE: self.tokenizer.to_str(pretty=True) + "\n",
            TEXT_FILE: json.dumps(dataclasses.asdict(self.text), ensure_ascii=False, indent=1) + "\n",
        }

    def write(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``text.json`` into a folder.

        Raises:
            SpecError: if they cannot be written.
        """
        for name, content in self.files().items():
            write_text(folder / name, content)

    def digest(self) -> str:
        """Return a digest of all that decides how a text is encoded."""
        return hashlib.sha256(json.dumps(self.files(), sort_keys=True).encode()).hexdigest()

    def encode(self, a: str, b: str | None = None) -> Encoded:
        """Encode a text, or a pair.

        Raises:
            SpecError: if one is no text: it holds a lone surrogate.
        """
        parts = [
            (number, text, self._divided([text])[0]) for number, text in enumerate((a, b)) if text is not None
        ]
        lengths = self.room(*(len(found.ids) for *_, found in parts))
        ids, segments, tokens = [self.first_id], [self.text.segments[0]], [self.text.first]
        offsets: list[tuple[int, int, int] | None] = [None]
        for (number, text, found), length in zip(parts, lengths, strict=False):
            ids += [*self._plain(np.array(found.ids[:length], np.int64)), self.separator_id]
            segments += [self.text.segments[number]] * (length + 1)
            tokens += [*(text[start:end] for start, end in found.offsets[:length]), self.text.separator]
            offsets += [*((number, start, end) for start, end in found.offsets[:length]), None]
            if number == 0 and b is not None:
                ids += [self.separator_id] * self.text.between
                segments += [self.text.segments[0]] * self.text.between
                tokens += [self.text.separator] * self.text.between
                offsets += [None] * self.text.between
        cut = [len(found.ids) - length for (*_, found), length in zip(parts, lengths, strict=False)]
        return Encoded(
            np.array(ids, np.int64),
            np.array(segments, np.int64),
            tuple(tokens),
            tuple(offsets),
            (cut[0], sum(cut[1:])),
        )

    def encode_many(
        self, pairs: Sequence[tuple[str, str | None]]
    ) -> Iterator[tuple[NDArray[np.int64], int, int]]:
        """Encode many, without tokens as text.

        Yields:
            Ids (T,); how many of them belong to the first text, with ``[CLS]`` and what stands before the second; how many tokens were cut off.

        Raises:
            SpecError: as :meth:`encode`.
        """
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            seconds = iter(self._divided([b for _, b in some if b is not None]))
            for (_, b), first in zip(some, self._divided([a for a, _ in some]), strict=True):
                parts = [first.ids] if b is None else [first.ids, next(seconds).ids]
                lengths = self.room(*map(len, parts))
                kept = [
                    self._plain(np.array(ids[:length], np.int64))
                    for ids, length in zip(parts, lengths, strict=False)
                ]
                before = 1 + (self.text.between if b is not None else 0)
                joined = [
                    [self.first_id],
                    kept[0],
                    [self.separator_id] * before,
                    *((kept[1], [self.separator_id]) if b is not None else ()),
                ]
                yield (
                    np.concatenate([np.asarray(ids, np.int64) for ids in joined]),
                    len(kept[0]) + 1 + before,
                    sum(map(len, parts)) - sum(map(len, kept)),
                )

    def room(self, a: int, b: int | None = None) -> tuple[int, int]:
        """Return how many tokens of two texts are kept: the longer one is cut first, and neither below half of the room, as ``longest_first`` of ``tokenizers`` does.

        Args:
            a: tokens of the first text.
            b: tokens of the second, if there is one.
        """
        if b is None:
            return min(a, self.text.max_tokens - 2), 0
        room = self.text.max_tokens - 3 - self.text.between
        if a + b <= room:
            return a, b
        shorter = min(a, b, room // 2)
        return (shorter, room - shorter) if a <= b else (room - shorter, shorter)

    def _divided(self, texts: list[str]) -> list[Any]:
        try:
            return list(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        except TypeError:
            for text in texts:
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise SpecError(
                        f"{text[:40]!r} is no text: {error.reason} at character {error.start}"
                    ) from None
            raise

    def _plain(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ids in which nothing that a text says is padding or a mark of ours."""
        ids[np.isin(ids, (self.pad_id, self.first_id, self.separator_id))] = self.unknown_id
        return ids


def text_for(config: EncoderConfig, max_tokens: int | None = None) -> Text:
    """Return how ids are put together for a configuration: with three segments, padding has the first, as in BERT-pytorch.

    Args:
        max_tokens: of a sample; by default as many as there are positions for.

    Raises:
        SpecError: if there are not so many positions.
    """
    room = config.max_positions - config.position_start
    if max_tokens is not None and max_tokens > room:
        raise SpecError(
            f"'max_tokens' is {max_tokens} but must be at most {room}: so many positions has the model [clause=INP-2]"
        )
    segments = (1, 2, 0) if config.num_segments > 2 else (0, min(1, max(0, config.num_segments - 1)), 0)
    return Text(room if max_tokens is None else max_tokens, segments)


def fitted(config: EncoderConfig, encoder: TextEncoder, labels: Labels) -> EncoderConfig:
    """Return a configuration for texts that are encoded so, and for their classes.

    ``vocab_size``, ``num_classes``, ``pad_id``, and what follows from it, are those of the data, and there are no more positions than tokens.
    """
    start = config.padded_by(encoder.pad_id, vocab_size=encoder.vocab_size).position_start
    return config.padded_by(
        encoder.pad_id,
        vocab_size=encoder.vocab_size,
        num_classes=labels.num_classes(config),
        max_positions=encoder.text.max_tokens + start,
    )


def unfit(config: EncoderConfig, encoder: TextEncoder, labels: Labels) -> list[str]:
    """Return what keeps a model from taking what an encoder yields, and from telling some classes apart."""
    room = config.max_positions - config.position_start
    pairs = (
        (
            encoder.vocab_size > config.vocab_size,
            f"the tokenizer has {encoder.vocab_size} tokens but must have at most {config.vocab_size}, as 'vocab_size' says",
        ),
        (
            encoder.pad_id != config.pad_id,
            f"the tokenizer's padding is {encoder.pad_id} but must be {config.pad_id}, as 'pad_id' says",
        ),
        (
            encoder.text.max_tokens > room,
            f"a sample may have {encoder.text.max_tokens} tokens but must have at most {room}, as 'max_positions' says",
        ),
        (
            0 < config.num_segments <= max(encoder.text.segments),
            f"segments are {encoder.text.segments} but must be below {config.num_segments}, as 'num_segments' says",
        ),
        (
            labels.num_classes(config) != config.num_classes,
            f"there are {len(labels.names)} labels but must be {max(2, config.num_classes)}, as 'num_classes' says",
        ),
    )
    return [problem for wrong, problem in pairs if wrong]
