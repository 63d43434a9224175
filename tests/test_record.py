"""The JSON record: it keeps to its schema, is documented, comes back as it was, and refuses what departs from it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from concord.conformance import codec, record
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.campaign import Report, Settings
from concord.conformance.fuzz import Failure, Findings, Plan, sample
from concord.conformance.fuzz.findings import Origin
from concord.conformance.mutants.matrix import Finding, Matrix
from concord.conformance.report import WORST_FIRST
from concord.conformance.verdict import Z_BINS, Judgement, Row, Verdict
from concord.spec.errors import SpecError
from tests.toys import reports
from tests.toys.surroundings import ROOT

GUIDE = (ROOT / "docs/guides/json.md").read_text()
SCHEMA = json.loads(record.SCHEMA_FILE.read_text())


@pytest.fixture
def data() -> dict[str, Any]:
    return record.record(reports.mixed(), "check", "everything")


REPORTS: dict[str, Callable[[], Report]] = {
    "everything": reports.mixed,
    "agreement": reports.agreeing,
    "nothing": lambda: Report([], {}, Settings()),
}


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", REPORTS)
def test_a_record_keeps_to_its_schema_and_comes_back_as_it_was(
    tmp_path: Path, name: str, complete: bool
) -> None:
    data = record.record(REPORTS[name](), "check", name, complete)
    assert record.problems(data) == []
    path = tmp_path / "out.json"
    record.write(path, data)
    assert record.read(path) == data
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_an_older_record_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text('{"schema": "concord.fuzz/2"}')
    with pytest.raises(
        SpecError,
        match=re.escape(
            "'concord.fuzz/2' but must have 'concord.report/4'; it was written by an older version"
        ),
    ):
        record.read(tmp_path / "out.json")


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_read_back_into_the_objects_that_were_written(name: str, complete: bool) -> None:
    report = REPORTS[name]()
    read = record.document(through_json(record.record(report, "check", name, complete)))
    assert (read.kind, read.title, read.exit_code) == ("check", name, report.exit_code)
    assert again(read, complete) == through_json(record.record(report, "check", name, complete))
    outcome = read.outcome
    assert (outcome.settings, outcome.seconds, outcome.notes, outcome.environments) == (
        report.settings,
        report.seconds,
        report.notes,
        report.environments,
    )
    assert outcome.conclusions == report.conclusions
    for result, written in zip(outcome.results, report.results, strict=True):
        assert dataclasses.replace(result, verdict=None) == dataclasses.replace(written, verdict=None)
        table, kept = (one.verdict.table if one.verdict else [] for one in (result, written))
        assert [(row.tensor, row.clause, row.status, row.size, row.axes) for row in table] == [
            (row.tensor, row.clause, row.status, row.size, row.axes) for row in kept
        ]
        assert [
            str(row) for row, old in zip(table, kept, strict=True) if complete or old.status != "agrees"
        ] == [str(row) for row in kept if complete or row.status != "agrees"]


def through_json(data: Any) -> Any:
    """Return data as a file gives it back, without when it was written."""
    return {
        key: value for key, value in json.loads(json.dumps(codec.plain(data))).items() if key != "written"
    } | {"written": ""}


def again(read: record.Document, complete: bool = False) -> Any:
    """Return what was read as it is written anew."""
    return through_json(record.record(read.outcome, read.kind, read.title, complete))


def test_findings_of_random_cases_are_read_back_into_the_objects_that_were_written() -> None:
    first, second = sample(Plan(names=()), [0, 1])
    row = reports.row("logits", "HED-3", 7.0)
    judged = Judgement("agrees", 2.0, 0.5, size=6, histogram=tuple(range(len(Z_BINS) + 1)))
    findings = Findings(
        cases=2,
        seconds=3.5,
        notes=["jax is absent"],
        environments={"torch": {"version": "2.0"}},
        plan=Plan(names=("torch",), seed=7),
        folders={"torch-7-1": "out"},
    )
    findings.tally("torch", "float32").add(
        "agrees", Verdict([Row("logits", "HED-3", "agrees", judged)]), Origin(7, 0), first
    )
    findings.tally("my.module:Backend", "bfloat16").add("crashed", None, Origin(7, 1), second)
    findings.failures.append(
        Failure(
            ("torch", "diverges", "logits"),
            "float32",
            "logits",
            "",
            7.0,
            ("words",),
            first,
            second,
            Origin(7, 1),
            3,
            2,
            row,
        )
    )
    data = through_json(record.record(findings, "fuzz", "random"))
    assert record.problems(data) == []
    read = record.document(data)
    assert read.outcome == findings
    assert again(read) == data


def test_findings_of_mutants_are_read_back_into_the_objects_that_were_written() -> None:
    found = Finding(
        "gelu_quick",
        "torch",
        "found",
        "layers.0.feed_forward.activation",
        math.inf,
        "bert-ragged",
        "float64",
        row=reports.row("logits", "HED-3", 7.0),
    )
    matrix = Matrix(
        [found, Finding("gelu_quick", "jax", "absent", detail="not installed")], ("torch",), {"torch": "2.0"}
    )
    data = through_json(record.record(matrix, "mutants"))
    assert record.problems(data) == []
    assert data["mutants"]["gelu_quick"]["what"] == BUGS["gelu_quick"].what
    read = record.document(data)
    assert read.outcome == matrix
    assert again(read) == data


def test_every_record_of_the_repository_is_read_back() -> None:
    paths = sorted((ROOT / "conformance/results").glob("*.json"))
    assert len(paths) > 8
    for path in paths:
        data = record.read(path)
        read = record.document(data)
        if read.kind == "fuzz":
            assert {**again(read), "machine": data["machine"]} == {**data, "written": ""}
            assert read.outcome.exit_code == data["exit_code"]


def test_every_tensor_is_kept_in_short_and_those_that_do_not_agree_in_full(data: dict[str, Any]) -> None:
    wrong = next(result for result in data["results"] if result["backend"] == "my.plugin:Backend")["verdict"]
    table = data["tables"][wrong["table"]]
    assert (table["tensors"], table["clauses"]) == (
        [name for name, _ in reports.TENSORS],
        [clause for _, clause in reports.TENSORS],
    )
    measures = wrong["measures"]
    assert measures["status"][5] == "diverges"
    assert measures["ratio"][:6] == [0.1] * 5 + [500.0]
    assert measures["local"]["z"][5] == 8000.0
    assert measures["end_to_end"]["z"][4:] == [1.6, *[4000.0] * 6]
    assert [sum(counts) for counts in measures["local"]["histogram"]] == [6] * len(reports.TENSORS)
    assert all(counts[-1] for counts in measures["local"]["histogram"])
    assert max(map(len, measures["local"]["histogram"])) == len(Z_BINS) + 1
    (row,) = wrong["tensors"]
    assert (row["tensor"], row["element"], row["actual"], row["expected"], row["beyond"]) == (
        "layers.1.attention.scores",
        [0, 1],
        500.5,
        0.5,
        1,
    )
    assert (row["local"]["ratio"], row["end_to_end"]["ratio"]) == (500.0, 250.0)
    assert row["local"]["breakdown"]["worst"][0] == {
        "index": [0, 1],
        "actual": 500.5,
        "expected": 0.5,
        "tolerance": 1.0,
    }
    assert "breakdown" not in row["end_to_end"]
    assert wrong["diagnosis"]["cause"] == {
        "hypothesis": "scale",
        "text": "The scores are too large by a factor of 1.001.",
        "confident": True,
    }


def test_a_complete_record_keeps_all_in_full() -> None:
    data = record.record(reports.agreeing(), "check", complete=True)
    assert [len(result["verdict"]["tensors"]) for result in data["results"]] == [len(reports.TENSORS)] * 16
    assert not [
        "tensors"
        for result in record.record(reports.agreeing(), "check")["results"]
        if "tensors" in result["verdict"]
    ]


def test_what_was_not_judged_is_null(data: dict[str, Any]) -> None:
    half = next(result for result in data["results"] if result["backend"] == "half")["verdict"]
    assert "local" not in half["measures"]
    assert set(half["measures"]["end_to_end"]["z"]) == {None}
    unlike = next(result for result in data["results"] if result["backend"] == "jax")["verdict"]
    assert [unlike["measures"]["local"][key][3] for key in ("z", "rms", "histogram")] == [None, None, []]
    assert unlike["measures"]["ratio"][3] == "inf"
    assert unlike["worst"] == "inf"


def test_runs_of_the_same_tensors_share_a_table(data: dict[str, Any]) -> None:
    assert len(data["tables"]) == 1
    assert {result["verdict"]["table"] for result in data["results"] if "verdict" in result} == {0}


@pytest.mark.parametrize("wrong", [None, 3])
def test_a_record_of_a_whole_check_is_of_a_sane_size(tmp_path: Path, wrong: int | None) -> None:
    record.write(tmp_path / "out.json", record.record(reports.large(wrong), "check"))
    assert (tmp_path / "out.json").stat().st_size < 3 * 2**20


# The schema says it all.


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every schema of an object that names its keys."""
    if "properties" in schema:
        yield schema
    for entry in [
        *schema.get("properties", {}).values(),
        *schema.get("$defs", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ]:
        if isinstance(entry, dict):
            yield from objects(entry)


def test_the_schema_is_that_of_the_classes_and_describes_every_key() -> None:
    assert record.SCHEMA_FILE.read_text() == record.schema_text(), "run: python -m concord.conformance.record"
    found = [(key, entry) for schema in objects(SCHEMA) for key, entry in schema["properties"].items()]
    assert len(found) > 150
    assert not [key for key, entry in found if not entry.get("description")]


def test_the_guide_names_every_key_of_a_check() -> None:
    found = {
        key
        for name in ("check", "Result", "Verdict", "Row", "Judgement", "Breakdown")
        for key in SCHEMA["$defs"][name]["properties"]
    }
    assert not [key for key in found if f"`{key}`" not in GUIDE]


def test_the_schema_uses_only_words_that_are_checked() -> None:
    known = {
        "type",
        "const",
        "enum",
        "pattern",
        "required",
        "properties",
        "additionalProperties",
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "anyOf",
        "oneOf",
        "$ref",
        "description",
        "title",
        "$schema",
        "$defs",
    }

    def words(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema
            for word, entry in schema.items():
                entries = (
                    entry.values()
                    if word in ("properties", "$defs")
                    else [entry]
                    if word in ("items", "additionalProperties")
                    else []
                )
                for inner in entries:
                    yield from words(inner)

    assert set(words(SCHEMA)) <= known


def test_the_schema_knows_every_status() -> None:
    assert set(SCHEMA["$defs"]["Result"]["properties"]["status"]["enum"]) == set(WORST_FIRST)


def test_every_key_that_has_to_be_there_is_described() -> None:
    assert not [
        key
        for schema in objects(SCHEMA)
        for key in schema.get("required", [])
        if key not in schema["properties"]
    ]


def test_the_example_of_the_guide_keeps_to_the_schema(data: dict[str, Any]) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    data["results"] = [json.loads(example)]
    data["tables"] = [
        {
            "tensors": ["attention.scores", "attention.masked_scores"],
            "clauses": ["ATT-4", "MSK-3"],
            "axes": ["batch, heads, query, key"] * 2,
            "sizes": [660, 660],
        }
    ]
    assert record.problems(data) == []


# What departs from it is refused.


def without(data: dict[str, Any], *path: Any) -> None:
    *folder, last = path
    for key in folder:
        data = data[key]
    del data[last]


def put(data: dict[str, Any], value: Any, *path: Any) -> None:
    *folder, last = path
    for key in folder:
        data = data[key]
    data[last] = value


DEPARTURES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no results": (lambda data: without(data, "results"), "it lacks 'results'"),
    "results of text": (
        lambda data: put(data, "none", "results"),
        "results is 'none' but must be of type array",
    ),
    "a result of nobody": (lambda data: without(data, "results", 2, "backend"), "results[2] lacks 'backend'"),
    "a status that is none": (
        lambda data: put(data, "fine", "results", 0, "status"),
        "results[0].status is 'fine' but must be one of 'diverges'",
    ),
    "a key too much": (
        lambda data: put(data, 1, "results", 0, "flavour"),
        "results[0] has an unknown key 'flavour'",
    ),
    "truth for a number": (
        lambda data: put(data, True, "results", 0, "verdict", "table"),
        "results[0].verdict.table is 'True' but must be of type integer",
    ),
    "text for a number": (
        lambda data: put(data, "huge", "results", 0, "verdict", "worst"),
        "results[0].verdict.worst is 'huge' but must match",
    ),
    "text in a list of numbers": (
        lambda data: put(data, "huge", "results", 0, "verdict", "measures", "local", "z", 3),
        "results[0].verdict.measures.local.z[3] is 'huge' but must match",
    ),
    "another kind": (
        lambda data: put(data, "chekc", "kind"),
        "kind is 'chekc' but must be one of 'check', 'golden', 'fuzz'",
    ),
    "other limits": (lambda data: put(data, 8.0, "limits", "z"), "limits are {'z': 8.0"),
    "no such table": (
        lambda data: put(data, 7, "results", 0, "verdict", "table"),
        "results[0].verdict.table is 7 but there are 1 tables",
    ),
    "a list too short": (
        lambda data: without(data, "results", 0, "verdict", "measures", "ratio", 0),
        "results[0].verdict.measures: every list must have 11 entries",
    ),
    "a clause too few": (
        lambda data: without(data, "tables", 0, "clauses", 0),
        "tables[0]: every list must have 11 entries",
    ),
    "no verdict": (
        lambda data: without(data, "results", 0, "verdict"),
        "results[0] agrees but lacks 'verdict'",
    ),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_departure_from_the_schema_is_refused_and_named(
    tmp_path: Path, data: dict[str, Any], name: str
) -> None:
    change, problem = DEPARTURES[name]
    changed = copy.deepcopy(data)
    change(changed)
    (tmp_path / "out.json").write_text(json.dumps(changed))
    with pytest.raises(SpecError) as refused:
        record.read(tmp_path / "out.json")
    assert refused.value.problems[0].startswith(f"{tmp_path / 'out.json'}: {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not valid JSON"),
        ("[]", "has schema None but must have 'concord.report/4'"),
        ('{"schema": "concord.report/1"}', "has schema 'concord.report/1' but must have 'concord.report/4'"),
        ("\udcff", "not valid JSON"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "out.json").write_text(text, errors="surrogateescape")
    with pytest.raises(SpecError, match=re.escape(f"out.json: {problem}")):
        record.read(tmp_path / "out.json")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"out\.json: no such file"):
        record.read(tmp_path / "out.json")
    with pytest.raises(SpecError, match="cannot be read: is a folder but must be a regular file"):
        record.read(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "out.json").mkdir()
    with pytest.raises(SpecError, match="cannot be written"):
        record.write(tmp_path / "out.json", data)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
