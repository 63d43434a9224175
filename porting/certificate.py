"""Certificates of ports: how two checkpoints differ, what both compute, and which bugs would have shown."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from concord import backends
from concord.backends.interface import Run
from concord.conformance.explain.weight_search import wrong_weights
from concord.conformance.judging import family
from concord.conformance.judging.expectation import Expectation, JudgedProblem
from concord.conformance.judging.verdict import Result, Verdict
from concord.conformance.record_fields import Number, also
from concord.conformance.run import record
from concord.conformance.run.campaign import Job, Report, Setup, conduct
from concord.conformance.run.page import render
from concord.conformance.wording import counted, gather
from concord.porting.checkpoint import Checkpoint, in_canonical_layout
from concord.porting.comparison import Comparison, compare
from concord.porting.folder import folder_of
from concord.porting.reading import read
from concord.porting.recognition import AUTO
from concord.porting.registry import known
from concord.porting.texts import Text, TextEncoder, batch_of
from concord.spec.batch import Batch, completed, example_batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import Deviations
from concord.spec.errors import refuse
from concord.spec.files import find, sha256_of
from concord.spec.parameters import Weights
from concord.spec.tensors import POOLED, taps

KIND = "certificate"

BESIDE = ("certificate.json", "certificate.html")
"""What a certificate may be called that lies beside the weights: it cannot hold its own hash."""

SENTENCES = "sentences"

DRAWN = {SENTENCES: (4, 11, "ragged"), "padding first": (5, 7, "left"), "one token": (1, 1, "none")}
"""Samples, tokens and padding of each input. Gradients are judged on the first."""

KEPT = 400 << 20
"""Bytes of tolerances that are kept from one run for the next on the same input."""

STATED = ("device", "implementation", "execution", "precision", "deterministic")
"""What a certificate states of how backends run; the rest is the machine's."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: as it was given.
        format: one of :func:`concord.porting.formats`.
        part: of the model that it holds.
        files: the SHA-256 of each file in its folder.
    """

    path: str
    format: str
    part: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class PlantedBug:
    """Wrong weights that were put into the target, and what became of them.

    Attributes:
        bug: what is wrong, in words.
        difference: what the comparison of checkpoints says of it; empty: nothing.
        status: of the run: the judge finds it if it diverges.
        tensor: the first tensor that diverges.
        ratio: by how many tolerances.
    """

    as_written = also("found")

    bug: str
    difference: str
    status: str
    tensor: str = ""
    ratio: Number = 0.0

    @classmethod
    def of(cls, wrong: tuple[str, str, Weights], result: Result) -> PlantedBug:
        """Return what came of the run with wrong weights."""
        row = result.first_divergence
        return cls(*wrong[:2], result.status, *((row.tensor, row.ratio) if row else ()))

    @property
    def found(self) -> bool:
        """Whether the judge finds it, who does not look at the weights."""
        return self.status == "diverges"


@dataclass(frozen=True)
class Certificate:
    """What is known of a port.

    Attributes:
        source, target: the two checkpoints.
        table: the file with names and layouts of the source in place of its format's.
        backends: that computed both; empty: that of each one's format.
        texts: that both were run on; none: ids were drawn.
        inputs: what both were run on, each with what it is.
        comparison: how the two differ; A is the source, B the target.
        report: the runs of both, grouped as ``"source"`` and ``"target"``, each judged as the source's model.
        bugs: that were put into the target, where it agrees.
    """

    as_written = also("summary")

    source: Side
    target: Side
    table: str | None
    backends: tuple[str, ...]
    texts: tuple[Text, ...]
    inputs: Mapping[str, str]
    comparison: Comparison
    report: Report
    bugs: tuple[PlantedBug, ...]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the port, a line each."""
        lacking = self.comparison.alone[0]
        return [
            *([self.comparison.summary] if self.comparison.exit_code else []),
            *(
                f"{name} is missing in the target"
                for name in lacking
                if name in known(self.target.format).carried
            ),
            *(
                f"{_run(result)} diverges, first at {result.first_divergence.tensor}"
                for result in self.report.results
                if result.first_divergence
            ),
            *(
                ["the judge finds no bug at all"]
                if self.bugs and not any(bug.found for bug in self.bugs)
                else []
            ),
        ]

    def contradictions(self) -> Iterator[str]:
        """Yield where statuses of runs are not what verdicts come to."""
        return self.report.contradictions()

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, 3 if not all runs could be judged, else 0."""
        return 1 if self.problems else self.report.exit_code

    @property
    def summary(self) -> str:
        """What it comes to, in a sentence."""
        if self.problems:
            return f"The port is wrong: {'; '.join(self.problems)}."
        if self.exit_code:
            lost = [f"{_run(one)}: {one.status}" for one in self.report.results if one.status != "agrees"]
            return f"Nothing is known to be wrong, but not all was judged: {'; '.join(lost)}."
        found, runs = sum(bug.found for bug in self.bugs), len(self.report.results)
        return (
            f"The target is the source: {self.comparison.summary}; all {runs} runs agree; the judge finds "
            f"{found} of {counted(len(self.bugs), 'bug')} that were put into its weights."
        )


def _run(result: Result) -> str:
    return f"{result.group} in {result.backend} on {result.case}"


@dataclass(frozen=True, kw_only=True)
class PortedJob(Job):
    """A run of the target, which is judged as a run of the source."""

    source: Job

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        """Judge what the target computed against what the source should."""
        return replace(self.source, batch=self.batch).judge(run, rules)


def certify(
    source_path: Path,
    target_path: Path,
    source_format: str = AUTO,
    target_format: str = AUTO,
    table: str | None = None,
    names: Sequence[str] = (),
    texts: Sequence[Text] = (),
    settings: Setup | None = None,
    tell: Tell = lambda text: None,
) -> Certificate:
    """Make a certificate.

    Args:
        source_path, target_path: the checkpoints.
        source_format, target_format: of :func:`concord.porting.formats`, or ``"auto"``.
        table: the file with names and layouts of the source in place of its format's.
        names: the backends that compute both; none: that of each one's format.
        texts: that both are run on, by the source's tokenizer; none: ids are drawn.
        settings: how the backends run.
        tell: takes what is being done, in words.

    Raises:
        UnknownNameError: for an unknown format or backend.
        SpecError: if one of the two cannot be read, or changes meanwhile, or has no tokenizer for texts.
    """
    source = read(source_path, source_format, Path(table) if table else None)
    target = read(target_path, target_format)
    first, second = (
        Side(str(path), one.format, one.part, hashes(path))
        for path, one in ((source_path, source), (target_path, target))
    )
    tell("comparing every tensor")
    comparison = compare(source, target)
    batches, meanings = inputs_of(source, texts)
    homes = [names or (known(one.format).home,) for one in (source, target)]
    # A backend that is not installed is missing: each of the two has to be run.
    settings = replace(settings or Setup(), asked=(*homes[0], *homes[1]))

    def run(jobs: Sequence[Job], names: Sequence[str]) -> Report:
        return conduct(jobs, names, settings, lambda backend, done: tell(f"{backend}: {done}"))

    with family.keeping(KEPT):
        report, bugs = _run_both(source, target, batches, homes, run)
    refuse([*_altered(first, source_path), *_altered(second, target_path)])
    return Certificate(
        first, second, table, (*names,), (*texts,), meanings, comparison, report.explained(), bugs
    )


def _run_both(
    source: Checkpoint,
    target: Checkpoint,
    batches: Mapping[str, Batch],
    homes: Sequence[Sequence[str]],
    run: Callable[[Sequence[Job], Sequence[str]], Report],
) -> tuple[Report, tuple[PlantedBug, ...]]:
    """Run both on each input, and, where the target agrees, the target with bugs."""
    weights, right = target.weights(), source.weights()
    jobs = [
        Job("source", case, "float32", source.part, source.config, right, batch, gradients=case == SENTENCES)
        for case, batch in batches.items()
    ]
    report = run(jobs, homes[0])
    if source.part != target.part or _shapes(weights) != _shapes(right):
        return report, ()  # what differs in shape cannot be run in its place
    ported = run([_ported(job, target.config, weights) for job in jobs], homes[1])
    report = replace(
        report,
        results=[*report.results, *ported.results],
        environments={**report.environments, **ported.environments},
        seconds=report.seconds + ported.seconds,
    )
    if ported.exit_code:
        return report, ()
    wrong = [*_wrong_weights(jobs[0], source, target)]
    trials = [
        _trial(replace(jobs[0], case=words), target.config, {**weights, **made}) for words, _, made in wrong
    ]
    results = run(trials, homes[1][:1]).results
    return report, tuple(PlantedBug.of(*one) for one in zip(wrong, results, strict=True))


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in weights.items()}


def _ported(source: Job, config: EncoderConfig, weights: Weights) -> PortedJob:
    other = {**vars(source), "group": "target", "config": config, "weights": weights}
    return PortedJob(**other, source=source)


def hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a checkpoint's folder, by its name there.

    Raises:
        SpecError: if one cannot be read.
    """
    folder = folder_of(path)
    files = {one.relative_to(folder).as_posix(): one for one in find(folder, "*") if one.is_file()}
    return {name: sha256_of(one) for name, one in files.items() if name not in BESIDE}


