"""Certificates of ports."""

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
from concord.conformance.wording import counted, gather, joined
from concord.porting.checkpoint import Checkpoint, in_canonical_layout
from concord.porting.comparison import Comparison, compare
from concord.porting.folder import folder_of
from concord.porting.reading import read
from concord.porting.recognition import AUTO
from concord.porting.registry import find_format
from concord.porting.texts import Text, TextEncoder, batch_of
from concord.spec.batch import Batch, completed, example_batch, validate_batch
from concord.spec.config import EncoderConfig
from concord.spec.deviations import Deviations
from concord.spec.errors import located, refuse
from concord.spec.files import find, sha256_of
from concord.spec.parameters import Weights
from concord.spec.tensors import POOLED, taps
from concord.spec.text import first_of

KIND = "certificate"

# A certificate may be in the weights' folder, but cannot contain its own hash.
BESIDE = ("certificate.json", "certificate.html")

SENTENCES = "sentences"

# Samples, tokens and padding of each input, also in words. Ports often fail on left padding and single
# tokens, which ordinary sentences never contain. Gradients are judged only on the first input.
DRAWN = {
    SENTENCES: (4, 11, "ragged", "one of which is all padding"),
    "padding first": (5, 7, "left", "one of which begins with padding"),
    "one token": (1, 1, "none", "no padding"),
}

# Bytes of expectations to cache. Source and target share one per input; without the cache, the reference
# would derive it twice.
KEPT = 400 << 20

# Settings that --verify repeats, because they are part of the proof; threads and limits depend on the
# machine.
STATED = ("device", "implementation", "execution", "precision", "deterministic")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Side:
    """One checkpoint; ``files`` maps each file in its folder to its SHA-256."""

    path: str
    format: str
    part: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class PlantedBug:
    """Wrong weights planted in the target, and the verdict on their run."""

    as_written = also("found")

    bug: str  # in words
    difference: str  # its line in the comparison of checkpoints; empty for none
    status: str
    tensor: str = ""  # the first divergent tensor, and its error in tolerances
    ratio: Number = 0.0

    @classmethod
    def of(cls, wrong: tuple[str, str, Weights], result: Result) -> PlantedBug:
        """Pair wrong weights with their verdict."""
        row = result.first_divergence
        return cls(*wrong[:2], result.status, *((row.tensor, row.ratio) if row else ()))

    @property
    def found(self) -> bool:
        """Whether the judge, which never sees the weights, found it."""
        return self.status == "diverges"

    @property
    def outcome(self) -> str:
        """``found``, ``missed``, or the status of a run that could not be judged."""
        return {"diverges": "found", "agrees": "missed"}.get(self.status, self.status)


@dataclass(frozen=True)
class Certificate:
    """Evidence for a port from A, the source, to B, the target.

    The report's groups ``"source"`` and ``"target"`` are both judged against the source's weights.
    """

    as_written = also("summary")

    source: Side
    target: Side
    table: str | None  # names and layouts that replaced those of the source format
    backends: tuple[str, ...]  # that ran both sides; if empty, each side ran on its format's backend
    texts: tuple[Text, ...]  # empty for random ids
    inputs: Mapping[str, str]  # descriptions
    comparison: Comparison
    report: Report
    bugs: tuple[PlantedBug, ...]  # empty unless the target agrees

    @property
    def problems(self) -> list[str]:
        """One line per defect of the port."""
        return [
            *([self.comparison.summary] if self.comparison.exit_code else []),
            *(
                f"{group} in {backend} diverges, first at {tensor}, on {joined([run.case for run in runs])}"
                for (group, backend, tensor), runs in gather(
                    (result for result in self.report.results if result.first_divergence),
                    lambda run: (run.group, run.backend, run.first_divergence.tensor),
                ).items()
            ),
            *(
                # A judge that finds no planted bug would not find a real one (decision 0030).
                ["the judge finds none of the bugs planted in the target's weights"]
                if self.bugs and all(bug.outcome == "missed" for bug in self.bugs)
                else []
            ),
        ]

    def contradictions(self) -> Iterator[str]:
        """Yield each run whose recorded status contradicts its verdict."""
        return self.report.contradictions()

    @property
    def exit_code(self) -> int:
        """1: an incorrect port; 3: a run could not be judged; else 0."""
        if self.problems:
            return 1
        return self.report.exit_code or 3 * any(bug.outcome == bug.status for bug in self.bugs)

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if self.problems:
            return f"The certificate fails: {'; '.join(self.problems)}."
        if self.exit_code:
            failures = [f"{_run(run)}: {run.status}" for run in self.report.results if run.status != "agrees"]
            ended = [f"{bug.bug}: {bug.status}" for bug in self.bugs if bug.outcome == bug.status]
            # A worker that timed out is not started again, so the other bugs have its status too.
            failures += [first_of(ended, 1)] if ended else []
            return f"Nothing is known to be wrong, but not everything was judged: {'; '.join(failures)}."
        detections, runs = sum(bug.found for bug in self.bugs), len(self.report.results)
        return (
            f"The target computes what the source computes: {self.comparison.summary}; all {runs} runs "
            f"agree; the judge finds {detections} of {counted(len(self.bugs), 'bug')} planted in its weights."
        )


