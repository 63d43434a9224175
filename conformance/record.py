"""Results as data: the JSON that ``--json`` writes, that pages are made from, and that is read back into what was written (docs/guides/json.md)."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from concord.backends import machine
from concord.conformance import codec
from concord.conformance.campaign import Report
from concord.conformance.diagnosis import Diagnosis
from concord.conformance.estimate import R, Z
from concord.conformance.report import WORST_FIRST
from concord.conformance.verdict import Z_BINS, Judgement, Result, Row, Verdict
from concord.spec.errors import SpecError, located, optional, refuse
from concord.spec.files import read_json, write_text

SCHEMA = "concord.report/4"
SCHEMA_FILE = Path(__file__).parent / "report.schema.json"

OUTCOMES = {
    "check": "concord.conformance.campaign:Report",
    "golden": "concord.conformance.campaign:Report",
    "fuzz": "concord.conformance.fuzz.findings:Findings",
    "mutants": "concord.conformance.mutants.matrix:Matrix",
    "lockstep": "concord.conformance.lockstep.outcome:Lockstep",
}
"""What a record of each kind is read back into; those of other kinds stay data."""

STATUSES = ("agrees", "diverges", "undetermined", "undelivered")
"""What can become of a tensor."""

LIMITS: dict[str, Any] = {"z": Z, "rms": R, "bins": list(Z_BINS)}
"""What errors are measured by: the largest of an element and of a tensor, and the edges of histograms, in sigma."""


@dataclass(frozen=True)
class Document:
    """A record that was read.

    Attributes:
        kind: What wrote it: check, golden, fuzz, mutants, lockstep, criteria, speed or certificate.
        title: What was run, in words.
        written: When the record was made: ISO 8601, UTC.
        exit_code: What the command exits with: 0, 1 or 3.
        machine: The machine and the process that judged: ``concord``, ``python``, ``numpy`` (versions), ``system``, ``processor``, ``cores``.
        outcome: a :class:`Report`, ``Findings``, ``Matrix`` or ``Lockstep``; of other kinds the data itself.
    """

    kind: str
    title: str
    written: str
    exit_code: int
    machine: dict[str, Any]
    outcome: Any


@dataclass(frozen=True)
class Table:
    """The tensors of runs, which share a table if they have the same. Each list has an entry for each.

    Attributes:
        tensors: names, in the order of computation, gradients last.
        clauses: the clauses of SPEC.md that define them.
        axes: the names of their axes, separated by commas.
        sizes: how many elements they have.
    """

    tensors: list[str]
    clauses: list[str]
    axes: list[str]
    sizes: list[int]


@dataclass(frozen=True)
class Errors:
    """What is kept of every tensor of a run, judged in one way. Null: it was not judged so, or is undetermined.

    Attributes:
        z: the largest error of an element, in sigma.
        rms: the root mean square error, in root mean square sigma.
        histogram: how many elements err by less than the first edge of ``limits.bins``, by less than the second, and so on, and by the last or more. Zeros at the end are left out.
        independent: of how many elements the root mean square says something, where it is above ``limits.rms``; else 0. Absent if it is nowhere.
    """

    z: list[float | None]
    rms: list[float | None]
    histogram: list[list[int]]
    independent: list[float] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class Measures:
    """What is kept of every tensor, agreeing ones too: lists with an entry for each tensor of the table. Numbers have four significant digits.

    Attributes:
        status: what each came to: agrees, diverges, undetermined (the precision does not determine it) or undelivered (the backend has no such tensor, or says nothing of it).
        ratio: its error in tolerances by the judgement that decides: local where there is one.
        local: the error of each step; absent if no tensor was judged so.
        end_to_end: the error at each tensor from the inputs; absent if no tensor was judged so.
    """

    status: list[str]
    ratio: list[float]
    local: Errors | None = None
    end_to_end: Errors | None = None


@dataclass(frozen=True)
class StoredVerdict:
    """The judgement of one run.

    Attributes:
        worst: the largest error in tolerances, over all judged tensors.
        first_divergence: the first tensor beyond its tolerance, in the order of computation; absent if none is.
        diagnosis: what is known of it; absent where it was not judged locally.
        table: the place in ``tables`` of the tensors that ``measures`` speaks of.
        measures: what is kept of every tensor.
        tensors: the tensors that do not agree, in full; in a complete record all.
        undeclared: the deviation with whose declaration the run would not diverge; absent if there is none.
    """

    worst: float
    table: int
    measures: Measures
    first_divergence: str | None = None
    diagnosis: Diagnosis | None = None
    tensors: tuple[Row, ...] = ()
    undeclared: str = ""


@dataclass(frozen=True)
class StoredReport:
    """What a check, or a comparison with golden files, came to.

    Attributes:
        tables: the tensors of the runs.
    """

    tables: tuple[Table, ...] = ()


Key = tuple[tuple[str, str, str, int], ...]


# Writing.


def record(outcome: Any, kind: str, title: str = "", complete: bool = False) -> dict[str, Any]:
    """Return what a command came to as JSON data.

    Args:
        outcome: a :class:`Report`, ``Findings``, ``Matrix`` or ``Lockstep``; or data of another kind, with an exit code.
        kind: ``"check"``, ``"golden"``, ``"fuzz"``, ``"mutants"``, ``"lockstep"``, ``"criteria"``, ``"speed"`` or ``"certificate"``.
        title: what was run, in words.
        complete: whether to keep the full row of every tensor of a check; otherwise only of those that do not agree.
    """
    head = {
        "schema": SCHEMA,
        "kind": kind,
        "title": title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if isinstance(outcome, dict):
        return {**head, "machine": machine.describe(), **codec.plain(outcome)}
    body = _report(outcome, complete) if isinstance(outcome, Report) else codec.plain(outcome)
    return {**head, "exit_code": outcome.exit_code, "machine": machine.describe(), "limits": LIMITS, **body}


def _report(report: Report, complete: bool) -> dict[str, Any]:
    report = report.explained()
    tables: dict[Key, int] = {}
    results = [_result(result, tables, complete) for result in report.results]
    kept = [
        Table(*(list(column) for column in zip(*table, strict=True))) if table else Table([], [], [], [])
        for table in tables
    ]
    stored = StoredReport(tuple(kept))
    return {**codec.plain(dataclasses.replace(report, results=[])), **codec.plain(stored), "results": results}


def _result(result: Result, tables: dict[Key, int], complete: bool) -> dict[str, Any]:
    data: dict[str, Any] = codec.plain(dataclasses.replace(result, verdict=None))
    verdict = result.verdict
    if verdict is None:
        return data
    rows, short = verdict.table, [_short(row) for row in verdict.table]
    key = tuple((row.tensor, row.clause, ", ".join(row.axes), row.size) for row in rows)
    measures = Measures(
        [row.status for row in rows],
        [codec.short(row.ratio) for row in short],
        _errors([row.local for row in short]),
        _errors([row.end_to_end for row in short]),
    )
    stored = StoredVerdict(
        worst=codec.short(
            max((row.ratio for row in short if row.status in ("agrees", "diverges")), default=0.0)
        ),
        table=tables.setdefault(key, len(tables)),
        measures=measures,
        first_divergence=verdict.first_divergence.tensor if verdict.first_divergence else None,
        diagnosis=verdict.diagnosis,
        tensors=tuple(row for row in rows if complete or row.status != "agrees"),
        undeclared=verdict.undeclared,
    )
    return {**data, "verdict": codec.plain(stored)}


def _short(row: Row) -> Row:
    """Return a row with as many digits of its errors as are kept of every tensor."""

    def short(judgement: Judgement | None) -> Judgement | None:
        if judgement is None:
            return None
        independent = judgement.independent if judgement.rms > R else 0.0
        return dataclasses.replace(
            judgement,
            z=codec.short(judgement.z),
            rms=codec.short(judgement.rms),
            independent=codec.short(independent),
        )

    return dataclasses.replace(row, local=short(row.local), end_to_end=short(row.end_to_end))


def _errors(judgements: Sequence[Judgement | None]) -> Errors | None:
    """Return what is kept of one way of judging; None if no tensor was judged in that way."""
    if not any(judgements):
        return None
    judged = [
        judgement if judgement and judgement.status != "undetermined" else None for judgement in judgements
    ]
    return Errors(
        [one.z if one else None for one in judged],
        [one.rms if one else None for one in judged],
        [_without_trailing_zeros(one.histogram) if one else [] for one in judged],
        [one.independent if one else 0.0 for one in judged]
        if any(one and one.independent for one in judged)
        else [],
    )


def _without_trailing_zeros(counts: Sequence[int]) -> list[int]:
    filled = [place for place, count in enumerate(counts) if count]
    return list(counts[: filled[-1] + 1]) if filled else []


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON data to a file, whole or not at all.

    Raises:
        SpecError: if the file cannot be written.
    """
    write_text(path, text(data))


