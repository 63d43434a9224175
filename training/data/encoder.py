"""Texts and pairs of texts as ids: a tokenizer of ``tokenizers``, whose template puts marks around them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located
from concord.spec.files import read_as, read_text
from concord.spec.text import first_line
from concord.training.data import tokenizers
from concord.training.data.labels import Labels

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE, TEXT_FILE = "tokenizer.json", "text.json"

AT_ONCE = 512
"""Texts that are encoded at once."""


@dataclass(frozen=True)
class Text:
    """How a tokenizer is used; the content of ``text.json``.

    Attributes:
        max_tokens: of a sample, marks included. The longer of two texts is cut first.
        padding: the token that fills up a batch; None: nobody needs it.
        unknown: the token in place of those that the vocabulary does not have; None: nobody needs it.
        prompt: what is put before the first text.
        spelled: whether a text that spells a mark or padding has one there; else it is unknown.
    """

    max_tokens: int
    padding: str | None = tokenizers.PADDING
    unknown: str | None = tokenizers.UNKNOWN
    prompt: str = ""
    spelled: bool = False
    format: Literal["concord.text/2"] = "concord.text/2"


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text, or a pair, as a model gets it (T tokens).

    Attributes:
        ids: int64 (T,).
        segment_ids: int64 (T,).
        tokens: what each is called; of what is unknown, the characters as they were written.
        texts: to which text each token belongs, 0 or 1; None for a mark.
        truncated: how many tokens were cut off.
    """

    ids: NDArray[np.int64]
    segment_ids: NDArray[np.int64]
    tokens: tuple[str, ...]
    texts: tuple[int | None, ...]
    truncated: int


class TextEncoder:
    """A tokenizer, and how it is used.

    Raises:
        SpecError: if its vocabulary lacks a token that has to be there.
    """

    def __init__(self, tokenizer: Tokenizer, text: Text) -> None:
        self.tokenizer, self.text = tokenizer, text
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab()
        names = [name for name in (text.padding, text.unknown) if name is not None]
        problems = [f"the tokenizer's vocabulary lacks {name!r}" for name in names if name not in ids]
        if text.max_tokens < 1:
            problems.append(f"'max_tokens' is {text.max_tokens} but must be at least 1")
        if problems:
            raise SpecError(problems)
        self.pad_id, self.unknown_id = (ids.get(name or "", -1) for name in (text.padding, text.unknown))
        self.vocab_size = 1 + max(ids.values(), default=0)
        ((probe,)) = self._divided([("a", "a")])
        self.segments = 1 + max(probe.type_ids, default=0)
        marks = [token for token, text in zip(probe.ids, probe.sequence_ids, strict=True) if text is None]
        self.marks = sorted({self.pad_id, *marks})

    @classmethod
    def of(
        cls,
        tokenization: str,
        vocabulary: Iterable[str],
        config: EncoderConfig,
        max_tokens: int | None = None,
    ) -> TextEncoder:
        """Encode as a configuration needs it: with three segments, padding has the first, as in BERT-pytorch.

        Args:
            tokenization: one of :data:`~concord.training.data.tokenizers.TOKENIZATIONS`, or ``wordpiece``.
            max_tokens: of a sample; by default as many as the configuration has positions for.

        Raises:
            SpecError: if it is no vocabulary, or there are not so many positions.
        """
        room = config.max_positions - config.position_start
        if max_tokens is not None and max_tokens > room:
            raise SpecError(
                f"'max_tokens' is {max_tokens} but must be at most {room}: "
                "so many positions has the model [clause=INP-2]"
            )
        segments = (1, 2) if config.num_segments > 2 else (0, int(config.num_segments > 1))
        found = tokenizers.from_vocabulary(tokenization, vocabulary, segments=segments)
        return cls(found, Text(room if max_tokens is None else max_tokens))

    @classmethod
    def learn(
        cls,
        texts: Iterable[str],
        config: EncoderConfig,
        tokenization: str = "characters",
        size: int | None = None,
        max_tokens: int | None = None,
    ) -> TextEncoder:
        """Learn a vocabulary from texts (:meth:`of`).

        Args:
            size: of the vocabulary, at most; by default ``vocab_size`` of the configuration.

        Raises:
            SpecError: if there is nothing to learn.
        """
        vocabulary = tokenizers.learnt(tokenization, texts, size or config.vocab_size)
        return cls.of(tokenization, vocabulary, config, max_tokens)

    @classmethod
    def read(cls, folder: Path) -> TextEncoder:
        """Read the two files of :meth:`files` in a folder.

        Raises:
            SpecError: if they cannot be read, or do not fit each other.
        """
        text = read_as(folder / TEXT_FILE, Text, written_by="'concord train'")
        tokenizer = tokenizers.from_json(read_text(folder / TOKENIZER_FILE), str(folder / TOKENIZER_FILE))
        with located(str(folder / TEXT_FILE)):
            return cls(tokenizer, text)

    def limited(self, max_tokens: int | None) -> TextEncoder:
        """Return the encoder of shorter samples; None: itself."""
        if max_tokens is None:
            return self
        return TextEncoder(self.tokenizer, dataclasses.replace(self.text, max_tokens=max_tokens))

    def files(self) -> dict[str, str]:
        """Return the texts of its two files by name."""
        return {
            TOKENIZER_FILE: self.tokenizer.to_str(pretty=True) + "\n",
            TEXT_FILE: json.dumps(dataclasses.asdict(self.text), ensure_ascii=False, indent=1) + "\n",
        }

    def encode(self, a: str, b: str | None = None) -> Encoded:
        """Encode a text, or a pair.

        Raises:
            SpecError: if one is no text, or there is no room for the marks.
        """
        return next(self.encode_many([(a, b)]))

    def encode_many(self, pairs: Sequence[tuple[str, str | None]]) -> Iterator[Encoded]:
        """Encode many.

        Raises:
            SpecError: as :meth:`encode`.
        """
        most = self.text.max_tokens
        for start in range(0, len(pairs), AT_ONCE):
            some = [(self.text.prompt + a, b) for a, b in pairs[start : start + AT_ONCE]]
            whole = self._divided(some)
            kept, long = list(whole), [n for n, one in enumerate(whole) if len(one.ids) > most]
            marks = max((whole[n].sequence_ids.count(None) for n in long), default=0)
            if long and most <= marks:
                raise SpecError(
                    f"a sample may have {most} tokens but must have more than {marks}: "
                    "so many marks stand around its text"
                )
            if long:
                self.tokenizer.enable_truncation(most, strategy="longest_first")
                for n, one in zip(long, self._divided([some[n] for n in long]), strict=True):
                    kept[n] = one
                self.tokenizer.no_truncation()
            for pair, before, after in zip(some, whole, kept, strict=True):
                yield self._encoded(pair, after, len(before.ids) - len(after.ids))

    def _encoded(self, pair: tuple[str, str | None], found: Any, truncated: int) -> Encoded:
        ids, texts, tokens = np.array(found.ids, np.int64), tuple(found.sequence_ids), list(found.tokens)
        if not self.text.spelled:
            ids[np.isin(ids, self.marks) & np.array([text is not None for text in texts])] = self.unknown_id
        for place in np.flatnonzero(ids == self.unknown_id):
            text, (start, end) = texts[place], found.offsets[place]
            if text is not None:
                tokens[place] = (pair[text] or "")[start:end]
        return Encoded(ids, np.array(found.type_ids, np.int64), tuple(tokens), texts, truncated)

    def _divided(self, pairs: Sequence[tuple[str, str | None]]) -> list[Any]:
        try:
            return list(self.tokenizer.encode_batch([a if b is None else (a, b) for a, b in pairs]))
        except TypeError:
            for text in (text for pair in pairs for text in pair if text is not None):
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise SpecError(
                        f"{text[:40]!r} is no text: {error.reason} at character {error.start}"
                    ) from None
            raise
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise SpecError(f"the tokenizer fails: {first_line(error)}") from None


