"""Compare fixed tolerances with Concord's: ``make criteria`` repeats the measurement of the guide.

The usual criteria and Concord's tolerances judge the same runs against the float64 reference. Bugs are the
mutants, each in the case that shows it. Right runs are allowed alternatives, and random cases.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from concord import backends
from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.fuzz.plan import Plan, sample
from concord.conformance.mutants.matrix import plugin
from concord.conformance.run.report import within
from concord.conformance.run.standard_jobs import job_of
from concord.conformance.wording import markdown_table
from concord.spec.cases import build_case, standard_cases
from concord.spec.files import write_text
from concord.spec.reference import reference
from concord.spec.tensors import output_name
from tests.toys import alternatives

SEED = 2026
# Standard and random cases for each alternative, then random cases in float32 and in bfloat16.
CASES, SINGLE_CASES, HALF_CASES = 4, 200, 100

GROUPS = BUGGY, RIGHT, SINGLE, HALF = (
    "bugs",
    "allowed alternatives",
    "correct float32",
    "correct bfloat16",
)
OURS = "this project"


def cosine(actual, value):
    norms = np.linalg.norm(actual) * np.linalg.norm(value)
    return 1.0 if norms == 0 else np.vdot(actual, value) / norms


def correlation(actual, value):
    return cosine(actual - actual.mean(), value - value.mean()) if value.size else 1.0


def log_probabilities(logits):
    # A single logit belongs to one of two classes; the other has zero.
    pairs = np.concatenate([logits, np.zeros_like(logits)], -1) if logits.shape[-1] == 1 else logits
    shifted = pairs - pairs.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(actual, value):
    p, q = log_probabilities(value), log_probabilities(actual)
    return (np.exp(p) * (p - q)).sum(-1).max()


def allclose(limit, actual, value):
    return np.allclose(actual, value, rtol=limit, atol=limit)


CRITERIA = {
    "allclose 1e-5": partial(allclose, 1e-5),
    "allclose 1e-4": partial(allclose, 1e-4),
    "allclose 1e-3": partial(allclose, 1e-3),
    "max-abs 1e-3": lambda actual, value: (abs(actual - value) <= 1e-3).all(),
    "cosine 0.999": lambda actual, value: cosine(actual, value) >= 0.999,
    "PCC 0.99": lambda actual, value: correlation(actual, value) >= 0.99,
    "NMSE 1e-2": lambda actual, value: np.square(actual - value).sum() <= 1e-2 * np.square(value).sum(),
    "KL 1e-3": lambda actual, value: divergence(actual, value) <= 1e-3,
}
# KL compares probabilities, so it applies to logits only.
OF_LOGITS = "KL 1e-3"


def passes(criterion, actual, value):
    # Tensors that are missing, misshapen, or not finite where the reference is, fail every criterion.
    if actual is None or actual.shape != value.shape:
        return False
    wide, finite = np.asarray(actual, np.float64), np.isfinite(value)
    if not np.isfinite(wide[finite]).all():
        return False
    with np.errstate(all="ignore"):
        return bool(criterion(wide, value) if finite.all() else criterion(wide[finite], value[finite]))


def flags_of(job, run):
    """For each criterion, whether it flags the output, and whether it flags any tensor."""
    truth = reference(job.config, job.weights, job.batch, True, job.part, job.dtype)
    expected = {**truth.taps, **{f"gradients.{name}": array for name, array in truth.gradients.items()}}
    actual = {**run.taps, **{f"gradients.{name}": array for name, array in run.gradients.items()}}
    flags = {}
    for name, criterion in CRITERIA.items():
        if name == OF_LOGITS:
            flags[name] = job.part == "model" and not passes(criterion, run.output, truth.output), None
            continue
        flags[name] = (
            not passes(criterion, run.output, truth.output),
            any(not passes(criterion, actual.get(tensor), expected[tensor]) for tensor in expected),
        )
    verdict = job.judge(run)
    row = verdict.row(output_name(job.config, job.part))
    from_inputs = row and (row.end_to_end or row).status == "diverges"
    flags[OURS] = bool(from_inputs), verdict.status == "diverges"
    return flags


def random_jobs(dtype, count, seed):
    cases = sample(Plan(names=(), dtypes=(dtype,), seed=seed), range(count))
    # Judged end to end too, like the usual criteria.
    return [replace(case.job(f"random {i}"), end_to_end=True) for i, case in enumerate(cases)]


def run_of(worker, job, implementation="explicit"):
    return worker.run(job.config, job.weights, job.batch, job.part, job.dtype, implementation)


def of_bug(worker, bug):
    scenarios = [bug.after, bug.scenario] if bug.after else [bug.scenario]
    cases = [build_case(bug.variant, scenario, options=bug.options) for scenario in scenarios]
    jobs = [job_of(case, "float32") for case in cases]
    try:
        runs = [run_of(worker, job, f"mutant:{bug.name}") for job in jobs]
        return flags_of(jobs[-1], runs[-1])
    except WorkerFailure as failure:
        if failure.status != "error":
            raise
        # The framework itself refuses to run the bug, which nobody would overlook.
        return {name: (True, None if name == OF_LOGITS else True) for name in (*CRITERIA, OURS)}


def of_backend(place, names):
    # Each run is made once, by one of the backends.
    mutants = [*BUGS.values()]
    groups = {
        SINGLE: random_jobs("float32", SINGLE_CASES, SEED),
        HALF: random_jobs("bfloat16", HALF_CASES, SEED),
    }
    with backends.open(plugin(names[place])) as worker:
        tasks = [(BUGGY, bug.name, partial(of_bug, worker, bug)) for bug in mutants[place :: len(names)]]
        for group, jobs in groups.items():
            tasks += [
                (group, job.name, lambda job=job: flags_of(job, run_of(worker, job)))
                for job in jobs[place :: len(names)]
            ]
        for group, name, flagged in tasks:
            try:
                yield group, f"{name} {names[place]}", flagged()
            except Unsupported:  # the backend has no kernels for it
                continue


def of_alternatives(cases=CASES, seed=SEED):
    standard = [job_of(case, "float32") for case in standard_cases()]
    np.random.default_rng(seed).shuffle(standard)
    turns = itertools.cycle(standard), itertools.cycle(random_jobs("float32", 2 * cases, seed + 1))
    for alternative in alternatives.ALTERNATIVES.values():
        for job in itertools.chain.from_iterable(itertools.islice(turn, cases) for turn in turns):
            try:
                run = alternatives.run(alternative.change, job)
            except Unsupported:
                continue
            yield RIGHT, f"{alternative.name} {job.name}", flags_of(job, run)


def percent(some, of):
    if some in (0, of):
        return "0 %" if some == 0 else "100 %"
    # A few of many must not read as 0 %, nor all but a few as 100 %.
    share = 100 * some / of
    if not 0.1 <= share <= 99.9:
        return "< 0.1 %" if share < 50 else "> 99.9 %"
    return f"{share:.1f} %" if share < 10 or share > 99 else f"{share:.0f} %"


def table(flagged):
    def cell(group, name):
        counts = [[flags[name][side] for flags in flagged[group].values()] for side in (0, 1)]
        return " / ".join("–" if None in count else percent(sum(count), len(count)) for count in counts)

    lines = [["criterion", *GROUPS], ["---", *["---:"] * len(GROUPS)]]
    lines += [[name, *(cell(group, name) for group in GROUPS)] for name in (*CRITERIA, OURS)]
    return markdown_table(lines)


def main(readme):
    names = list(backends.BUILT_IN)
    tasks = [of_alternatives, *(partial(of_backend, place, names) for place in range(len(names)))]
    flagged = {group: {} for group in GROUPS}
    with ThreadPoolExecutor(max_workers=2) as pool:
        for runs in pool.map(lambda task: list(task()), tasks):
            for group, name, flags in runs:
                flagged[group][name] = flags
    bugs, right, single, half = (len(flagged[group]) for group in GROUPS)
    text = (
        f"{table(flagged)}\n\nShare of runs that are flagged, by their outputs only / by any tensor. "
        f"{bugs} bugs, {right} runs of allowed alternatives, {single} correct runs in float32, {half} in "
        f"bfloat16; seed {SEED}.\n"
    )
    write_text(Path(readme), within(Path(readme), "criteria", text))
    print(text)
    alarms = [name for group in GROUPS[1:] for name, flags in flagged[group].items() if flags[OURS][1]]
    missed = [name for name, flags in flagged[BUGGY].items() if not flags[OURS][1]]
    print(f"missed by {OURS}: {', '.join(missed) or 'none'}\nfalse alarms: {', '.join(alarms) or 'none'}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
