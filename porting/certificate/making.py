"""Making a certificate: from the files of two checkpoints to a verdict, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from concord import backends
from concord.conformance import tolerance
from concord.conformance.campaign import Job, Report, Setup, conduct
from concord.conformance.check import DTYPES
from concord.conformance.mutants.matrix import Finding
from concord.conformance.wording import gather
from concord.porting.certificate import files, mutants, runs
from concord.porting.certificate.certificate import (
    FAILED,
    HOW,
    NOT_APPLICABLE,
    UNVERIFIED,
    Asked,
    Certificate,
    Claim,
    PortSide,
)
from concord.porting.certificate.inputs import Inputs, inputs_of
from concord.porting.checkpoint import Checkpoint
from concord.porting.comparison.checkpoints import compare
from concord.porting.reading import read
from concord.porting.registry import known
from concord.spec.errors import refuse
from concord.spec.reference import reference
from concord.spec.tensors import output_name

KEPT = 400 << 20
"""Bytes of tolerances that are kept from the source's runs for the target's."""

Tell = Callable[[str], None]


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
        settings: how the backends run.
        tell: takes what is being done, in words.

    Raises:
        UnknownNameError: for an unknown format or backend.
        SpecError: if one of the two cannot be read, is no model of the family, or changes meanwhile; listing
            why.
    """
    asked, settings, paths = asked or Asked(), settings or Setup(), (source_path, target_path)
    table = Path(asked.source_table) if asked.source_table else None
    tell("reading both checkpoints")
    source = read(source_path, asked.source_format, table)
    target = read(target_path, asked.target_format)
    tell("comparing every tensor")
    sides = files.side_of(source_path, source), files.side_of(target_path, target)
    asked = replace(
        asked,
        backends=asked.backends or [known(target.format).home],
        home=asked.home or known(source.format).home,
        dtypes=asked.dtypes or [*DTYPES[asked.quick :]],
    )
    compared = compare(source, target, sides=files.SIDES)
    claims = list(files.claims(source, target, sides, compared))
    for name, checkpoint, side, form in (
        ("round trip", source, sides[0], target.format),
        ("round trip back", target, sides[1], source.format),
    ):
        tell(f"{name} through {form}")
        claims.append(files.round_trip(name, checkpoint, side, form))
    given = inputs_of(source.config, source.part, asked.texts, asked.seed, asked.quick)
    report, found = Report([], {}, settings), tuple[Finding, ...]()
    failed = [claim.name for claim in claims if claim.status == FAILED]
    if "same bits" in failed and asked.extent != "all":
        why = "the parameters differ, so nothing was run; --all runs it all the same"
        claims += [Claim(kind, UNVERIFIED, why) for kind in runs.KINDS]
    else:
        first, batch = next(iter(given.batches.items()))
        config, weights, part = source.config, source.weights(), source.part
        model = Job("source", first, asked.dtypes[0], part, config, weights, batch)
        report, more = _run(model, target, given, asked, settings, tell, not failed)
        claims += more
        tell("changing tensors, to see what is noticed")
        found = mutants.hunt(model, sides[0], source.tensors, asked, tell)
        claims += mutants.claims(found, asked.seed)
    claims += [Claim(f"input: {name}", NOT_APPLICABLE, why) for name, why in given.left_out.items()]
    if known(source.format).source:
        said = (
            f"the code that {source.format} belongs to was not run, its framework was; the model is "
            "held to the published sources' own tensors by concord golden"
        )
        claims.append(Claim("source's own code", UNVERIFIED, said))
    refuse([problem for side, path in zip(sides, paths, strict=True) for problem in _altered(path, side)])
    return Certificate(*sides, asked, compared, given.tried, report, found, tuple(claims))


