import json
import re
import runpy
from dataclasses import replace

import pytest

from concord.conformance.judging.verdict import number
from concord.conformance.run import record
from tests.toys import reports
from tests.toys.surroundings import ROOT, concord, refusal, toy


def test_what_was_written_is_read_back(tmp_path):
    document, path = record.make_record(reports.mixed(), "check", "everything"), tmp_path / "out.json"
    record.write(path, document)
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    read = record.read(path)
    assert replace(read, outcome=None) == replace(document, outcome=None)
    for actual, expected in zip(read.outcome.results, document.outcome.results, strict=True):
        assert replace(actual, verdict=None) == replace(expected, verdict=None)
        if actual.verdict:
            assert actual.verdict.explanation == expected.verdict.explanation
            assert actual.verdict.first == expected.verdict.first


def test_the_reference_has_every_key_of_a_record_and_what_stands_at_its_field():
    page = runpy.run_path(str(ROOT / "docs/record_keys.py"))["tables"]()
    report = replace(reports.mixed(), environments={}, notes={})  # whose keys are anybody's
    written = set(re.findall(r'"(\w+)": ', json.dumps(record.plain(report))))
    assert len(written) >= 38
    assert written <= set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE))
    assert "| `z` | number | `0.0` | the largest error, in sigma; " in page


# Hides pydantic from Concord only, since Typer may need it.
BARE = """
import builtins
plain = builtins.__import__
def narrow(name, given=None, *rest, **more):
    given = given or more.get("globals") or {}
    if name.partition(".")[0].startswith("pydantic") and given.get("__name__", "").startswith("concord"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return plain(name, given, *rest, **more)
builtins.__import__ = narrow
"""


def test_a_machine_without_pydantic_writes_records(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BARE)
    line = f"check --case bert-single --dtype float32 --backend {toy('NumpyBackend')} --threads 1 --json"
    done = concord(line, tmp_path / "out.json", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr.count("Error")) == (0, 0)
    (result,) = record.read(tmp_path / "out.json").outcome.results
    assert result.status == "agrees"


# Invalid records are refused.


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("results.0.status", "fine", "'results[0].status' is 'fine' but must be one of 'div"),
        ("kind", "chekc", "kind is 'chekc' but must be one of 'check', 'golden', 'compare', 'fuzz'"),
        ("results.0.verdict", None, "results[0].status is 'agrees' but its tensors imply 'no"),
        (
            "results.0.verdict.table.0.status",
            "diverges",
            "results[0].status is 'agrees' but its tensors imply 'di",
        ),
        ("exit_code", 0, "exit_code is 0 but its contents imply 3"),
    ],
)
def test_what_cannot_be_is_refused_and_named(tmp_path, path, value, problem):
    data = entry = json.loads(record.text(record.make_record(reports.mixed(), "check")))
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in keys:
        entry = entry[key]
    entry[last] = value
    (tmp_path / "out.json").write_text(json.dumps(data))
    refused = refusal(record.read, tmp_path / "out.json")
    assert refused[0].startswith(f"{tmp_path / 'out.json'}: {problem}")


def test_runs_of_a_record_are_lines_with_their_largest_error_and_where(entered, tmp_path):
    path, table = tmp_path / "check.json", tmp_path / "runs.tsv"
    document = record.make_record(reports.mixed(), "check")
    record.write(path, document)
    entered(f"show report {path} --runs {table}", ends=document.exit_code)
    heading, *lines = (line.split("\t") for line in table.read_text().splitlines())
    for line, result in zip(lines, document.outcome.results, strict=True):
        run = dict(zip(heading, line, strict=True))
        row = result.first_divergence or (result.verdict and result.verdict.nearest)
        assert (run["case"], run["status"]) == (result.case, result.status)
        where = (row.tensor, number(row.ratio)) if row else ("", "")
        assert (run["tensor"], run["tolerances"]) == where
        assert result.detail in run["note"]


def test_a_table_is_left_as_it_is_if_runs_are_missing(refused, tmp_path):
    path, page = tmp_path / "check.json", tmp_path / "README.md"
    record.write(path, record.make_record(replace(reports.mixed(), unfinished=1), "check"))
    page.write_text("<!-- begin check -->\nas before\n<!-- end check -->\n")
    assert refused(f"show report {path} --markdown {page}") == [
        f"{path} is not complete: the --markdown table would lack runs"
    ]
    assert "as before" in page.read_text()


def test_a_record_without_runs_has_no_table_of_them(refused, tmp_path):
    path = ROOT / "conformance/results" / "fuzz-tf32.json"
    (line,) = refused(f"show report {path} --runs {tmp_path / 'runs.tsv'}")
    assert line == f"{path} is a record of fuzz, but --runs takes one of check, golden or compare"
    assert refused(f"show report {path}") == [
        "none of --html, --markdown and --runs is given but at least one is required"
    ]
