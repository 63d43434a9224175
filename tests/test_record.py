"""The JSON record: it keeps to its schema, is documented, comes back as it was, and refuses what departs from it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from concord.conformance import record
from concord.conformance.campaign import Report, Settings
from concord.conformance.comparison import Z_BINS
from concord.conformance.report import WORST_FIRST
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
def test_a_record_keeps_to_its_schema_and_comes_back_as_it_was(tmp_path: Path, name: str, complete: bool) -> None:
    data = record.record(REPORTS[name](), "check", name, complete)
    assert record.problems(data) == []
    path = tmp_path / "out.json"
    record.write(path, data)
    assert record.read(path) == data
    json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_a_record_from_before_a_key_was_added_is_still_read() -> None:
    data = json.loads(json.dumps(record.plain(record.record(reports.mixed(), "check", "everything"))))
    judgements = [row[way] for result in data["results"] for row in result.get("tensors", []) for way in ("local", "end_to_end") if row[way]]
    assert judgements
    for judgement in judgements:
        del judgement["independent"]
    assert record.problems(data) == []


def test_every_tensor_is_kept_in_short_and_those_that_do_not_agree_in_full(data: dict[str, Any]) -> None:
    wrong = next(result for result in data["results"] if result["backend"] == "my.plugin:Backend")
    names = data["tables"][wrong["table"]]["tensors"]
    assert names == [name for name, _ in reports.TENSORS]
    assert data["tables"][wrong["table"]]["clauses"] == [clause for _, clause in reports.TENSORS]
    measures = wrong["measures"]
    assert measures["status"][5] == "diverges"
    assert measures["ratio"][:6] == [0.1] * 5 + [500.0]
    assert measures["local"]["z"][5] == 8000.0
    assert measures["end_to_end"]["z"][4:] == [1.6, *[4000.0] * 6]
    assert [sum(counts) for counts in measures["local"]["spread"]] == [6] * len(names)
    assert all(counts[-1] for counts in measures["local"]["spread"])
    assert max(map(len, measures["local"]["spread"])) == len(Z_BINS) + 1
    (row,) = wrong["tensors"]
    assert (row["tensor"], row["element"], row["actual"], row["expected"], row["beyond"]) == ("layers.1.attention.scores", [0, 1], 500.5, 0.5, 1)
    assert (row["local"]["ratio"], row["end_to_end"]["ratio"]) == (500.0, 250.0)
    assert wrong["cause"] == {"hypothesis": "scale", "text": "The scores are too large by a factor of 1.001.", "confident": True}


def test_a_complete_record_keeps_all_in_full() -> None:
    data = record.record(reports.agreeing(), "check", complete=True)
    assert [len(result["tensors"]) for result in data["results"]] == [len(reports.TENSORS)] * 16
    assert [len(result["tensors"]) for result in record.record(reports.agreeing(), "check")["results"]] == [0] * 16


def test_what_was_not_judged_is_null(data: dict[str, Any]) -> None:
    half = next(result for result in data["results"] if result["backend"] == "half")
    assert half["measures"]["local"] is None
    assert set(half["measures"]["end_to_end"]["z"]) == {None}
    unlike = next(result for result in data["results"] if result["backend"] == "jax")
    assert [unlike["measures"]["local"][key][3] for key in ("z", "rms", "spread")] == [None] * 3
    assert unlike["measures"]["ratio"][3] == "inf"
    assert unlike["worst"] == "inf"


def test_runs_of_the_same_tensors_share_a_table(data: dict[str, Any]) -> None:
    assert len(data["tables"]) == 1
    assert {result["table"] for result in data["results"] if "table" in result} == {0}


@pytest.mark.parametrize("wrong", [None, 3])
def test_a_record_of_a_whole_check_is_of_a_sane_size(tmp_path: Path, wrong: int | None) -> None:
    record.write(tmp_path / "out.json", record.record(reports.large(wrong), "check"))
    assert (tmp_path / "out.json").stat().st_size < 3 * 2**20


# The schema says it all.


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every schema of an object that names its keys."""
    if "properties" in schema:
        yield schema
    for entry in [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), schema.get("items"), schema.get("additionalProperties")]:
        if isinstance(entry, dict):
            yield from objects(entry)