def text(data: dict[str, Any]) -> str:
    """Return data as JSON text, with a line for each entry of what is not a list of numbers."""
    return _text(codec.plain(data)) + "\n"


def _text(value: Any, indent: str = "", width: int = 0) -> str:
    """Return JSON text with an entry on each line; lists without objects in them, and what is not wider than ``width``, stay on one."""
    inner = indent + " "
    if width and len(flat := json.dumps(value, ensure_ascii=False)) <= width:
        return flat
    if isinstance(value, dict) and value:
        entries = [f"{inner}{json.dumps(key)}: {_text(entry, inner, width)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(inner + _text(entry, inner, width) for entry in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


# Reading.


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote.

    Raises:
        SpecError: if the file is missing, no JSON, of another schema, or does not keep to it.
    """
    data = read_json(path)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        older = isinstance(found, str) and re.fullmatch(r"concord\.(report/[1-3]|fuzz/\d|speed/\d)", found)
        raise SpecError(
            f"{path}: has schema {found!r} but must have {SCHEMA!r}; {'it was written by an older version' if older else 'it is what --json of this version writes'}"
        )
    with located(str(path)):
        refuse(problems(data)[: codec.MOST_PROBLEMS])
    return data  # type: ignore[no-any-return]  # an object: the schema says so


def document(data: Mapping[str, Any]) -> Document:
    """Return a record, as :func:`record` and :func:`read` return it, as the objects that were written."""
    head = {field.name: data[field.name] for field in dataclasses.fields(Document) if field.name != "outcome"}
    outcome = _outcome(data)
    if data["kind"] in OUTCOMES:
        confirm(data, outcome.exit_code)
    return Document(**head, outcome=outcome)


def confirm(data: Mapping[str, Any], exit_code: int) -> None:
    """Refuse a record that does not say what it comes to: a page and a command would say another thing than its results.

    Raises:
        SpecError: saying both.
    """
    if data["exit_code"] != exit_code:
        raise SpecError(f"exit_code is {data['exit_code']} but what it holds comes to {exit_code}")


def _outcome(data: Mapping[str, Any]) -> Any:
    kind = data["kind"]
    if kind not in OUTCOMES:
        return data
    if kind not in ("check", "golden"):
        return codec.restored(_class_of(kind), data)
    tables: list[Table] = codec.restored(list[Table], data.get("tables", []))
    report: Report = codec.restored(Report, {**data, "results": []})
    report.results = [_restored(result, tables) for result in data["results"]]
    return report


def _class_of(kind: str) -> Any:
    module, _, name = OUTCOMES[kind].partition(":")
    with optional(f"a record of concord {kind}", "fuzz"):
        return getattr(importlib.import_module(module), name)


def _restored(data: dict[str, Any], tables: Sequence[Table]) -> Result:
    result: Result = codec.restored(Result, {key: value for key, value in data.items() if key != "verdict"})
    if "verdict" not in data:
        return result
    stored: StoredVerdict = codec.restored(StoredVerdict, data["verdict"])
    table, measures, full = tables[stored.table], stored.measures, {row.tensor: row for row in stored.tensors}

    def judgement(errors: Errors | None, place: int) -> Judgement | None:
        if errors is None:
            return None
        if (z := errors.z[place]) is None:
            return Judgement("undetermined", size=table.sizes[place])
        histogram = errors.histogram[place] + [0] * (len(Z_BINS) + 1 - len(errors.histogram[place]))
        independent = errors.independent[place] if errors.independent else 0.0
        return Judgement(
            "agrees",
            z,
            errors.rms[place] or 0.0,
            size=table.sizes[place],
            independent=independent,
            histogram=tuple(histogram),
        )

    def row(place: int) -> Row:
        name, axes = table.tensors[place], tuple(filter(None, table.axes[place].split(", ")))
        judged = (judgement(measures.local, place), judgement(measures.end_to_end, place))
        return full.get(name) or Row(
            name, table.clauses[place], measures.status[place], *judged, "", table.sizes[place], axes
        )

    verdict = Verdict(
        [row(place) for place in range(len(table.tensors))], stored.diagnosis, stored.undeclared
    )
    if result.status != verdict.status and (result.status, verdict.status) not in {
        ("nondeterministic", "agrees"),
        ("nondeterministic", "undetermined"),
    }:
        raise SpecError(
            f"{result.case} of {result.backend} {result.status} but its tensors come to {verdict.status!r}"
        )
    return dataclasses.replace(result, verdict=verdict)


# What a record has to be.


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all records, made of the classes that they are read back into."""
    definitions: dict[str, Any] = {"number": codec.NUMBER}
    for kind in (
        Report,
        StoredReport,
        StoredVerdict,
        *(_class_of(kind) for kind in ("fuzz", "mutants", "lockstep")),
    ):
        codec.schema_of(kind, definitions)
    said = codec.meanings(Document)
    head = {
        "schema": {"description": "It changes when a key changes its meaning or goes away.", "const": SCHEMA},
        **{
            name: {"description": said[name], **codec.schema_of(hint, definitions)}
            for name, hint in codec.hints_of(Document).items()
            if name != "outcome"
        },
    }
    config = {
        "description": "A configuration: the keys of a variant's TOML file.",
        "type": "object",
        "required": definitions["EncoderConfig"]["required"],
    }
    definitions["EncoderConfig"] = config
    definitions["Verdict"] = definitions.pop("StoredVerdict")
    definitions["Result"]["properties"]["status"]["enum"] = list(WORST_FIRST)
    definitions["Row"]["properties"]["status"]["enum"] = definitions["Measures"]["properties"]["status"][
        "items"
    ]["enum"] = list(STATUSES)
    report, layout = definitions.pop("Report"), definitions.pop("StoredReport")
    limits = {
        "description": "What errors are measured by, in sigma: z, the largest of an element; rms, of a tensor; bins, the edges of every histogram.",
        "type": "object",
    }
    bodies = {
        "check": report,
        "golden": report,
        "fuzz": definitions.pop("Findings"),
        "mutants": definitions.pop("Matrix"),
        "lockstep": definitions.pop("Lockstep"),
    }
    for kind, body in bodies.items():
        properties = {
            **head,
            "kind": {**head["kind"], "const": kind},
            "limits": limits,
            **body["properties"],
            **(layout["properties"] if body is report else {}),
        }
        definitions[kind] = {
            **body,
            "required": [*head, "limits", *body["required"]],
            "properties": properties,
        }
    for kind, guide in (
        ("criteria", "README.md"),
        ("speed", "docs/guides/speed.md"),
        ("certificate", "docs/guides/porting.md"),
    ):
        definitions[kind] = {
            "description": f"See {guide}.",
            "type": "object",
            "required": list(head),
            "properties": {**head, "kind": {**head["kind"], "const": kind}},
        }
    kinds = [{"$ref": f"#/$defs/{kind}"} for kind in (*bodies, "criteria", "speed", "certificate")]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A record of Concord", "description": "What --json writes. What is empty is left out.",
        "oneOf": kinds, "$defs": dict(sorted(definitions.items())),
    }  # fmt: skip


