"""Every bug by name: what ``entries/GROUP.toml`` says of it, and its edit in the modules beside this one.

The fields of an entry are those of :class:`Bug`, and what is edited: ``taps``, patterns of their names; or
the ``place``, a field of :class:`Change` or a method of the optimizer. With neither it is the request, or the
recipe of training.

``edit`` names the edit, where it has not the bug's own name. With constants it is a table, of the edit and
what it takes besides what is right. ``forms`` are the constants of several edits, each by the words that
replace ``{}`` in the sentence; ``only_of`` are the options of models that can have the bug.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from concord.conformance.bugs import (
    activations,
    alternatives,
    attention,
    bug,
    embeddings,
    gradients,
    kernels,
    loss,
    masks,
    norms,
    places,
    pooling,
    positions,
    precision,
    saturation,
    ways,
    weights,
)
from concord.conformance.bugs.bug import TRAINING as OF_TRAINING
from concord.conformance.bugs.bug import Bug, Change, called, fits, rule, where, with_constants
from concord.conformance.bugs.training import edits as training
from concord.spec.files import parse_toml, read_text

MODULES: Mapping[str, ModuleType] = {
    "embeddings": embeddings,
    "positions": positions,
    "masks": masks,
    "attention": attention,
    "norms": norms,
    "activations": activations,
    "pooling": pooling,
    "loss": loss,
    "gradients": gradients,
    "precision": precision,
    "weights": weights,
    "kernels": kernels,
    "places": places,
    "saturation": saturation,
    "rounding": precision,
}
"""Where the edits of a model's bugs are, by group."""

TRAINING_GROUPS = (
    *("optimizer", "decay", "clipping", "schedule", "accumulation", "dropout", "data", "resume"),
)
GROUPS = (*MODULES, *TRAINING_GROUPS)
"""Where a bug sits."""

PLACES = {field.name for field in dataclasses.fields(Change)}


def _frozen(value: Any) -> Any:
    """Return what TOML says with tuples for its arrays."""
    if isinstance(value, dict):
        return {key: _frozen(one) for key, one in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _shown_at(taps: tuple[str, ...]) -> tuple[str, ...]:
    """Return where an edit shows first: at the first of its taps, in the first layer."""
    return (f"layers.0.{taps[0][1:].removeprefix('.')}" if taps[0].startswith("*") else taps[0],)


def _entries(group: str, module: ModuleType) -> Iterator[Bug]:
    """Yield the bugs of a group; several forms of one have a name in common."""
    path = Path(__file__).parent / "entries" / f"{group}.toml"
    known = {**vars(bug), **vars(ways), **vars(module), **module.EDITS}
    of_training = group in TRAINING_GROUPS
    for name, entry in _frozen(parse_toml(read_text(path), path.name)).items():
        edit, forms, options = (entry.pop(key, {}) for key in ("edit", "forms", "only_of"))
        taps = entry.pop("taps", ())
        place = entry.pop("place", "edit" if taps else "" if of_training else "request")
        if isinstance(edit, dict) and edit:
            edit, forms = next((maker, {"": given}) for maker, given in edit.items())
        found = known[edit or name]
        if forms:
            made = with_constants if place else called
            found = {words: made(found, given) for words, given in forms.items()}
        said = {"name": name, "group": group, "variant": "bert", "cause": name}
        if of_training:
            run = entry.setdefault("scenario", "adamw")
            said |= {
                "variant": OF_TRAINING,
                "first": ("where the reference shows it",),
                "input": f"run {run}",
            }
        elif taps:
            said["first"] = _shown_at(taps)
        said |= entry
        for words, one in (found if isinstance(found, Mapping) else {"": found}).items():
            if not place:
                change = one
            elif place in PLACES:
                edited: dict[str, Any] = {place: where(one, **options) if options else one}
                change = Change(taps=taps, **edited)
            else:
                change = rule(**{place: one})
            yield Bug(**{**said, "what": said["what"].format(words), "change": change})


ENTRIES: tuple[Bug, ...] = tuple(
    bug for group in GROUPS for bug in _entries(group, MODULES.get(group, training))
)
"""Every entry, group by group."""

KNOWN: dict[str, Bug] = {bug.name: bug for bug in ENTRIES if bug.variant}
"""Every mutant by name."""

TRAINING: dict[str, Bug] = {name: bug for name, bug in KNOWN.items() if bug.of_training}
"""Those of training."""

BUGS: dict[str, Bug] = {name: bug for name, bug in KNOWN.items() if not bug.of_training}
"""Those of a model."""

ALL = tuple(BUGS.values())

ALTERNATIVES: dict[str, Bug] = {one.name: one for one in _entries("alternatives", alternatives)}
"""Every allowed alternative by name: what would be a bug if it were not right."""

_SEARCHED = (
    "stored_in_*",
    "computed_in_*",
    "weight_in_*",
    "*_products",
    "clamped",
    "dropout",
    "variance_by_squares",
)
"""What a search of :mod:`concord.conformance.explain` finds, whatever the numbers in it are."""


def _tried(bug: Bug) -> bool:
    causes = bug.cause.split(" or ")
    searched = any(fits(cause, _SEARCHED) for cause in causes)
    return bool(bug.cause and bug.change.edit) and (not searched or bug.name in causes)


TRIED: tuple[Bug, ...] = tuple(bug for bug in ENTRIES if _tried(bug))
"""Those whose edits are tried as explanations."""
