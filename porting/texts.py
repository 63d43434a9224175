"""Texts for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from concord.porting.checkpoint import Checkpoint
from concord.porting.folder import LENGTHS, PROMPTS, json_object, source_settings
from concord.spec.batch import Batch
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, collecting, located, optional, refuse
from concord.spec.files import MOST_PROBLEMS, parse_json, read_text
from concord.spec.text import first_line, shown

TOKENIZER, VOCABULARY, SETTINGS = "tokenizer.json", "vocab.txt", "tokenizer_config.json"


def padding_id(files: Mapping[str, bytes]) -> int | None:
    """Id of the token with which a tokenizer fills batches, or None if its files do not say."""
    try:
        marks, settings, tokenizer = (
            json_object(parse_json(files.get(name, b"{}"), name), name)
            for name in ("special_tokens_map.json", SETTINGS, TOKENIZER)
        )
        token = {**marks, **settings}.get("pad_token")
        token = token["content"] if isinstance(token, dict) else token
        ids: dict[Any, int] = {word: number for number, word in enumerate(_words(files.get(VOCABULARY, b"")))}
        ids |= {entry["content"]: int(entry["id"]) for entry in tokenizer.get("added_tokens", ())}
        return ids.get(token)
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return None  # a corrupt tokenizer matters only for texts


def _words(vocabulary: bytes) -> list[str]:
    return vocabulary.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")


@dataclass(frozen=True)
class Text:
    """A text or pair, with the name of its class; empty texts are refused."""

    text_a: str
    text_b: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        refuse(empty((text,) for text in (self.text_a, self.text_b) if text is not None))


def empty(rows: Iterable[Iterable[str]]) -> list[str]:
    """One line per text, or pair, that is empty."""
    return [
        f"text {number} is empty"
        for number, row in enumerate(rows, start=1)
        if not all(text.strip() for text in row)
    ]


def read_texts(path: Path) -> list[Text]:
    """Read a text, or two separated by a tab, from each line.

    In ``*.jsonl``, each line is an object with ``text``, or ``text_a`` and optionally ``text_b``, and
    optionally ``label``.
    """
    parse = _of_json if path.suffix == ".jsonl" else _of_line
    texts, problems = list[Text](), list[str]()
    # Not splitlines(), which also splits at characters that a text may contain, such as U+2028.
    lines = read_text(path).removeprefix("\ufeff").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            problems.append(f"{path}: line {number} is empty")
            continue
        with collecting(problems), located(f"{path}:{number}"):
            texts.append(parse(line.removesuffix("\r")))
    refuse(problems[:MOST_PROBLEMS])
    return texts


def _of_line(line: str) -> Text:
    columns = line.split("\t")
    if len(columns) > 2:
        raise SpecError(f"has {len(columns)} columns but must have one text, or two separated by a tab")
    return Text(*columns)


def _of_json(line: str) -> Text:
    fields = parse_json(line, "the line")
    if not isinstance(fields, dict):
        raise SpecError(f"holds a value of type {type(fields).__name__} but must hold a JSON object")
    texts: dict[str, Any] = {
        "text_a": fields.get("text_a", fields.get("text")),
        "text_b": fields.get("text_b"),
        "label": fields.get("label"),
    }
    refuse(
        [
            f"{name!r} is {json.dumps(value)[:60]} but must be a string"
            for name, value in texts.items()
            if not isinstance(value, str) and (value is not None or name == "text_a")
        ]
    )
    return Text(**texts)


class EncodedText(NamedTuple):
    """A text or a pair as token ids."""

    ids: list[int]
    segment_ids: list[int]
    tokens: list[str]
    places: list[int | None]  # the text of each token, 0 or 1; None for a special token
    truncated: int  # number of truncated tokens


class TextEncoder:
    """A checkpoint's own tokenizer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config, files = checkpoint.config, checkpoint.files
        room = config.max_tokens
        settings, sentences, prompts = (
            json_object(parse_json(files.get(name, b"{}"), name), name)
            for name in (SETTINGS, LENGTHS, PROMPTS)
        )
        with optional("A checkpoint's tokenizer", "porting"):
            from tokenizers.normalizers import Lowercase, Sequence
        self.tokenizer = _tokenizer(files, settings)
        # A tokenizer.json may set both, but padding and truncation here follow the model's own sizes.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if sentences.get("do_lower_case") is True:
            normalizers = [] if self.tokenizer.normalizer is None else [self.tokenizer.normalizer]
            self.tokenizer.normalizer = Sequence([Lowercase(), *normalizers])
        # Like sentence-transformers, prefer the length in its file to the tokenizer's.
        lengths = (sentences.get("max_seq_length"), settings.get("model_max_length"))
        self.max_tokens = min(room, next((n for n in lengths if type(n) is int and n > 0), room))
        self.prompt = _prompt(prompts)
        self.vocab_size, self.pad_id = config.vocab_size, config.pad_id

    def encode(self, texts: Sequence[Text]) -> list[EncodedText]:
        """Encode texts, truncating the longer text of a pair first."""
        rows = [(self.prompt + text.text_a, text.text_b) for text in texts]
        inputs = [a if b is None else (a, b) for a, b in rows]
        try:
            # Also encode without truncation: the difference is the number of truncated tokens.
            full = self.tokenizer.encode_batch(inputs)
            self.tokenizer.enable_truncation(self.max_tokens, strategy="longest_first")
            cut = self.tokenizer.encode_batch(inputs)
        except Exception as error:  # noqa: BLE001 - the library raises no narrower exception
            raise SpecError(f"the tokenizer fails: {first_line(error)}") from None
        finally:
            self.tokenizer.no_truncation()
        refuse([*self._foreign(inputs, cut)][:MOST_PROBLEMS])
        return [
            EncodedText(
                short.ids, short.type_ids, short.tokens, short.sequence_ids, len(long.ids) - len(short.ids)
            )
            for long, short in zip(full, cut, strict=True)
        ]

    def _foreign(self, inputs: Sequence[object], texts: Sequence[Any]) -> Iterator[str]:
        for words, text in zip(inputs, texts, strict=True):
            for number, token in zip(text.ids, text.tokens, strict=True):
                if number < self.vocab_size and number != self.pad_id:
                    continue
                reason = "the model hides that id as padding [clause=MSK-1]"
                if number >= self.vocab_size:
                    reason = f"the model has only {self.vocab_size} tokens: is it another model's?"
                place = f"{shown(str(words), 40)}: the tokenizer gives {shown(token)!r} the id {number}"
                yield f"{place}, but {reason}"