def _altered(side: Side, path: Path) -> Iterator[str]:
    """Yield which files of a checkpoint are not as they were; others may have come."""
    now = hashes(path)
    for name, digest in side.files.items():
        if name not in now:
            yield f"{path}: {name} is gone"
        elif now[name] != digest:
            yield f"{path}: {name} was altered: its SHA-256 is {now[name]} but must be {digest}"


def inputs_of(source: Checkpoint, texts: Sequence[Text] = ()) -> tuple[dict[str, Batch], dict[str, str]]:
    """Return what a model is run on, and what that is.

    Raises:
        SpecError: if it has no tokenizer for texts.
    """
    config, part, batches, meanings = source.config, source.part, dict[str, Batch](), dict[str, str]()
    room = config.max_positions - config.position_start
    flat = part in POOLED and config.pooling == "flatten"  # takes as many tokens as there are positions
    for name, (samples, tokens, padding) in DRAWN.items():
        width = config.max_positions if flat else min(tokens, room)
        batches[name] = example_batch(config, samples, width, 0, padding, part)
        meanings[name] = f"{samples} of {width} tokens, drawn at random, padding {padding}"
    if texts:
        batch = batch_of(config, TextEncoder(source).encode(texts))
        batches[SENTENCES] = completed(config, batch, part, drawn=True)
        validate_batch(config, batches[SENTENCES], part)
        meanings[SENTENCES] = f"{len(texts)} texts that were given"
    return batches, meanings


