"""Tokenizers that published models come with: texts become the ids that the model's own library makes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, optional
from concord.spec.files import parse_json
from concord.training.data import tokenizers
from concord.training.data.encoder import MOST_BETWEEN, TEXT_FILE, TOKENIZER_FILE, Encoded, Text, TextEncoder

with optional("Texts for a checkpoint", "training"):
    from tokenizers import Tokenizer, normalizers, processors

VOCABULARY, SETTINGS = "vocab.txt", "tokenizer_config.json"

SENTENCES, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
"""What a folder of sentence-transformers says besides: how long texts may be, whether in small letters, and what is put before each."""

VOCABULARIES = (TOKENIZER_FILE, VOCABULARY)
"""Files that a tokenizer is made of."""

MARKS = "special_tokens_map.json"

MASK = "[MASK]"

UNKNOWN = ("[UNK]", "<unk>")
"""What the token for what is not known is called, where nothing says so."""

PROBES = (("a b", None), ("a b", "b"))
"""Texts that show what marks a tokenizer puts where."""


class Encodes(Protocol):
    """What turns texts into ids: a :class:`TextEncoder`, or a :class:`Ready`."""

    def encode(self, a: str, b: str | None = None) -> Encoded:
        """Encode a text, or a pair."""


class Ready:
    """A tokenizer that puts its own marks around texts, and cuts off what is longer than it may be: the longer of two texts first.

    Args:
        tokenizer: of ``tokenizers``, with its template of marks.
        max_tokens: of a sample, marks included.
        prompt: what is put before the first text.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, prompt: str = "") -> None:
        self.tokenizer, self.max_tokens, self.prompt = tokenizer, max_tokens, prompt
        tokenizer.no_padding()
        tokenizer.no_truncation()

    def encode(self, a: str, b: str | None = None) -> Encoded:
        """Encode a text, or a pair.

        Raises:
            SpecError: if one is no text, or there is no room for the marks.
        """
        found = self._encoded(a, b)
        whole = self._lengths(found)
        if len(found.ids) > self.max_tokens:
            marks = len(found.ids) - sum(whole)
            if self.max_tokens <= marks:
                raise SpecError(
                    f"a sample may have {self.max_tokens} tokens but must have more than {marks}: so many marks stand around its text"
                )
            self.tokenizer.enable_truncation(self.max_tokens, strategy="longest_first")
            found = self._encoded(a, b)
            self.tokenizer.no_truncation()
        kept = self._lengths(found)
        offsets = tuple(
            self._place(text, *place) for text, place in zip(found.sequence_ids, found.offsets, strict=True)
        )
        cut = (whole[0] - kept[0], whole[1] - kept[1])
        return Encoded(
            np.array(found.ids, np.int64),
            np.array(found.type_ids, np.int64),
            tuple(found.tokens),
            offsets,
            cut,
        )

    def _encoded(self, a: str, b: str | None) -> Any:
        try:
            return self.tokenizer.encode(self.prompt + a, b)
        except TypeError:
            raise SpecError(
                f"{(b or '' if a.isprintable() else a)[:40]!r} is no text: it holds a lone surrogate"
            ) from None

    def _place(self, text: int | None, start: int, end: int) -> tuple[int, int, int] | None:
        """Return where a token lies in the text that was given; None: it is a mark, or of the prompt."""
        before = len(self.prompt) if text == 0 else 0
        return (
            None
            if text is None or (end <= before and before)
            else (text, max(start - before, 0), end - before)
        )

    @staticmethod
    def _lengths(found: Any) -> tuple[int, int]:
        """Return how many tokens come from each text."""
        return found.sequence_ids.count(0), found.sequence_ids.count(1)


def encoder_of(
    folder: Path, files: Mapping[str, bytes], config: EncoderConfig, max_tokens: int | None = None
) -> Encodes | None:
    """Return what a checkpoint's own tokenizer makes of texts; None: it has none.

    Args:
        folder: of the checkpoint.
        files: that lie beside the weights, by name: ``tokenizer.json``, ``vocab.txt``, and what is said of them.
        max_tokens: of a sample; by default as many as there are positions for, or as its files say.

    Raises:
        SpecError: if a file cannot be understood, or there are not so many positions.
    """
    room = config.max_positions - config.position_start
    if max_tokens is not None and not 1 <= max_tokens <= room:
        raise SpecError(
            f"--max-tokens is {max_tokens} but must be at least 1 and at most {room}: so many positions has the model [clause=INP-2]"
        )
    settings, sentences = (_object(files, name) for name in (SETTINGS, SENTENCES))
    if TEXT_FILE in files and TOKENIZER_FILE in files:
        own = TextEncoder.read(folder)
        return (
            own
            if max_tokens is None
            else TextEncoder(own.tokenizer, dataclasses.replace(own.text, max_tokens=max_tokens))
        )
    longest = _longest(sentences, settings, room) if max_tokens is None else max_tokens
    tokenizer = _tokenizer(files, settings)
    if tokenizer is None:
        return None
    if sentences.get("do_lower_case") is True:
        before = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    return Ready(tokenizer, longest, _prompt(_object(files, PROMPTS)))


