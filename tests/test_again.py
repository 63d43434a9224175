"""Repeated runs reveal state that a backend carries over."""

from concord.conformance import Setup, check_jobs, conduct
from concord.conformance.run import record
from concord.conformance.run.standard_jobs import sequence
from tests.toys.surroundings import options, toy


def test_what_a_backend_carries_into_a_later_run_diverges_in_a_plain_check(entered):
    output, _ = entered(
        f"check --variant bert --dtype float32 --backend {toy('ShiftsAfterALongerText')}",
        *options("--case", ("bert-peaked", "bert-single")),
        ends=1,
    )
    assert "first at embeddings.position " in output
    when = "in run 2 of 2, after other cases had run; the first run agrees"
    assert f"diverges only when run again: {when}" in output


def conducted(toy_name, *cases):
    names = [f"bert-{case}" for case in ("ragged", *cases)]
    jobs = sequence(check_jobs(["bert"], ["float32"], cases=names))
    return conduct(jobs, [toy(toy_name)], Setup(threads=1))


def test_other_bits_in_a_later_run_are_no_failure_unless_they_are_asked_for():
    (result,) = conducted("AddsNoise").results
    assert result.status == "agrees"
    assert result.differing == ("layers.0.attention.query", "gradients.classifier.bias")


def test_what_is_judged_nowhere_when_it_is_run_again_does_not_agree():
    report = conducted("LosesGradients")
    (result,) = report.results
    assert (result.status, report.exit_code) == ("undetermined", 3)
    assert result.attribution == "is undetermined only when run again: in run 2 of 2; the first run agrees"


def test_all_cases_together_say_what_comes_only_with_another_run():
    report = conducted("AddsGradients", "peaked", "single")
    (conclusion,) = report.explained().conclusions
    words = "diverges only when run again: in run 2 of 2; the first run agrees"
    assert conclusion.text.endswith(f"bert-ragged {words}")
    assert next(result for result in report.results if result.case == "bert-ragged").attribution == words
    record.parsed(record.text(record.make_record(report, "check")).encode())