def _run(result: Result) -> str:
    return f"{result.group} in {result.backend} on {result.case}"


@dataclass(frozen=True, kw_only=True)
class PortedJob(Job):
    """A run of the target, judged as a run of the source."""

    source: Job

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        """Judge against the source's weights."""
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
    """Run source and target, compare their tensors, and plant bugs in the target.

    Args:
        table: a file of names and layouts that replaces the source format's.
        names: backends for both sides; by default that of each format.
        texts: texts for the source's tokenizer; by default ids are random.

    Raises:
        SpecError: if a checkpoint is unreadable, changes during the runs, or lacks a tokenizer for texts.
    """
    source = read(source_path, source_format, Path(table) if table else None)
    target = read(target_path, target_format)
    first, second = (
        Side(str(path), checkpoint.format, checkpoint.part, hashes(path))
        for path, checkpoint in ((source_path, source), (target_path, target))
    )
    tell("comparing every tensor")
    comparison = compare(source, target, ported=True)
    with located(str(source_path)):
        batches, meanings = inputs_of(source, texts)
    homes = [names or (find_format(side.format).home,) for side in (source, target)]
    # A backend requested by name must fail the run if it is not installed, instead of being skipped.
    settings = replace(settings or Setup(), asked=(*homes[0], *homes[1]))

    def run(jobs: Sequence[Job], names: Sequence[str]) -> Report:
        words = {job.name: f"{job.case}, in {job.dtype}" for job in jobs}
        return conduct(jobs, names, settings, lambda name, done: tell(f"{name}: {words.get(done, done)}"))

    with family.keeping(KEPT):
        report, bugs = _run_both(source, target, batches, homes, run)
    # Hashes were computed before the runs: a file that has changed since may differ from the one that ran.
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
    weights, right = target.weights(), source.weights()
    jobs = [
        Job("source", case, "float32", source.part, source.config, right, batch, gradients=case == SENTENCES)
        for case, batch in batches.items()
    ]
    report = run(jobs, homes[0])
    # A target with another part or other shapes cannot be judged against the source; the comparison of
    # tensors already reports it.
    if source.part != target.part or _shapes(weights) != _shapes(right):
        return report, ()
    ported = run([_ported(job, target.config, weights) for job in jobs], homes[1])
    report = replace(
        report,
        results=[*report.results, *ported.results],
        environments={**report.environments, **ported.environments},
        seconds=report.seconds + ported.seconds,
    )
    # In a port that already diverges, planted bugs could not be distinguished from the port's own.
    if ported.exit_code:
        return report, ()
    wrong = [*_wrong_weights(jobs[0], source, target)]
    results = run(
        [
            _trial(replace(jobs[0], case=words), target.config, {**weights, **changed})
            for words, _, changed in wrong
        ],
        homes[1][:1],
    ).results
    return report, tuple(PlantedBug.of(bug, result) for bug, result in zip(wrong, results, strict=True))


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in weights.items()}


def _ported(source: Job, config: EncoderConfig, weights: Weights) -> PortedJob:
    return PortedJob(
        **{**vars(source), "group": "target", "config": config, "weights": weights}, source=source
    )


def hashes(path: Path) -> dict[str, str]:
    """SHA-256 of a checkpoint's files by relative name."""
    folder = folder_of(path)
    return {
        name: sha256_of(file)
        for file in find(folder, "*")
        if file.is_file() and (name := file.relative_to(folder).as_posix()) not in BESIDE
    }


def _altered(side: Side, path: Path) -> Iterator[str]:
    # Files added later do not count as alterations.
    now = hashes(path)
    for name, digest in side.files.items():
        if name not in now:
            yield f"{path}: {name} is missing"
        elif now[name] != digest:
            yield f"{path}: {name} was altered: its SHA-256 is {now[name]} but must be {digest}"


