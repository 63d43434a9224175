"""How ``tokenizers`` divides a text: into characters, pieces of words, or words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from concord.spec.errors import SpecError, optional, unknown
from concord.spec.text import first_line

with optional("Data of texts", "training"):
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

TOKENIZATIONS = ("characters", "words")
"""How texts are divided whose vocabulary is learnt. ``characters``: each is a token, spaces are none.
``words``: what stands between spaces. A vocabulary that is there may be of ``wordpiece`` too: words, Chinese
characters, and pieces of what it does not know, as BERT has it."""

SPECIAL = PADDING, UNKNOWN, FIRST, SEPARATOR = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
"""Tokens that every vocabulary has: padding, what it does not know, the first of all, the end of a text."""

LONGEST_WORD = 100
"""Characters of a word that is divided into pieces; a longer one is unknown."""

LEAST = 2
"""How often a token has to come to be in a vocabulary that is learnt."""


def from_vocabulary(
    tokenization: str, vocabulary: Iterable[str], lowercase: bool = True, segments: tuple[int, int] = (0, 1)
) -> Tokenizer:
    """Return a tokenizer that knows some tokens.

    Args:
        tokenization: one of :data:`TOKENIZATIONS`, or ``wordpiece``.
        vocabulary: the tokens; the first has id 0.
        lowercase: whether letters become small, and lose their accents where words are divided.
        segments: of two texts.

    Raises:
        SpecError: if a token comes twice, or one of :data:`SPECIAL` is missing.
    """
    tokens = list(vocabulary)
    ids = {token: number for number, token in enumerate(tokens)}
    missing = [token for token in SPECIAL if token not in ids]
    problems = [f"vocabulary lacks {', '.join(missing)}"] if missing else []
    twice = [token for number, token in enumerate(tokens) if ids[token] != number][:10]
    problems += [f"vocabulary has {', '.join(map(repr, twice))} more than once"] if twice else []
    if problems:
        raise SpecError(problems)
    model = (
        models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD)
        if tokenization == "wordpiece"
        else models.WordLevel(ids, unk_token=UNKNOWN)
    )
    tokenizer = _divided(model, tokenization, lowercase)
    mark(tokenizer, "vocabulary", segments)
    return tokenizer


def mark(tokenizer: Tokenizer, where: str, segments: tuple[int, int] = (0, 1)) -> None:
    """Have a tokenizer put BERT's marks around texts: ``[CLS] a [SEP]`` and ``[CLS] a [SEP] b [SEP]``.

    Raises:
        SpecError: if it does not know them.
    """
    ids = [(name, tokenizer.token_to_id(name)) for name in (FIRST, SEPARATOR)]
    if None in dict(ids).values():
        raise SpecError(
            f"{where}: says no template of marks and knows no '[CLS]' and '[SEP]': what stands around a text?"
        )
    a, b = segments
    single = f"{FIRST}:{a} $A:{a} {SEPARATOR}:{a}"
    tokenizer.post_processor = processors.TemplateProcessing(single, f"{single} $B:{b} {SEPARATOR}:{b}", ids)


def learnt(tokenization: str, texts: Iterable[str], size: int) -> list[str]:
    """Return a vocabulary: :data:`SPECIAL`, and the most frequent tokens of texts.

    Args:
        tokenization: one of :data:`TOKENIZATIONS`.
        size: of the vocabulary, at most.

    Raises:
        UnknownNameError: for an unknown tokenization.
        SpecError: if the vocabulary has no room, or the texts have no token that comes often enough.
    """
    if size <= len(SPECIAL):
        raise SpecError(
            f"vocabulary may have {size} tokens but must have more than {len(SPECIAL)}: "
            f"{', '.join(SPECIAL)} are in it"
        )
    if tokenization not in TOKENIZATIONS:
        raise unknown("tokenization", tokenization, list(TOKENIZATIONS))
    tokenizer = _divided(models.WordLevel(unk_token=UNKNOWN), tokenization, lowercase=True)
    trainer: Any = trainers.WordLevelTrainer(
        vocab_size=size, min_frequency=LEAST, show_progress=False, special_tokens=list(SPECIAL)
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids = tokenizer.get_vocab()
    if len(ids) == len(SPECIAL):
        raise SpecError(f"no token comes {LEAST} times in the texts: there is no vocabulary to learn")
    return sorted(ids, key=ids.__getitem__)


def from_json(text: str, where: str) -> Tokenizer:
    """Return the tokenizer that ``tokenizers`` has written.

    Raises:
        SpecError: if there is none.
    """
    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # the library panics, besides all else
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise SpecError(f"{where}: is no tokenizer: {first_line(error)}") from None


def _divided(model: Any, tokenization: str, lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    pieces = tokenization == "wordpiece"
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=pieces,
        strip_accents=None if pieces else False,
        lowercase=lowercase,
    )
    by_spaces = pre_tokenizers.WhitespaceSplit()
    by_characters = pre_tokenizers.Sequence([by_spaces, pre_tokenizers.Split(Regex("."), "isolated")])
    tokenizer.pre_tokenizer = {
        "wordpiece": pre_tokenizers.BertPreTokenizer(),
        "characters": by_characters,
        "words": by_spaces,
    }[tokenization]
    return tokenizer