def _longest(sentences: Mapping[str, Any], settings: Mapping[str, Any], room: int) -> int:
    """Return how many tokens a sample may have: what a folder of sentence-transformers says goes before what the tokenizer says."""
    said = (sentences.get("max_seq_length"), settings.get("model_max_length"))
    return min(room, next((length for length in said if type(length) is int and length > 0), room))


def _prompt(said: Mapping[str, Any]) -> str:
    """Return what is put before every text, unless somebody asks for another.

    Raises:
        SpecError: if it is no text.
    """
    name, prompts = said.get("default_prompt_name"), said.get("prompts")
    prompt = (
        prompts.get(name)
        if isinstance(prompts, dict) and isinstance(name, str)
        else ""
        if name is None
        else None
    )
    if not isinstance(prompt, str):
        raise SpecError(
            f"{PROMPTS}: 'default_prompt_name' is {json.dumps(name)[:60]} but must be the name of one of its 'prompts'"
        )
    return prompt


def _tokenizer(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer | None:
    """Return a checkpoint's own tokenizer; None: it has none."""
    if TOKENIZER_FILE in files:
        found = tokenizers.from_json(files[TOKENIZER_FILE].decode(errors="replace"), TOKENIZER_FILE)
        if found.post_processor is None:
            _mark(found, TOKENIZER_FILE)
        return found
    return _of_vocabulary(files[VOCABULARY], settings) if VOCABULARY in files else None


def text_encoder(folder: Path, files: Mapping[str, bytes], config: EncoderConfig) -> TextEncoder | None:
    """Return an encoder that makes the same ids as a checkpoint's own tokenizer; None: it has none.

    Args:
        folder, files: as for :func:`encoder_of`.

    Raises:
        SpecError: as :func:`encoder_of`; and if its marks are not one before the first text, one after each, and the same between two.
    """
    own = encoder_of(folder, files, config)
    if own is None or isinstance(own, TextEncoder):
        return own
    assert isinstance(own, Ready)
    if own.prompt:
        raise SpecError(
            f"{PROMPTS}: {own.prompt[:40]!r} is put before every text: 'concord case run --texts' does so"
        )
    probes = [own.encode(*probe) for probe in PROBES]
    pair, padding, unknown = (
        probes[-1],
        own.tokenizer.id_to_token(config.pad_id),
        _unknown(own.tokenizer, files),
    )
    if padding is None or unknown is None:
        raise SpecError(
            f"its tokenizer has no token of id {config.pad_id}, which is padding"
            if padding is None
            else "its tokenizer has no token for what it does not know"
        )
    segments = (int(pair.segment_ids[0]), int(pair.segment_ids[-1]), 0)
    marks = pair.offsets.count(None)
    made = TextEncoder(
        own.tokenizer,
        Text(
            own.max_tokens,
            segments,
            padding,
            unknown,
            pair.tokens[0],
            pair.tokens[-1],
            between=min(max(marks - 3, 0), MOST_BETWEEN),
        ),
    )
    for probe, wanted in zip(PROBES, probes, strict=True):
        found = made.encode(*probe)
        if (found.ids.tolist(), found.segment_ids.tolist()) != (
            wanted.ids.tolist(),
            wanted.segment_ids.tolist(),
        ):
            raise SpecError(
                f"its tokenizer puts other marks around {'two texts' if probe[1] else 'a text'} than one before the first, one after each and the same between two: 'concord case run --texts' takes it as it is"
            )
    return made


def _unknown(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> str | None:
    """Return the token for what a tokenizer does not know: one that is made of bytes knows everything, and yet has one."""
    said = [_object(files, name).get("unk_token") for name in (SETTINGS, MARKS)]
    names = (
        getattr(tokenizer.model, "unk_token", None),
        *(one.get("content") if isinstance(one, dict) else one for one in said),
        *UNKNOWN,
    )
    return next(
        (name for name in names if isinstance(name, str) and tokenizer.token_to_id(name) is not None), None
    )


def _of_vocabulary(content: bytes, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of BERT: pieces of words, as ``tokenizer_config.json`` says; without one of small letters."""
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise SpecError(f"{VOCABULARY}: is no text in utf-8: {error.reason} at byte {error.start}") from None
    lowercase = settings.get("do_lower_case", True) is not False
    with located(VOCABULARY):
        found = tokenizers.from_vocabulary(
            "wordpiece", [line.removesuffix("\r") for line in lines], lowercase
        )
    accents, chinese = settings.get("strip_accents"), settings.get("tokenize_chinese_chars", True)
    found.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese is not False, strip_accents=accents, lowercase=lowercase
    )
    found.add_special_tokens(
        [token for token in (*tokenizers.SPECIAL, MASK) if found.token_to_id(token) is not None]
    )
    _mark(found, VOCABULARY)
    return found


def _mark(tokenizer: Tokenizer, where: str) -> None:
    """Have a tokenizer put BERT's marks around texts.

    Raises:
        SpecError: if it does not know them.
    """
    first, separator = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    if first is None or separator is None:
        raise SpecError(
            f"{where}: says no template of marks and knows no '[CLS]' and '[SEP]': what stands around a text?"
        )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", separator), ("[CLS]", first))


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    content = parse_json(files[name], name)
    if not isinstance(content, dict):
        raise SpecError(f"{name}: holds a {type(content).__name__} but must hold a JSON object")
    return content
