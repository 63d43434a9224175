"""Tokenizers of published models: texts become the ids that the model's own library makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, optional
from concord.spec.files import parse_json
from concord.training.data import tokenizers
from concord.training.data.encoder import TEXT_FILE, TOKENIZER_FILE, Text, TextEncoder

with optional("Texts for a checkpoint", "training"):
    from tokenizers import Tokenizer, normalizers

VOCABULARY, SETTINGS = "vocab.txt", "tokenizer_config.json"

SENTENCES, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
"""Files of sentence-transformers: lengths of texts, small letters, and what stands before each."""

MARKS = "special_tokens_map.json"

MASK = "[MASK]"

UNKNOWNS = ("[UNK]", "<unk>")
"""What the token for what is not known is called, where nothing says so."""


def encoder_of(
    folder: Path,
    files: Mapping[str, bytes],
    config: EncoderConfig,
    max_tokens: int | None = None,
    spelled: bool = True,
) -> TextEncoder:
    """Return what a checkpoint's own tokenizer makes of texts.

    Args:
        folder: of the checkpoint.
        files: that lie beside the weights, by name: ``tokenizer.json``, ``vocab.txt``, and what is said of
            them.
        max_tokens: of a sample; by default as many as there are positions for, or as its files say.
        spelled: whether a text may spell a mark, as its own library has it; samples of training may not.

    Raises:
        SpecError: if a file cannot be understood, there is none, or there are not so many positions.
    """
    room = config.max_positions - config.position_start
    if max_tokens is not None and not 1 <= max_tokens <= room:
        raise SpecError(
            f"--max-tokens is {max_tokens} but must be at least 1 and at most {room}: "
            "so many positions has the model [clause=INP-2]"
        )
    settings, sentences = (_object(files, name) for name in (SETTINGS, SENTENCES))
    if TEXT_FILE in files and TOKENIZER_FILE in files:
        return TextEncoder.read(folder).limited(max_tokens)
    tokenizer = _tokenizer(files, settings)
    if tokenizer is None:
        raise SpecError(f"has no tokenizer: it lacks {TOKENIZER_FILE} and {VOCABULARY}")
    if sentences.get("do_lower_case") is True:
        before = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])
    said = (max_tokens, sentences.get("max_seq_length"), settings.get("model_max_length"))
    longest = min(room, next((length for length in said if type(length) is int and length > 0), room))
    padding, unknown = tokenizer.id_to_token(config.pad_id), _unknown(tokenizer, files)
    if not spelled and (padding is None or unknown is None):
        raise SpecError(
            f"its tokenizer has no token of id {config.pad_id}, which is padding"
            if padding is None
            else "its tokenizer has no token for what it does not know"
        )
    prompt = _prompt(_object(files, PROMPTS))
    return TextEncoder(tokenizer, Text(longest, padding, unknown, prompt, spelled))


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
            f"{PROMPTS}: 'default_prompt_name' is {json.dumps(name)[:60]} "
            "but must be the name of one of its 'prompts'"
        )
    return prompt


def _tokenizer(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> Tokenizer | None:
    """Return a checkpoint's own tokenizer; None: it has none."""
    if TOKENIZER_FILE in files:
        found = tokenizers.from_json(files[TOKENIZER_FILE].decode(errors="replace"), TOKENIZER_FILE)
        if found.post_processor is None:
            tokenizers.mark(found, TOKENIZER_FILE)
        return found
    return _of_vocabulary(files[VOCABULARY], settings) if VOCABULARY in files else None


def _unknown(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> str | None:
    """Return the token for what a tokenizer does not know; one of bytes knows everything, and yet has one."""
    said = [_object(files, name).get("unk_token") for name in (SETTINGS, MARKS)]
    names = (
        getattr(tokenizer.model, "unk_token", None),
        *(one.get("content") if isinstance(one, dict) else one for one in said),
        *UNKNOWNS,
    )
    return next(
        (name for name in names if isinstance(name, str) and tokenizer.token_to_id(name) is not None), None
    )


def _of_vocabulary(content: bytes, settings: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of BERT, as ``tokenizer_config.json`` says; of small letters unless it says so."""
    try:
        lines = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise SpecError(f"{VOCABULARY}: is no text in utf-8: {error.reason} at byte {error.start}") from None
    lowercase = settings.get("do_lower_case", True) is not False
    with located(VOCABULARY):
        found = tokenizers.from_vocabulary("wordpiece", lines, lowercase)
    accents, chinese = settings.get("strip_accents"), settings.get("tokenize_chinese_chars", True)
    found.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese is not False, strip_accents=accents, lowercase=lowercase
    )
    found.add_special_tokens(
        [token for token in (*tokenizers.SPECIAL, MASK) if found.token_to_id(token) is not None]
    )
    return found


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    content = parse_json(files[name], name)
    if not isinstance(content, dict):
        raise SpecError(f"{name}: holds a {type(content).__name__} but must hold a JSON object")
    return content