def _run(
    source: Job, target: Checkpoint, given: Inputs, asked: Asked, settings: Setup, tell: Tell, explain: bool
) -> tuple[Report, list[Claim]]:
    """Run the target on every backend and the source in its own framework, and judge both by the source.

    The source runs on the sentences alone, of a large model forward: gradients are judged in the target.

    Args:
        explain: whether it is to be found out why something diverges.
    """
    small, planned = runs.size_of(source) <= runs.SMALL, list[Job]()
    left_out = list(runs.unjudged(source, [*given.batches], asked))
    there = runs.ported(source, target)
    if isinstance(there, str):
        left_out = [Claim(kind, UNVERIFIED, there) for kind in runs.KINDS]
    else:
        planned += runs.jobs(there, given.batches, asked, left_out)
    tokens = runs.work(planned) + mutants.work(source, asked.quick)
    started = time.perf_counter()
    reference(source.config, source.weights, source.batch, False, source.part)
    seconds = (time.perf_counter() - started) * tokens / runs.tokens_of(source.batch)
    said = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    tell(f"about {said} in all, on a machine that does nothing else")
    home = [] if asked.quick else [replace(source, dtype=dtype, gradients=small) for dtype in asked.dtypes]
    with tolerance.keeping(KEPT):  # both are judged on the sentences, from the inputs on
        at_home, abroad = (
            conduct(jobs, names, settings, lambda backend, done: tell(f"{backend}: {done}"))
            for jobs, names in ((home, [asked.home]), (planned, asked.backends))
        )
    results = [*abroad.results, *at_home.results]
    environments = {**at_home.environments, **abroad.environments}
    report = Report(results, environments, settings, at_home.seconds + abroad.seconds)
    report = report.explained() if explain else report
    output, claims = output_name(source.config, source.part), list[Claim]()
    by_run = gather(report.results, lambda result: (result.group, result.backend, result.dtype))
    for (group, _, dtype), judged in by_run.items():
        begin, kinds = ("", runs.KINDS) if group == "target" else (runs.HOME, runs.KINDS[:-1])
        for kind in runs.FORWARD if asked.quick else kinds:
            if not runs.is_among(left_out, f"{begin}{kind}", dtype):
                claims.append(runs.claim(f"{begin}{kind}", kind, judged, output))
    return report, claims + left_out


def verify(
    found: Certificate,
    source: Path | None = None,
    target: Path | None = None,
    settings: Setup | None = None,
    files_alone: bool = False,
    tell: Tell = lambda text: None,
    named: Collection[str] = (),
) -> tuple[list[str], Certificate | None]:
    """Look at a certificate's files, and make it again.

    Args:
        source, target: where the checkpoints lie now; by default where they lay.
        settings: where backends run.
        files_alone: whether to stop when the files have been looked at.
        named: backends that may be imported though nothing here offers them: a file does not say what code is
            imported.

    Returns:
        What is not as it states, a line each, and the one that was made again; None: it did not come to that.

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
        for problem in _altered(path, side)
    ]
    if problems or files_alone:
        return problems, None
    stated = {key: getattr(found.report.settings, key) for key in HOW}
    how = replace(settings or Setup(), asked=tuple(asked.backends), **stated)
    again = certify(*paths, asked, how, tell)
    return list(_differing(found, again)), again


def _altered(path: Path, side: PortSide) -> Iterator[str]:
    """Yield which files of a checkpoint are not as they were."""
    now = files.files_of(path)
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
    mine, theirs = (
        {(claim.name, claim.backend, claim.dtype): claim for claim in found.claims} for found in (one, other)
    )
    for key in {**mine, **theirs}:
        was, now, said = mine.get(key), theirs.get(key), " ".join(filter(None, key))
        if was is None:
            yield f"{said}: is {theirs[key].status}, was not there"
        elif now is None or now.status != was.status:
            yield f"{said}: was {was.status}, is {f'{now.status}: {now.reason}' if now else 'not there'}"
    stated = ((one.source, other.source), (one.target, other.target))
    if any((a.parameters, a.others) != (b.parameters, b.others) for a, b in stated):
        yield "tensors: not what the certificate states"
    if one.mutants != other.mutants:
        yield "mutants: not what the certificate states"
