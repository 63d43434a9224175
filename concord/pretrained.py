"""Checkpoints that texts are given to, whoever trained them: the model, and an encoder that makes what its own tokenizer does of texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from concord import options, porting
from concord.porting.folder import folder_of
from concord.spec.errors import SpecError, located
from concord.terminal import Terminal

if TYPE_CHECKING:
    from concord.training.beginning import Pretrained
    from concord.training.checkpoint import Checkpoint
    from concord.training.data import TextEncoder

READERS = ("model", "pooled", "encoder")
"""The parts of a model that take ids."""

OWN_OPTIONS = {
    "variant": "the checkpoint says what the model is",
    "config": "the checkpoint says what the model is",
    "tokenization": "the checkpoint has a tokenizer",
    "vocabulary": "the checkpoint has a tokenizer",
    "vocab_file": "the checkpoint has a tokenizer",
}
"""Options of training that a checkpoint leaves no room for, and why."""


def published(path: Path) -> tuple[porting.Checkpoint, TextEncoder]:
    """Return a checkpoint of any format, or a run's best, and its own tokenizer, whose marks no text can spell.

    Raises:
        SpecError: if it cannot be read, takes no texts, or has no tokenizer.
    """
    return _with(path, spelled=False)


def reads(path: Path) -> tuple[porting.Checkpoint, TextEncoder]:
    """Return a checkpoint of any format, or a run's best, and its own tokenizer.

    Raises:
        SpecError: if it cannot be read, takes no texts, or has no tokenizer.
    """
    return _with(path, spelled=True)


def _with(path: Path, spelled: bool) -> tuple[porting.Checkpoint, TextEncoder]:
    from concord.training.data.ready import encoder_of

    found = porting.read(path)
    if found.part not in READERS:
        raise SpecError(
            f"{path}: holds the part {found.part!r} but must hold one of {', '.join(READERS)}: nothing else takes texts"
        )
    with located(str(path)):
        encoder = encoder_of(folder_of(path), found.files, found.config, spelled=spelled)
    if encoder is None:
        raise SpecError(f"{path}: has no tokenizer: it lacks tokenizer.json and vocab.txt")
    return found, encoder


def start_of(path: Path) -> Pretrained:
    """Return what training goes on from: a checkpoint of any format, or a run, of which the best.

    Raises:
        SpecError: if it cannot be read, has no tokenizer, or is no model that takes ids.
    """
    from concord.training.beginning import Pretrained

    found, encoder = published(path)
    return Pretrained(found.config, found.weights(), encoder, found.labels, found.part)


def refuse(context: typer.Context, checkpoint: Path | None, data: Path | None) -> None:
    """Refuse options that a checkpoint leaves no room for, and one without samples.

    Raises:
        SpecError: naming each.
    """
    if checkpoint is None:
        return
    problems = (
        ["--checkpoint is given but --data is not: what is the model to be trained on?"]
        if data is None
        else []
    )
    problems += [
        f"{option} is given but --checkpoint is too: {why}"
        for option, why in options.typed(context, OWN_OPTIONS)
    ]
    if problems:
        raise SpecError(problems)


def tell(path: Path | None, begun: Pretrained | None, start: Checkpoint) -> None:
    """Print what training begins with, if it begins with a checkpoint: what of the weights is the checkpoint's, and what was drawn."""
    if begun is None:
        return
    assert start.labels is not None
    kept = begun.kept(start.config, start.labels)
    drawn = [name for name in start.weights if name not in kept]
    said = f"drawn anew: {', '.join(drawn)}" if drawn else "nothing drawn anew"
    left = [name for name in begun.weights if name not in kept]
    said += f"; left out: {', '.join(left)}" if left else ""
    Terminal(stderr=True).print(
        f"{path}: part {begun.part}, {len(kept)} of {len(start.weights)} parameters taken; {said}; {len(start.labels.names)} classes: {', '.join(start.labels.names[:20])}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