# Bugs that are put into the target.


def _wrong_weights(model: Job, source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, str, Weights]]:
    """Yield wrong weights, one of each kind that changes any number.

    Yields:
        What is wrong in words, what the comparison of checkpoints says of it, and the parameters.
    """
    case = JudgedProblem(model.config, model.weights, model.batch, model.part, model.dtype)
    names = taps(model.config, model.part, list(model.batch.arrays()))
    kinds = gather((wrong for tap in names for wrong in wrong_weights(case, tap)), lambda wrong: wrong.name)
    draw = random.Random(0)
    for of_kind in kinds.values():
        most = max(len(wrong.made) for wrong in of_kind)  # a small bias alone may hide in rounding
        _, words, _, arrays = draw.choice([wrong for wrong in of_kind if len(wrong.made) == most])
        made = {name: make().astype(model.weights[name].dtype) for name, make in arrays.items()}
        if any((array != model.weights[name]).any() for name, array in made.items()):
            tensors = {name: in_canonical_layout(name, array) for name, array in made.items()}
            pairs = compare(source, replace(target, tensors=tensors, others={}, files={})).pairs
            yield words, pairs[0].said if pairs else "", made


def _trial(model: Job, config: EncoderConfig, weights: Weights) -> PortedJob:
    """Return the run of a target that has a bug, judged from the inputs on: that needs one expectation."""

    def expected(deviations: Deviations) -> Expectation:
        about = (model.config, model.weights, model.batch, model.part, model.dtype, deviations)
        return family.end_to_end(JudgedProblem(*about, gradients=False))

    return _ported(replace(model, gradients=False, expectation=expected), config, weights)


# The proof made again, and its page.


def verify(
    stated: Certificate,
    source: Path | None = None,
    target: Path | None = None,
    settings: Setup | None = None,
    tell: Tell = lambda text: None,
    named: Collection[str] = (),
) -> tuple[list[str], Certificate | None]:
    """Look at a certificate's files, and make it again.

    Args:
        source, target: where the checkpoints lie now; by default where they lay.
        settings: of this machine.
        tell: takes what is being done, in words.
        named: backends that may be imported though nothing here offers them: a file does not say what code is
            imported.

    Returns:
        What is not as it states, a line each, and the one that was made again; None: the files are others.

    Raises:
        SpecError: if a checkpoint is not there or cannot be read, or a backend is neither known nor named.
    """
    backends.check_offered(stated.backends, "the certificate", named)
    paths = source or Path(stated.source.path), target or Path(stated.target.path)
    if altered := [*_altered(stated.source, paths[0]), *_altered(stated.target, paths[1])]:
        return altered, None
    how = {key: getattr(stated.report.settings, key) for key in STATED}
    again = certify(
        *paths,
        stated.source.format,
        stated.target.format,
        stated.table,
        stated.backends,
        stated.texts,
        replace(settings or Setup(), **how),
        tell,
    )
    return list(_differing(stated, again)), again


def _differing(stated: Certificate, again: Certificate) -> Iterator[str]:
    """Yield what comes out otherwise. Measured errors need not be the same."""
    if stated.comparison != again.comparison:
        yield f"the comparison said: {stated.comparison.summary}; now: {again.comparison.summary}"
    for said, now in (
        ({_run(one): one.status for one in side.report.results} for side in (stated, again)),
        (
            {f"bug: {one.bug}": ("missed", "found")[one.found] for one in side.bugs}
            for side in (stated, again)
        ),
    ):
        for key in {**said, **now}:
            if said.get(key) != now.get(key):
                yield f"{key}: was {said.get(key, 'not there')}, is {now.get(key, 'not there')}"


def certificate_page(made: record.Record) -> str:
    """Return a record of a certificate as HTML."""
    certificate: Certificate = made.outcome
    headline, _, rest = certificate.summary.rstrip(".").partition(": ")
    return render(
        "certificate.html",
        made,
        Path(__file__).parent / "templates",
        headline=f"{headline}.",
        compared=[f"{rest[:1].upper()}{rest[1:]}."],
        about={key: getattr(certificate.report.settings, key) for key in STATED},
    )