def schema_text() -> str:
    """Return the schema as it stands in :data:`SCHEMA_FILE`."""
    return _text(schema(), width=300) + "\n"


@cache
def _schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return found


def problems(data: Any) -> list[str]:
    """Return where a record departs from its schema, or from itself: one line each."""
    kinds = [entry["$ref"].rpartition("/")[2] for entry in _schema()["oneOf"]]
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in kinds:
        return [f"kind is {kind!r} but must be one of {', '.join(map(repr, kinds))}"]
    return list(codec.departures(data, {"$ref": f"#/$defs/{kind}", "$defs": _schema()["$defs"]})) or list(
        _contradictions(data)
    )


def _contradictions(data: dict[str, Any]) -> Iterator[str]:
    """Yield where a record that keeps to the schema contradicts itself: in what no schema can say."""
    if "limits" in data and data["limits"] != LIMITS:
        yield f"limits are {data['limits']} but this version judges by {LIMITS}"
    if data["kind"] not in ("check", "golden"):
        return
    tables = data.get("tables", [])
    lengths = [len(table["tensors"]) for table in tables]
    yield from (
        f"tables[{i}]: every list must have {lengths[i]} entries"
        for i, table in enumerate(tables)
        if {len(column) for column in table.values()} != {lengths[i]}
    )
    for place, result in enumerate(data["results"]):
        if (
            result["status"] in ("agrees", "diverges", "nondeterministic", "undetermined")
            and "verdict" not in result
        ):
            yield f"results[{place}] {result['status']} but lacks 'verdict'"
        if "verdict" not in result:
            continue
        verdict = result["verdict"]
        if not 0 <= verdict["table"] < len(tables):
            yield f"results[{place}].verdict.table is {verdict['table']} but there are {len(tables)} tables"
            continue
        measures = verdict["measures"]
        columns = [measures["status"], measures["ratio"]]
        columns += [column for way in ("local", "end_to_end") for column in measures.get(way, {}).values()]
        if any(len(column) != lengths[verdict["table"]] for column in columns):
            yield f"results[{place}].verdict.measures: every list must have {lengths[verdict['table']]} entries"


if __name__ == "__main__":  # what 'make schema' runs
    write_text(SCHEMA_FILE, schema_text())
