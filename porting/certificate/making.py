"""Making a certificate: from the files of two checkpoints to a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from concord import backends
from concord.conformance import tolerance
from concord.conformance.campaign import Setup
from concord.porting.certificate import evidence, inputs, ledger, sensitivity
from concord.porting.certificate.certificate import (
    FAILED,
    NOT_APPLICABLE,
    UNVERIFIED,
    Asked,
    Certificate,
    HashedFile,
    Item,
    PortSide,
    Sensitivity,
    verdict,
)
from concord.porting.certificate.ledger import files_of
from concord.porting.comparison.checkpoints import compare
from concord.porting.reading import read
from concord.porting.registry import known
from concord.spec.errors import SpecError
from concord.spec.reference import reference

KEPT = 400 << 20
"""Bytes of tolerances that are kept from the source's runs for the target's."""


def backend_of(format: str) -> str:
    """Return the backend that a format belongs to."""
    form = known(format)
    return form.backend or form.container.backend


QUICK = (
    "a quick certificate: it was run forward in one precision, on sentences alone; no gradients, "
    "no optimizer step, and not the source's framework"
)

Tell = Callable[[str], None]


def _duration(model: evidence.JudgedModel, given: inputs.Inputs, asked: Asked) -> str:
    """Return about how long it takes to judge the target and to try the proof, in words."""
    batch = next(iter(given.batches.values()))
    step = not (asked.quick or evidence.steps_problem(model))
    runs = evidence.jobs(model, model, given, asked.dtypes, step, asked.quick)
    tokens = evidence.work(runs) + sensitivity.work(model, batch, asked.quick)
    started = time.perf_counter()
    reference(model.config, model.weights, batch, False, model.part)
    seconds = (time.perf_counter() - started) * tokens / evidence.tokens_of(batch)
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def certify(
    source_path: Path,
    target_path: Path,
    asked: Asked | None = None,
    settings: Setup | None = None,
    tell: Tell = lambda text: None,
) -> Certificate:
    """Make a certificate.

    Args:
        source_path, target_path: the checkpoints.
        settings: how the backends run, as far as ``asked`` does not say it.
        tell: takes what is being done, in words.

    Raises:
        UnknownNameError: for an unknown format or backend.
        SpecError: if one of the two cannot be read, is no model of the family, or changes meanwhile; listing
            why.
    """
    asked = asked or Asked.of(settings)
    settings, paths = asked.settings(settings or Setup()), (source_path, target_path)
    table = Path(asked.source_table) if asked.source_table else None
    tell("reading both checkpoints")
    source = read(source_path, asked.source_format, table)
    target = read(target_path, asked.target_format)
    sides = ledger.side_of(source_path, source), ledger.side_of(target_path, target)
    asked = replace(
        asked,
        backends=asked.backends or [backend_of(sides[1].format)],
        home=asked.home or backend_of(sides[0].format),
    )
    tell("comparing every tensor")
    mine, theirs = ledger.placements(source), ledger.placements(target)
    compared = compare(source, target, sides=ledger.SIDES)
    parameters = ledger.parameters(source, target, mine, theirs, compared)
    others = (*ledger.others(source, "source"), *ledger.others(target, "target"))
    items = list(ledger.items(source, target, sides, parameters, others, compared))
    for name, checkpoint, form, expected in (
        ("round trip", source, sides[1].format, mine),
        ("round trip back", target, sides[0].format, theirs),
    ):
        tell(f"{name} through {form}")
        items.append(ledger.round_trip(name, checkpoint, form, expected))
    model = evidence.JudgedModel(source.config, source.weights(), source.part)
    given = inputs.of(source.config, source.part, asked.texts, asked.seed, asked.quick)
    name, batch = next(iter(given.batches.items()))
    wrong = [item.name for item in items if item.status == FAILED]
    origin, shown = evidence.Evidence(), Sensitivity((), {}, asked.seed, name)
    if "same bits" in wrong and asked.extent != "all":
        found = evidence.nothing("the parameters differ, so nothing was run; --all runs it all the same")
    else:
        tell(f"about {_duration(model, given, asked)} in all, on a machine that does nothing else")
        with tolerance.keeping(KEPT):  # both are judged on the sentences, from the inputs on
            if not asked.quick:
                origin = evidence.at_home(model, given, asked, settings, tell)
            found = evidence.gather(model, target, given, asked, settings, tell, not wrong)
        tell("changing tensors, to see what is noticed")
        shown = sensitivity.prove(source, mine, model, batch, name, asked.seed, tell, asked.quick)
    items += found.items
    if asked.quick:
        items.append(Item("all else", UNVERIFIED, QUICK))
    items += [Item(f"input: {name}", NOT_APPLICABLE, why) for name, why in given.left_out.items()]
    items += origin.items
    if known(source.format).source:
        said = (
            f"the code that {source.format} belongs to was not run, its framework was; the model is "
            "held to the published sources' own tensors by concord golden"
        )
        items.append(Item("source's own code", UNVERIFIED, said))
    items += sensitivity.items(shown) if shown.tried else ()
    for side, path in zip(sides, paths, strict=True):
        apart = {*ledger.files_of(path).items()} ^ {*side.files.items()}
        if changed := sorted({name for name, _ in apart}):
            raise SpecError(f"{path}: {', '.join(changed[:5])} changed while the certificate was made")
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


@dataclass(frozen=True)
class Verified:
    """What came of verifying a certificate.

    Attributes:
        files: how many files have the bytes that it states.
        problems: what is not as it states, a line each.
        again: the one that was made again; None: it did not come to that.
    """

    files: int
    problems: tuple[str, ...]
    again: Certificate | None = None

    @property
    def exit_code(self) -> int:
        """1 if something is not as the certificate states, else what the one that was made again says."""
        return 1 if self.problems else self.again.exit_code if self.again else 0


def verify(
    found: Certificate,
    source: Path | None = None,
    target: Path | None = None,
    settings: Setup | None = None,
    files_alone: bool = False,
    tell: Callable[[str], None] = lambda text: None,
    named: Collection[str] = (),
) -> Verified:
    """Look at a certificate's files, and make it again.

    Args:
        source, target: where the checkpoints lie now; by default where they lay.
        settings: where and how backends run; by default as it states.
        files_alone: whether to stop when the files have been looked at.
        named: backends that may be imported though nothing here offers them: a file does not say what code is
            imported.

    Raises:
        SpecError: if a checkpoint is not there or cannot be read, or a backend is neither known nor named.
    """
    paths = source or Path(found.source.path), target or Path(found.target.path)
    asked = found.asked
    if not files_alone:
        backends.check_offered((*asked.backends, asked.home), "the certificate", named)
    tell("reading files")
    problems = [
        problem
        for path, side in zip(paths, (found.source, found.target), strict=True)
        for problem in _files(files_of(path), side, path)
    ]
    count = len(found.source.files) + len(found.target.files)
    if problems or files_alone:
        return Verified(count, tuple(problems))
    again = certify(*paths, asked, replace(settings or Setup(), asked=tuple(asked.backends)), tell)
    return Verified(count, tuple(_differing(found, again)), again)


def _files(now: Mapping[str, HashedFile], side: PortSide, path: Path) -> Iterator[str]:
    """Yield which files are not as they were."""
    for name, file in side.files.items():
        if name not in now:
            yield f"{path}: {name} is gone"
        elif now[name] != file:
            yield f"{path}: {name} was altered: its SHA-256 is {now[name].sha256} but must be {file.sha256}"
    yield from (
        f"{path}: {name} was not there when the certificate was made"
        for name in now
        if name not in side.files
    )


def _differing(one: Certificate, other: Certificate) -> Iterator[str]:
    """Yield what a certificate states and the one that was made again does not.

    Measured errors need not be the same.
    """
    mine, theirs = ({_key(item): item for item in found.items} for found in (one, other))
    for key in {**mine, **theirs}:
        was, now, said = mine.get(key), theirs.get(key), " ".join(filter(None, key))
        if was is None:
            yield f"{said}: is {theirs[key].status}, was not there"
        elif now is None or now.status != was.status:
            yield f"{said}: was {was.status}, is {f'{now.status}: {now.reason}' if now else 'not there'}"
    for name in ("parameters", "others", "sensitivity"):
        if getattr(one, name) != getattr(other, name):
            yield f"{name}: not what the certificate states"


def _key(item: Item) -> tuple[str, str, str]:
    return item.name, item.backend, item.dtype
