"""How a command ends that is not done: with a line and a code, never with that of a divergence."""

import json
import signal
import time

import pytest

import conformance.run.campaign
from concord.backends.pool import GLANCE
from concord.conformance import Setup, check_jobs, conduct
from concord.conformance.mutants import matrix
from concord.conformance.run import record
from concord.conformance.run.report import summary
from concord.output_files import page
from concord.spec.errors import SpecError
from tests.toys.running import Running, noted, until
from tests.toys.surroundings import ROOT, errors, toy

ONE_RUN = f"check --backend {toy('NumpyBackend')} --case bert-single --dtype float32 --threads 1"


def test_a_fault_of_concord_is_told_in_a_line(invoke, entered, monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError("of Concord\nin two lines")

    monkeypatch.setattr("concord.commands.check.check_jobs", fails)
    _, (said,) = entered(ONE_RUN, ends=3)
    assert said.startswith("concord: a bug in Concord: ZeroDivisionError: of Concord (test_exit_codes.py:")
    monkeypatch.setenv("CONCORD_TRACEBACK", "1")
    assert "in fails" in "\n".join(invoke(ONE_RUN)[2])


def test_a_fault_while_judging_is_concord_s_and_all_other_results_are_kept(monkeypatch):
    def judge(config, weights, batch, *more):
        if len(batch.required("labels")) == 1:
            raise AssertionError("of the judge\nin two lines")
        return right(config, weights, batch, *more)

    right = conformance.run.campaign.judge
    monkeypatch.setattr("concord.conformance.run.campaign.judge", judge)
    report = conduct(
        check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-single", "bert-full"]),
        [toy("NumpyBackend")],
        Setup(threads=1),
    )
    assert sorted(result.status for result in report.results) == ["agrees", "agrees", "not judged"]
    (unjudged,) = [result for result in report.results if result.status == "not judged"]
    assert (unjudged.case, unjudged.detail) == (
        "bert-single",
        "a bug in Concord while judging: AssertionError: of the judge",
    )
    assert "Traceback" in unjudged.stderr
    assert "in judge" in unjudged.stderr
    assert report.exit_code == 3
    made = record.made(report, "check")
    record.parsed(record.text(made).encode())
    assert "could not be judged, by a fault of Concord, in 1 of 3 runs" in page(made)


def test_the_record_is_written_before_anything_is_shown(entered, tmp_path, monkeypatch):
    def fails(*arguments):
        raise RecursionError("of what shows it")

    monkeypatch.setattr("concord.conformance.run.report.show", fails)
    _, said = entered(f"{ONE_RUN} --json {tmp_path / 'out.json'}", ends=3)
    assert len(said) == 1
    assert [result["status"] for result in json.loads((tmp_path / "out.json").read_text())["results"]] == [
        "agrees"
    ]


HANGS = toy("HangsAtTheThird")
GOLDEN = ROOT / "conformance/golden/keras-attention"

ENDED = {
    "check": (f"check --variant bert --backend {HANGS} --dtype float32 --threads 1", signal.SIGINT),
    "golden": (f"golden {GOLDEN} --backend {HANGS} --threads 1", signal.SIGTERM),
}
"""Commands that hang after two runs, and what ends them."""


@pytest.mark.parametrize("command", ENDED)
def test_what_was_judged_before_a_signal_is_kept_and_marked(command, tmp_path, entered):
    line, how = ENDED[command]
    path = tmp_path / "out.json"
    running = Running(tmp_path, line, "--json", path, "--html", tmp_path / "out.html")
    assert until(lambda: noted(running.notes, "hanging"))
    running.process.send_signal(how)
    assert running.end() == 128 + how
    words = "interrupted" if how == signal.SIGINT else f"ended by {how.name}"
    assert errors(running.said()).splitlines()[-1] == f"concord: {words}"
    assert running.files() == {"out.json", "out.html"}
    made = record.read(path)
    statuses = {result.status for result in made.outcome.results}
    assert statuses <= {"agrees", "diverges", "undetermined", "unsupported"}
    assert made.outcome.results
    assert made.outcome.unfinished > 0
    assert made.exit_code == 3
    assert f"ended before {made.outcome.unfinished} more" in running.said()
    assert "It was ended before" in (tmp_path / "out.html").read_text()
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"unfinished": 0}))
    with pytest.raises(SpecError, match="exit_code is 3 but what it holds comes to"):
        record.read(path)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_a_campaign_that_is_stopped_has_all_that_was_done_before(after):
    jobs = check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-full", "bert-peaked"])
    done = []
    report = conduct(
        jobs,
        [toy("NumpyBackend")],
        Setup(threads=1, repeat=2),
        lambda name, now: done.append(now) if now in {job.name for job in jobs} else None,
        lambda: len(done) >= after,
    )
    assert len(report.results) >= (after + 1) // 2
    assert all(result.status == "agrees" for result in report.results)
    whole = sum(result.times == 2 for result in report.results)
    assert report.unfinished == len(jobs) - whole
    assert report.exit_code == (3 if report.unfinished else 0)
    assert "ended before" in summary(report) or not report.unfinished
    assert "It was ended before" in page(record.made(report, "check")) or not report.unfinished


def test_no_cause_is_looked_for_once_a_campaign_is_stopped():
    jobs = check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-full"])
    wrong, done = toy("WrongAfterTheFirstLayer"), []

    def progress(name, now):
        done.append(now)
        time.sleep(2 * GLANCE)

    report = conduct(jobs, [wrong], Setup(threads=1), progress, lambda: jobs[0].name in done)
    assert ([one.status for one in report.results], report.unfinished) == (["diverges"], 1)
    assert report.results[0].verdict.judge is None


def test_mutants_that_are_stopped_keep_what_was_found(monkeypatch):
    chosen, done = matrix.chosen(None)[:7], []
    monkeypatch.setattr(
        matrix.Hunt, "find", lambda hunt, mutant: matrix.Finding(mutant.name, hunt.backend, "found")
    )

    def progress(backend, mutant):
        done.append(mutant)
        time.sleep(2 * GLANCE)  # that it is stopped is seen

    found = matrix.conduct({"torch": chosen}, Setup(), progress, lambda: len(done) >= 3)
    assert 3 <= len(found.findings) < 7
    assert (len(found.findings) + found.unfinished, found.exit_code) == (7, 3)
