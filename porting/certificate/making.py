"""Making a certificate: from the files of two checkpoints to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from concord.conformance import tolerance
from concord.conformance.campaign import Settings
from concord.porting.certificate import evidence, inputs, ledger, sensitivity
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    UNVERIFIED,
    Asked,
    Certificate,
    Item,
    PortSide,
    verdict,
)
from concord.porting.comparison.checkpoints import compare
from concord.porting.reading import read
from concord.porting.registry import known
from concord.spec.errors import SpecError

KEPT = 400 << 20
"""Bytes of tolerances that are kept from the source's runs for the target's."""


def backend_of(format: str) -> str:
    """Return the backend that a format belongs to."""
    form = known(format)
    return form.backend or form.container.backend


Tell = Callable[[str], None]


def certify(
    source_path: Path,
    target_path: Path,
    asked: Asked | None = None,
    settings: Settings | None = None,
    tell: Tell = lambda text: None,
) -> Certificate:
    """Make a certificate.

    Args:
        source_path, target_path: the checkpoints.
        settings: how the backends run, as far as ``asked`` does not say it.
        tell: takes what is being done, in words.

    Raises:
        UnknownNameError: for an unknown format or backend.
        SpecError: if one of the two cannot be read, or is no model of the family; listing why.
    """
    asked = asked or Asked.of(settings)
    settings, paths = asked.settings(settings or Settings()), (source_path, target_path)
    table = Path(asked.source_table) if asked.source_table else None
    tell("reading both checkpoints")
    source = read(source_path, asked.source_format, table)
    target = read(target_path, asked.target_format)
    sides = (
        ledger.side_of(source_path, asked.source_format, table, source),
        ledger.side_of(target_path, asked.target_format, None, target),
    )
    asked = replace(
        asked,
        backends=asked.backends or [backend_of(sides[1].format)],
        home=asked.home or backend_of(sides[0].format),
    )
    tell("comparing every tensor")
    mine, theirs = ledger.placements(source), ledger.placements(target)
    parameters = ledger.parameters(source, target, mine, theirs, compare(source, target))
    others = (*ledger.others(source, "source"), *ledger.others(target, "target"))
    items = [
        *ledger.items(source, target, sides, parameters, others),
        *ledger.round_trips(source, target, sides, mine, theirs, tell),
    ]
    model = evidence.JudgedModel(source.config, source.weights(), source.part)
    given = inputs.of(source.config, source.part, asked.texts, asked.seed)
    explain = not any(item.status == FAILED for item in items)
    with tolerance.keeping(KEPT):  # both are judged on the sentences, from the inputs on
        origin = evidence.at_home(model, given, asked, settings, tell)
        found = evidence.gather(model, target, given, asked, settings, tell, explain)
    tell("changing tensors, to see what is noticed")
    name, batch = next(iter(given.batches.items()))
    shown = sensitivity.prove(source, mine, model, batch, name, asked.seed, tell)
    items += found.items
    items += [Item(f"input: {name}", NOT_APPLICABLE, why) for name, why in given.left_out.items()]
    items += [*origin.items, *_unheard(sides[0]), *sensitivity.items(shown)]
    _same_files(sides, paths)
    return Certificate(
        verdict(tuple(items), shown),
        *sides,
        asked,
        tuple(items),
        parameters,
        others,
        given.tried,
        (*found.runs, *origin.runs),
        found.errors,
        shown,
        {**origin.environments, **found.environments},
    )


def _unheard(side: PortSide) -> Iterator[Item]:
    """Yield that other people's code was not run, where the source is of a format of theirs."""
    if known(side.format).source:
        said = (
            f"the code that {side.format} belongs to was not run, its framework was; the model is "
            "held to the published sources' own tensors by concord golden"
        )
        yield Item("source's own code", UNVERIFIED, said)


def _same_files(sides: tuple[PortSide, PortSide], paths: tuple[Path, Path]) -> None:
    """Refuse files that were changed meanwhile.

    Raises:
        SpecError: naming them.
    """
    for side, path in zip(sides, paths, strict=True):
        now = ledger.files_of(path)
        changed = sorted(name for name in {**now, **side.files} if now.get(name) != side.files.get(name))
        if changed:
            raise SpecError(f"{path}: {', '.join(changed[:5])} changed while the certificate was made")