def batch_of(
    config: EncoderConfig,
    texts: Sequence[EncodedText],
    labels: NDArray[np.int64] | None = None,
    multiple: int = 1,
) -> Batch:
    """Texts as a padded batch.

    Args:
        multiple: round the width up to a multiple, since frameworks compile each width.
    """
    longest = -(-max(len(text.ids) for text in texts) // multiple) * multiple
    width = min(longest, config.max_tokens)
    if config.pooling == "flatten":  # its classifier has weights for every position (SPEC INP-5)
        width = config.max_positions
    ids = np.full((len(texts), width), config.pad_id, np.int64)
    segments = np.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)], segments[row, : len(text.ids)] = text.ids, text.segment_ids
    return Batch(input_ids=ids, segment_ids=segments if config.num_segments else None, labels=labels)


# Tokenizers of published models.

# Ends of the kinds of tokenizers, or of models without one, that tokenizer_config.json's options describe.
BERT = ("BertTokenizer", "ElectraTokenizer", "bert", "electra")

ADDED = "added_tokens.json"


def _tokenizer(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Any:
    from tokenizers import BertWordPieceTokenizer, Tokenizer
    from tokenizers.normalizers import BertNormalizer

    name = TOKENIZER if TOKENIZER in files else VOCABULARY
    if name not in files:
        raise SpecError(f"has no tokenizer: it lacks {TOKENIZER} and {VOCABULARY}")
    options: dict[str, Any] = {
        "handle_chinese_chars": settings.get("tokenize_chinese_chars", True) is not False,
        "strip_accents": settings.get("strip_accents"),
        "lowercase": settings.get("do_lower_case", True) is not False,
    }
    model = source_settings(files)
    kind = settings.get("tokenizer_class") or model.get("tokenizer_class") or model.get("model_type")
    kind = str(kind or "").removesuffix("Fast")
    try:
        if name == VOCABULARY:
            ids = {token: number for number, token in enumerate(_words(files[name]))}
            added = [*parse_json(files.get(ADDED, b"{}"), ADDED)]
            added += [entry["content"] for entry in settings.get("added_tokens_decoder", {}).values()]
            if beyond := [token for token in added if token not in ids]:
                raise SpecError(f"{beyond[0]!r} was added to it; save the tokenizer as {TOKENIZER}")
            if kind and not kind.endswith(BERT):
                raise SpecError(f"it belongs to {kind}; save the tokenizer as {TOKENIZER}")
            if "[UNK]" not in ids:
                raise SpecError("'[UNK]' is missing")
            return BertWordPieceTokenizer(ids, **options)
        tokenizer = Tokenizer.from_str(files[name].decode())
        if kind.endswith(BERT) and isinstance(tokenizer.normalizer, BertNormalizer):
            # As in transformers, tokenizer_config.json overrides what tokenizer.json says.
            tokenizer.normalizer = BertNormalizer(clean_text=tokenizer.normalizer.clean_text, **options)
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise SpecError(f"{name} is not a valid tokenizer: {first_line(error)}") from None
    # The post-processor adds the special tokens, without which the model's results would be silently wrong.
    if tokenizer.post_processor is None:
        raise SpecError(
            f"{name} has no 'post_processor', which must say which special tokens surround a text"
        )
    return tokenizer


def _prompt(settings: Mapping[str, Any]) -> str:
    # sentence-transformers inserts this before every text, unless the caller selects a different prompt.
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    prompt = "" if name is None else prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise SpecError(
            f"{PROMPTS}: 'default_prompt_name' is {json.dumps(name)[:60]} "
            "but must be the name of one of its 'prompts'"
        )
    return prompt