def fitted(config: EncoderConfig, encoder: TextEncoder, labels: Labels) -> EncoderConfig:
    """Return a configuration for texts that are encoded so, and for their classes.

    ``vocab_size``, ``num_classes``, ``pad_id``, and what follows from it, are those of the data, and there
    are no more positions than tokens.
    """
    padded = config.padded_by(encoder.pad_id, vocab_size=encoder.vocab_size)
    return padded.replace(
        num_classes=labels.num_classes(config), max_positions=encoder.text.max_tokens + padded.position_start
    )


def unfit(config: EncoderConfig, encoder: TextEncoder, labels: Labels) -> list[str]:
    """Return what keeps a model from taking what an encoder yields, and from telling some classes apart."""
    room, most = config.max_positions - config.position_start, encoder.text.max_tokens
    names, classes = len(labels.names), max(2, config.num_classes)
    problems = {
        f"the tokenizer has {encoder.vocab_size} tokens but must have at most {config.vocab_size}, "
        "as 'vocab_size' says": encoder.vocab_size > config.vocab_size,
        f"the tokenizer's padding is {encoder.pad_id} but must be {config.pad_id}, "
        "as 'pad_id' says": encoder.pad_id != config.pad_id,
        f"a sample may have {most} tokens but must have at most {room}, as 'max_positions' says": most > room,
        f"there are {encoder.segments} segments but must be at most {config.num_segments}, "
        "as 'num_segments' says": 0 < config.num_segments < encoder.segments,
        f"there are {names} labels but must be {classes}, as 'num_classes' says": labels.num_classes(config)
        != config.num_classes,
    }
    return [problem for problem, wrong in problems.items() if wrong]
