import json
import signal
import time

import pytest

import conformance.run.campaign
from concord.backends.pool import GLANCE
from concord.conformance import Setup, check_jobs, conduct
from concord.conformance.mutants import matrix
from concord.conformance.run import record
from concord.conformance.run.campaign import exit_code_of
from concord.conformance.run.report import summary
from concord.conformance.wording import counted
from concord.output_files import page
from tests.toys.running import Running, noted, until
from tests.toys.surroundings import errors, toy

RIGHT = toy("NumpyBackend")


@pytest.mark.parametrize(
    ("code", "runs"),
    [
        (0, "a agrees, b absent"),
        (0, "a agrees, a unsupported"),
        (1, "a diverges, a unsupported"),
        (3, ""),
        (3, "a unsupported"),
        (3, "a absent"),
        (3, "a agrees, b unsupported"),
        (3, "a agrees, a undetermined"),
        (3, "a agrees, a not judged"),
    ],
)
def test_runs_pass_only_if_each_backend_that_is_there_was_judged(code, runs):
    assert exit_code_of([run.split(" ", 1) for run in runs.split(", ") if run]) == code


def test_a_fault_of_concord_is_told_in_a_line_and_what_was_judged_is_kept(
    invoke, entered, tmp_path, monkeypatch
):
    def fails(*arguments):
        raise ZeroDivisionError("of Concord\nin two lines")

    monkeypatch.setattr("concord.conformance.run.report.show", fails)
    line = f"check --backend {RIGHT} --case bert-single --dtype float32 --threads 1"
    _, (message,) = entered(f"{line} --json {tmp_path / 'out.json'}", ends=3)
    assert message.startswith("concord: a bug in Concord: ZeroDivisionError: of Concord (test_exit_codes.py:")
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["status"] == "agrees"
    monkeypatch.setenv("CONCORD_TRACEBACK", "1")
    assert "in fails" in "\n".join(invoke(line)[2])


def test_a_fault_while_judging_is_concord_s_and_all_other_results_are_kept(monkeypatch):
    def judge(config, weights, batch, *more):
        if len(batch.required("labels")) == 1:
            raise AssertionError("of the judge\nin two lines")
        return right(config, weights, batch, *more)

    right = conformance.run.campaign.judge
    monkeypatch.setattr("concord.conformance.run.campaign.judge", judge)
    jobs = check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-single"])
    report = conduct(jobs, [RIGHT], Setup(threads=1))
    agreeing, unjudged = sorted(report.results, key=lambda result: result.status)
    assert (agreeing.status, unjudged.status, report.exit_code) == ("agrees", "not judged", 3)
    assert unjudged.detail == "a bug in Concord while judging: AssertionError: of the judge"
    assert "in judge" in unjudged.stderr
    document = record.make_record(report, "check")
    record.parsed(record.text(document).encode())
    assert "gave a result that a bug in Concord left unjudged in 1 of 2 runs" in page(document)


def test_what_was_judged_before_a_signal_is_kept_and_marked(tmp_path):
    # The tests of fuzz cover an interrupt.
    path = tmp_path / "out.json"
    line = f"check --variant bert --backend {toy('HangsAtTheThird')} --dtype float32 --threads 1"
    running = Running(tmp_path, line, "--json", path, "--html", tmp_path / "out.html")
    assert until(lambda: noted(running.notes, "hanging"))
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert errors(running.said()).splitlines()[-1] == "concord: ended by SIGTERM"
    assert running.files() == {"out.json", "out.html"}
    document = record.read(path)
    assert {result.status for result in document.outcome.results} == {"agrees"}
    assert document.outcome.unfinished > 0
    assert document.exit_code == running.process.returncode
    assert f"stopped with {counted(document.outcome.unfinished, 'run')} left" in running.said()
    assert "It was stopped with" in (tmp_path / "out.html").read_text()


class Done(list):
    """Progress of a campaign, with time to notice that it is stopped."""

    def __call__(self, name, now):
        self.append(now)
        time.sleep(2 * GLANCE)


@pytest.mark.parametrize("after", [1, 5])
def test_a_campaign_that_is_stopped_has_all_that_was_done_before(after):
    jobs = check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-full", "bert-peaked"])
    names, done = {job.name for job in jobs}, Done()
    report = conduct(
        jobs, [RIGHT], Setup(threads=1, repeat=2), done, lambda: sum(now in names for now in done) >= after
    )
    assert len(report.results) >= (after + 1) // 2
    assert all(result.status == "agrees" for result in report.results)
    assert report.unfinished == len(jobs) - sum(result.times == 2 for result in report.results)
    assert report.exit_code == (3 if report.unfinished else 0)
    assert ("stopped with" in summary(report)) == bool(report.unfinished)


def test_no_cause_is_looked_for_once_a_campaign_is_stopped():
    jobs = check_jobs(["bert"], ["float32"], cases=["bert-ragged", "bert-full"])
    wrong, done = toy("WrongAfterTheFirstLayer"), Done()
    report = conduct(jobs, [wrong], Setup(threads=1), done, lambda: jobs[0].name in done)
    assert ([result.status for result in report.results], report.unfinished) == (["diverges"], 1)
    assert report.results[0].verdict.judge is None


def test_mutants_that_are_stopped_keep_what_was_found(monkeypatch):
    mutants, done = matrix.select_mutants(None)[:7], Done()
    monkeypatch.setattr(
        matrix.Hunt, "find", lambda hunt, mutant: matrix.Finding(mutant.name, hunt.backend, "found")
    )
    result = matrix.conduct({"torch": mutants}, Setup(), done, lambda: len(done) >= 3)
    assert 3 <= len(result.findings) < 7
    assert (len(result.findings) + result.unfinished, result.exit_code) == (7, 3)