def inputs_of(source: Checkpoint, texts: Sequence[Text] = ()) -> tuple[dict[str, Batch], dict[str, str]]:
    """Inputs and their descriptions, by name."""
    config, part, batches, meanings = source.config, source.part, dict[str, Batch](), dict[str, str]()
    room = config.max_tokens
    flat = part in POOLED and config.pooling == "flatten"  # its classifier has weights for each position
    for name, (samples, tokens, padding, words) in DRAWN.items():
        width = config.max_positions if flat else min(tokens, room)
        batches[name] = example_batch(config, samples, width, 0, padding, part)
        single, several = "one token", f"{counted(samples, 'sequence')} of up to {width} tokens"
        meanings[name] = f"{single if samples * width == 1 else several}, drawn at random, {words}"
    if texts:
        batches[SENTENCES] = completed(
            config, batch_of(config, TextEncoder(source).encode(texts)), part, drawn=True
        )
        validate_batch(config, batches[SENTENCES], part)
        meanings[SENTENCES] = f"{counted(len(texts), 'text')} that you gave"
    return batches, meanings


# Bugs to plant in the target.


def _wrong_weights(model: Job, source: Checkpoint, target: Checkpoint) -> Iterator[tuple[str, str, Weights]]:
    """Yield a bug of each kind: description, line in ``concord diff``, and changed parameters."""
    case = JudgedProblem(model.config, model.weights, model.batch, model.part, model.dtype)
    kinds = gather(
        (
            wrong
            for tap in taps(model.config, model.part, list(model.batch.arrays()))
            for wrong in wrong_weights(case, tap)
        ),
        lambda wrong: wrong.name,
    )
    draw = random.Random(0)  # --verify must plant the same bugs
    for of_kind in kinds.values():
        # A bug in only a small bias may correctly stay within tolerance.
        most = max(len(wrong.arrays) for wrong in of_kind)
        _, words, _, arrays = draw.choice([wrong for wrong in of_kind if len(wrong.arrays) == most])
        every = {name: make().astype(model.weights[name].dtype) for name, make in arrays.items()}
        if changed := {n: array for n, array in every.items() if (array != model.weights[n]).any()}:
            tensors = {name: in_canonical_layout(name, array) for name, array in changed.items()}
            pairs = compare(source, replace(target, tensors=tensors, others={}, files={})).pairs
            yield words, pairs[0].sentence if pairs else "", changed


def _trial(model: Job, config: EncoderConfig, weights: Weights) -> PortedJob:

    # End to end, all bugs share one expectation; local judgement would need one for each bug.
    def expected(deviations: Deviations) -> Expectation:
        return family.end_to_end(
            JudgedProblem(
                model.config, model.weights, model.batch, model.part, model.dtype, deviations, gradients=False
            )
        )

    return _ported(replace(model, gradients=False, expectation=expected), config, weights)


# Verification, and the page.


def verify(
    stated: Certificate,
    source: Path | None = None,
    target: Path | None = None,
    settings: Setup | None = None,
    tell: Tell = lambda text: None,
    named: Collection[str] = (),
) -> tuple[list[str], Certificate | None]:
    """Check a certificate's files against their hashes, then certify again.

    Args:
        source, target: current paths; by default the certificate's.
        named: plug-ins to allow, because an untrusted file must not decide which code runs.

    Returns:
        Lines about differences, and the new certificate, or None if files have changed.
    """
    backends.check_offered(stated.backends, "the certificate", named)
    paths = source or Path(stated.source.path), target or Path(stated.target.path)
    if altered := [*_altered(stated.source, paths[0]), *_altered(stated.target, paths[1])]:
        return altered, None
    new = certify(
        *paths,
        stated.source.format,
        stated.target.format,
        stated.table,
        stated.backends,
        stated.texts,
        replace(settings or Setup(), **{key: getattr(stated.report.settings, key) for key in STATED}),
        tell,
    )
    return list(_differing(stated, new)), new


def _differing(old: Certificate, new: Certificate) -> Iterator[str]:
    # Statuses must be equal; measured errors may differ between machines.
    if old.comparison != new.comparison:
        yield f"the comparison said: {old.comparison.summary}; now: {new.comparison.summary}"
    for before, now in (
        ({_run(run): run.status for run in side.report.results} for side in (old, new)),
        ({f"bug: {bug.bug}": bug.outcome for bug in side.bugs} for side in (old, new)),
    ):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                yield f"{key}: {before.get(key, 'not there')} before, {now.get(key, 'not there')} now"


def certificate_page(written: record.Record) -> str:
    """Render a certificate's record as HTML."""
    certificate: Certificate = written.outcome
    headline, _, rest = certificate.summary.rstrip(".").partition(": ")
    return render(
        "certificate.html",
        written,
        Path(__file__).parent / "templates",
        headline=f"{headline}.",
        compared=[f"{rest[:1].upper()}{rest[1:]}."],
        about={key: getattr(certificate.report.settings, key) for key in STATED},
    )
