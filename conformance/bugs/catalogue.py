"""Every bug by name: an entry in ``entries/OPERATION.toml``, and an edit in this package.

An entry has the fields of :class:`Bug`, and either ``taps`` (patterns of edited taps) or ``place`` (a field
of :class:`Change`, or an optimizer method). ``edit`` names the edit if its name differs from the bug's; a
table adds constants. ``only_of`` lists options of possible models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from concord.backends.update_rules import Optimizer
from concord.conformance.bugs import (
    activations,
    attention,
    bug,
    gradients,
    lookups,
    loss,
    norms,
    pooling_edits,
    rounding,
)
from concord.conformance.bugs.bug import TRAINING as OF_TRAINING
from concord.conformance.bugs.bug import Bug, Change, rule, where, with_constants
from concord.conformance.bugs.training import edits as training
from concord.spec.errors import located, refuse, unknowns
from concord.spec.fields import build
from concord.spec.files import parse_toml, read_text

MODULES: Mapping[str, ModuleType] = {
    "lookups": lookups,
    "masks": attention,
    "products": attention,
    "softmax": attention,
    "norms": norms,
    "sums": norms,
    "activations": activations,
    "pooling": pooling_edits,
    "loss": loss,
    "gradients": gradients,
    "optimizer": training,
    "decay": training,
    "clipping": training,
    "schedule": training,
    "accumulation": training,
    "dropout": training,
    "data": training,
    "resume": training,
}
"""Modules with the edits of bugs, by operation."""

PLACES = {field.name for field in fields(Change)}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _entries(operation: str, module: ModuleType) -> Iterator[Bug]:
    path = Path(__file__).parent / "entries" / f"{operation}.toml"
    edits = {**vars(bug), **vars(rounding), **vars(module), **rounding.EDITS, **module.EDITS}
    for name, entry in _frozen(parse_toml(read_text(path), path.name)).items():
        edit, taps, place = entry.pop("edit", name), entry.pop("taps", ()), entry.pop("place", "edit")
        with located(here := f"{path.name}: [{name}]"):
            names = [*edit] if isinstance(edit, dict) else [edit]
            refuse(unknowns("edit", names, edits) + unknowns("place", [place], [*PLACES, *vars(Optimizer)]))
        edit_or_change = edits[names[0]]
        if isinstance(edit, dict):
            edit_or_change = with_constants(edit_or_change, *edit.values())
        if options := entry.pop("only_of", {}):
            edit_or_change = where(edit_or_change, **options)
        if isinstance(edit_or_change, Change):
            change = edit_or_change
        elif place in PLACES:
            edited: dict[str, Any] = {place: edit_or_change}
            change = Change(taps=taps, **edited)
        else:
            change = rule(**{place: edit_or_change})
        fields: dict[str, Any] = {"cause": name, "options": {}}
        if module is training:
            fields |= {
                "variant": OF_TRAINING,
                "scenario": "adamw",
                "first": ("where the reference shows it",),
            }
        elif taps:  # at its first tap, in the first layer
            fields["first"] = (
                f"layers.0.{taps[0][1:].removeprefix('.')}" if taps[0].startswith("*") else taps[0],
            )
        yield build(Bug, {**fields, **entry, "name": name, "operation": operation, "change": change}, here)


KNOWN: dict[str, Bug] = {bug.name: bug for entry in MODULES.items() for bug in _entries(*entry)}
"""Every bug, by operation."""

TRAINING: dict[str, Bug] = {name: bug for name, bug in KNOWN.items() if bug.of_training}
"""Bugs of training."""

BUGS: dict[str, Bug] = {name: bug for name, bug in KNOWN.items() if not bug.of_training}
"""Bugs of a model."""

EXPLANATIONS = [bug for bug in BUGS.values() if bug.name in bug.cause.split(" or ")]
"""Bugs tried as explanations: the others share the name of another bug, or of a reading."""