def test_the_schema_describes_every_key_and_the_guide_names_it() -> None:
    found = [(key, entry) for schema in objects(SCHEMA) for key, entry in schema["properties"].items()]
    assert len(found) > 60
    described = {name for name, entry in SCHEMA["$defs"].items() if "description" in entry}
    assert not [key for key, entry in found if "description" not in entry and entry.get("$ref", "").rpartition("/")[2] not in described]
    assert not [key for key, _ in found if f"`{key}`" not in GUIDE]


def test_the_schema_uses_only_words_that_are_checked() -> None:
    known = {"type", "const", "enum", "pattern", "required", "properties", "additionalProperties", "items", "$ref", "description", "title", "$schema", "$defs"}

    def words(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema
            for word, entry in schema.items():
                entries = entry.values() if word in ("properties", "$defs") else [entry] if word in ("items", "additionalProperties") else []
                for inner in entries:
                    yield from words(inner)

    assert set(words(SCHEMA)) <= known


def test_the_schema_knows_every_status() -> None:
    assert set(SCHEMA["$defs"]["result"]["properties"]["status"]["enum"]) == set(WORST_FIRST)


def test_every_key_that_has_to_be_there_is_described() -> None:
    assert not [key for schema in objects(SCHEMA) for key in schema.get("required", []) if key not in schema["properties"]]


def test_the_example_of_the_guide_keeps_to_the_schema(data: dict[str, Any]) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
    data["results"] = [json.loads(example)]
    data["tables"] = [{"tensors": ["attention.scores", "attention.masked_scores"], "clauses": ["ATT-4", "MSK-3"]}]
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
    "results of text": (lambda data: put(data, "none", "results"), "results is 'none' but must be of type array"),
    "a result of nobody": (lambda data: without(data, "results", 2, "backend"), "results[2] lacks 'backend'"),
    "a status that is none": (lambda data: put(data, "fine", "results", 0, "status"), "results[0].status is 'fine' but must be one of 'agrees'"),
    "a key too much": (lambda data: put(data, 1, "results", 0, "flavour"), "results[0] has an unknown key 'flavour'"),
    "truth for a number": (lambda data: put(data, True, "results", 0, "table"), "results[0].table is 'True' but must be of type integer"),
    "text for a number": (lambda data: put(data, "huge", "results", 0, "worst"), "results[0].worst is 'huge' but must match"),
    "text in a list of numbers": (lambda data: put(data, "huge", "results", 0, "measures", "local", "z", 3), "results[0].measures.local.z[3] is 'huge' but must match"),
    "another kind": (lambda data: put(data, "chekc", "kind"), "kind is 'chekc' but must be one of 'check', 'golden'"),
    "no such table": (lambda data: put(data, 7, "results", 0, "table"), "results[0].table is 7 but there are 1 tables"),
    "a list too short": (lambda data: without(data, "results", 0, "measures", "ratio", 0), "results[0].measures: every list must have 11 entries"),
    "a clause too few": (lambda data: without(data, "tables", 0, "clauses", 0), "tables[0]: as many clauses as tensors are needed"),
    "a verdict without measures": (lambda data: without(data, "results", 0, "measures"), "results[0] has a verdict but lacks 'measures'"),
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_departure_from_the_schema_is_refused_and_named(tmp_path: Path, data: dict[str, Any], name: str) -> None:
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
        ("[]", "has schema None but must have 'concord.report/3'"),
        ('{"schema": "concord.report/1"}', "has schema 'concord.report/1' but must have 'concord.report/3'"),
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
