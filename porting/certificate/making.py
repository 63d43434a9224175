"""Making a certificate: from the files of two checkpoints to a verdict."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from concord.conformance import tolerance
from concord.conformance.campaign import Settings
from concord.porting.certificate import evidence, inputs, ledger, sensitivity
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    UNVERIFIED,
    Certificate,
    Item,
    Placement,
    Sensitivity,
    Side,
    verdict,
)
from concord.porting.checkpoint import Checkpoint
from concord.porting.comparison.checkpoints import compare
from concord.porting.reading import AUTO, read
from concord.porting.registry import known
from concord.spec.errors import SpecError, WeightsError

DTYPES = ("float64", "float32")

KEPT = 400 << 20
"""Bytes of tolerances that are kept from the source's runs for the target's."""


@dataclass(frozen=True)
class Asked:
    """What a certificate is made with; what decides it is written into it.

    Attributes:
        source, target: the checkpoints.
        source_format, target_format: of :func:`concord.porting.formats`, or ``"auto"``.
        source_table: names and layouts of the source in place of its format's.
        backends: that compute the target; empty: that of the target's format.
        home: the backend that computes the source; empty: that of its format.
        texts: ids and segments of each sentence; none: drawn.
        dtypes: the precisions.
        seed: of what is drawn.
        settings: how the backends run.
    """

    source: Path
    target: Path
    source_format: str = AUTO
    target_format: str = AUTO
    source_table: Path | None = None
    backends: tuple[str, ...] = ()
    home: str = ""
    texts: inputs.Rows | None = None
    dtypes: tuple[str, ...] = DTYPES
    seed: int = 0
    settings: Settings = field(default_factory=Settings)

    def plain(self, backends: tuple[str, ...], home: str) -> dict[str, Any]:
        """Return what decides what a certificate says, as JSON data."""
        settings = {
            key: getattr(self.settings, key)
            for key in ("device", "implementation", "execution", "precision", "deterministic")
        }
        texts = (
            [[list(map(int, ids)), list(map(int, segments))] for ids, segments in self.texts]
            if self.texts
            else None
        )
        return {
            "source_format": self.source_format,
            "target_format": self.target_format,
            "source_table": str(self.source_table) if self.source_table else None,
            "backends": list(backends),
            "home": home,
            "texts": texts,
            "dtypes": list(self.dtypes),
            "seed": self.seed,
            **settings,
            "optimizer": _stated(asdict(evidence.RECIPE)),
        }


def _stated(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: recipe[key]
        for key in (
            "algorithm",
            "learning_rate",
            "beta1",
            "beta2",
            "epsilon",
            "weight_decay",
            "decay_form",
            "clipping",
            "clip_at",
        )
    }


def backend_of(format: str) -> str:
    """Return the backend that a format belongs to."""
    form = known(format)
    return form.backend or form.container.backend


Tell = Callable[[str], None]


def certify(asked: Asked, tell: Tell = lambda text: None) -> Certificate:
    """Make a certificate.

    Args:
        tell: takes what is being done, in words.

    Raises:
        UnknownNameError: for an unknown format or backend.
        SpecError: if one of the two cannot be read, or is no model of the family; listing why.
    """
    tell("reading both checkpoints")
    source, target = (
        read(asked.source, asked.source_format, asked.source_table),
        read(asked.target, asked.target_format),
    )
    sides = (
        ledger.side_of(asked.source, asked.source_format, asked.source_table, source),
        ledger.side_of(asked.target, asked.target_format, None, target),
    )
    tell("comparing every tensor")
    mine, theirs = ledger.placements(source), ledger.placements(target)
    parameters = ledger.parameters(source, target, mine, theirs, compare(source, target))
    others = (*ledger.others(source, "source"), *ledger.others(target, "target"))
    items = [
        *ledger.items(source, target, sides, parameters, others),
        *ledger.round_trips(source, target, sides, mine, theirs, tell),
    ]
    backends, home = (
        asked.backends or (backend_of(sides[1].format),),
        asked.home or backend_of(sides[0].format),
    )
    model, given = (
        evidence.Model(source.config, source.weights(), source.part),
        inputs.of(source.config, source.part, asked.texts, asked.seed),
    )
    with tolerance.keeping(KEPT):  # both are judged on the sentences, from the inputs on
        origin = evidence.at_home(
            model,
            given,
            home,
            asked.dtypes,
            asked.settings,
            lambda backend, done: tell(f"the source in {backend}: {done}"),
        )
        found = _computed(
            asked,
            model,
            target,
            given,
            backends,
            tell,
            explain=not any(item.status == FAILED for item in items),
        )
    tell("changing tensors, to see what is noticed")
    shown = _sensitivity(asked, source, mine, model, given, tell)
    items += [*found.items, *_left_out(given), *origin.items, *_unheard(sides[0]), *sensitivity.items(shown)]
    _same_files(sides, asked)
    claims = tuple(items)
    return Certificate(
        verdict(claims, shown),
        *sides,
        asked.plain(backends, home),
        claims,
        parameters,
        others,
        given.tried,
        (*found.runs, *origin.runs),
        found.errors,
        shown,
        {**origin.environments, **found.environments},
    )


def _computed(
    asked: Asked,
    model: evidence.Model,
    target: Checkpoint,
    given: inputs.Inputs,
    backends: tuple[str, ...],
    tell: Tell,
    explain: bool,
) -> evidence.Evidence:
    """Return what the target computes, and what the judge says of it."""
    try:
        ported = evidence.Model(target.config, target.weights(), target.part)
    except WeightsError as error:
        return evidence.Evidence(
            tuple(Item(kind, UNVERIFIED, error.problems[0]) for kind in evidence.KINDS), (), {}, {}
        )
    return evidence.gather(
        model,
        ported,
        given,
        backends,
        asked.dtypes,
        asked.settings,
        lambda backend, done: tell(f"{backend}: {done}"),
        explain,
    )


def _left_out(given: inputs.Inputs) -> Iterator[Item]:
    """Yield what was not tried, and why."""
    for name, why in given.left_out.items():
        yield Item(f"input: {name}", NOT_APPLICABLE, why)


def _sensitivity(
    asked: Asked,
    source: Checkpoint,
    mine: Mapping[str, Placement],
    model: evidence.Model,
    given: inputs.Inputs,
    tell: Tell,
) -> Sensitivity:
    """Return what changes are noticed."""
    name, batch = next(iter(given.batches.items()))
    last = [0]

    def progress(done: int, total: int) -> None:
        if done * 10 // total > last[0]:
            last[0] = done * 10 // total
            tell(f"{done} of {total} changes")

    return sensitivity.prove(source, mine, model, batch, name, asked.seed, progress)


def _unheard(side: Side) -> Iterator[Item]:
    """Yield that other people's code was not run, where the source is of a format of theirs."""
    if known(side.format).source:
        said = (
            f"the code that {side.format} belongs to was not run, its framework was; the model is "
            "held to the published sources' own tensors by concord golden"
        )
        yield Item("source's own code", UNVERIFIED, said)


def _same_files(sides: tuple[Side, Side], asked: Asked) -> None:
    """Refuse files that were changed meanwhile.

    Raises:
        SpecError: naming them.
    """
    for side, path in zip(sides, (asked.source, asked.target), strict=True):
        now = ledger.files_of(path)
        changed = sorted(name for name in {**now, **side.files} if now.get(name) != side.files.get(name))
        if changed:
            raise SpecError(f"{path}: {', '.join(changed[:5])} changed while the certificate was made")


def digest(data: Mapping[str, Any]) -> str:
    """Return the SHA-256 of data as canonical JSON: keys sorted, nothing between."""
    return hashlib.sha256(
        json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    ).hexdigest()
