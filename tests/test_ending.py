"""How a command ends that is not done: with a line and a code, never with that of a divergence."""

import json

from tests.toys.surroundings import toy

ONE_RUN = f"check --backend {toy('NumpyBackend')} --case bert-single --dtype float32 --threads 1"


def test_a_fault_of_concord_is_told_in_a_line(invoke, entered, monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError("of Concord\nin two lines")

    monkeypatch.setattr("concord.commands.check.check_jobs", fails)
    _, (said,) = entered(ONE_RUN, ends=3)
    assert said.startswith("concord: a bug in Concord: ZeroDivisionError: of Concord (test_ending.py:")
    monkeypatch.setenv("CONCORD_TRACEBACK", "1")
    assert "in fails" in "\n".join(invoke(ONE_RUN)[2])


def test_the_record_is_written_before_anything_is_shown(entered, tmp_path, monkeypatch):
    def fails(*arguments):
        raise RecursionError("of what shows it")

    monkeypatch.setattr("concord.conformance.report.show", fails)
    _, said = entered(f"{ONE_RUN} --json {tmp_path / 'out.json'}", ends=3)
    assert len(said) == 1
    assert [result["status"] for result in json.loads((tmp_path / "out.json").read_text())["results"]] == [
        "agrees"
    ]
