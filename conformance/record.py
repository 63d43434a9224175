"""Results as data: the JSON that ``--json`` writes and that a page is made from (docs/guides/json.md, report.schema.json)."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from concord.backends import machine
from concord.conformance.campaign import Report, Result
from concord.conformance.comparison import Z_BINS, Judgement, Row, Verdict
from concord.conformance.tolerance import R, Z
from concord.spec.errors import SpecError
from concord.spec.files import read_json, write_text

SCHEMA = "concord.report/3"
SCHEMA_FILE = Path(__file__).parent / "report.schema.json"
DIGITS = 4
"""Significant digits of what is kept of every tensor. The rows of tensors that do not agree keep all."""


def record(report: Report, kind: str, title: str = "", complete: bool = False) -> dict[str, Any]:
    """Return a report as JSON data.

    Args:
        kind: ``"check"`` or ``"golden"``.
        title: what was run, in words.
        complete: whether to keep the full row of every tensor; otherwise only of those that do not agree.
    """
    tables: dict[tuple[tuple[str, str], ...], int] = {}
    _ = report.conclusions  # which revise what each result says by itself
    results = [_result(result, tables, complete) for result in report.results]
    data = {
        "schema": SCHEMA,
        "kind": kind,
        "title": title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "exit_code": report.exit_code,
        "seconds": report.seconds,
        "machine": machine.describe(),
        "settings": dataclasses.asdict(report.settings),
        "limits": {"z": Z, "rms": R, "bins": Z_BINS},
        "backends": report.environments,
        "notes": report.notes,
        "tables": [{"tensors": [name for name, _ in table], "clauses": [clause for _, clause in table]} for table in tables],
        "results": results,
    }
    done: dict[str, Any] = plain(data)
    return done


def _result(result: Result, tables: dict[tuple[tuple[str, str], ...], int], complete: bool) -> dict[str, Any]:
    data: dict[str, Any] = {key: getattr(result, key) for key in ("backend", "group", "case", "part", "dtype", "status", "detail", "seconds")}
    if result.verdict:
        rows = result.verdict.table
        data["worst"] = result.worst
        data["first_divergence"] = result.first_divergence.tensor if result.first_divergence else None
        data["cause"] = _cause(result.verdict)
        if result.verdict.diagnosis:
            data["diagnosis"] = result.verdict.diagnosis.as_dict()
        data["table"] = tables.setdefault(tuple((row.tensor, row.clause) for row in rows), len(tables))
        data["measures"] = {
            "status": [row.status for row in rows],
            "ratio": [_short(row.ratio) for row in rows],
            "local": _measures([row.local for row in rows]),
            "end_to_end": _measures([row.end_to_end for row in rows]),
        }
        data["tensors"] = [_row(row) for row in rows if complete or row.status != "agrees"]
    if result.attribution:
        data["attribution"] = result.attribution
    if result.repeats:
        data["repeats"] = {"times": result.repeats.times, "equal": result.repeats.equal, "differing": result.repeats.differing}
    if result.stderr:
        data["stderr"] = result.stderr
    return data


def _cause(verdict: Verdict) -> dict[str, Any] | None:
    cause = verdict.cause if verdict.first_divergence else None
    return {key: getattr(cause, key) for key in ("hypothesis", "text", "confident")} if cause else None


def _measures(judgements: Sequence[Judgement | None]) -> dict[str, list[Any]] | None:
    """Return what is kept of one way of judging, tensor by tensor; None if no tensor was judged in that way."""
    if not any(judgements):
        return None

    def column(value: Callable[[Judgement], Any]) -> list[Any]:
        return [value(judgement) if judgement and judgement.status != "undetermined" else None for judgement in judgements]

    return {
        "z": column(lambda judgement: _short(judgement.z)),
        "rms": column(lambda judgement: _short(judgement.rms)),
        "spread": column(lambda judgement: _without_trailing_zeros(judgement.spread)),
    }


def _row(row: Row) -> dict[str, Any]:
    keys = ("tensor", "clause", "status", "ratio", "element", "actual", "expected", "tolerance", "beyond", "size", "note")
    judged = {name: _judgement(getattr(row, name)) for name in ("local", "end_to_end")}
    return {**{key: getattr(row, key) for key in keys}, **judged}


def _judgement(judgement: Judgement | None) -> dict[str, Any] | None:
    if judgement is None:
        return None
    keys = ("status", "z", "rms", "ratio", "element", "actual", "expected", "sigma", "beyond", "independent", "note")
    return {key: getattr(judgement, key) for key in keys}


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _without_trailing_zeros(counts: Sequence[int]) -> list[int]:
    filled = [place for place, count in enumerate(counts) if count]
    return list(counts[: filled[-1] + 1]) if filled else []


def plain(value: Any) -> Any:
    """Return data as JSON would give it back: lists, keys of text, and text for what it has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def write(path: Path, data: dict[str, Any]) -> None:
    """Write JSON data to a file, whole or not at all.

    Raises:
        SpecError: if the file cannot be written.
    """
    write_text(path, _text(plain(data)) + "\n")


def _text(value: Any, indent: str = "") -> str:
    """Return JSON text with an entry on each line; lists without objects in them stay on one."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        entries = [f"{inner}{json.dumps(key)}: {_text(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(inner + _text(entry, inner) for entry in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def read(path: Path) -> dict[str, Any]:
    """Read what :func:`write` wrote.

    Raises:
        SpecError: if the file is missing, no JSON, of another schema, or does not keep to it.
    """
    data = read_json(path)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise SpecError(f"{path}: has schema {found!r} but must have {SCHEMA!r}; it is what --json of this version writes")
    wrong = problems(data)
    if wrong:
        raise SpecError([f"{path}: {problem}" for problem in wrong[:10]])
    return data  # type: ignore[no-any-return]  # an object: the schema says so


def problems(data: Any) -> list[str]:
    """Return where a record departs from its schema, or from itself: one line each."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return list(_departures(data, schema, schema["$defs"], "")) or list(_contradictions(data))


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def _departures(value: Any, schema: dict[str, Any], definitions: dict[str, Any], where: str) -> Iterator[str]:
    """Yield where a value departs from a JSON Schema, of which this knows the words that report.schema.json uses."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    types = schema.get("type", [])
    allowed = [types] if isinstance(types, str) else types
    if allowed and not any(isinstance(value, TYPES[name]) and isinstance(value, bool) <= (name == "boolean") for name in allowed):
        yield f"{where or 'it'} is {str(value)[:40]!r} but must be of type {' or '.join(allowed)}"
    elif "const" in schema and value != schema["const"]:
        yield f"{where} is {value!r} but must be {schema['const']!r}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r} but must be one of {', '.join(map(repr, schema['enum']))}"
    elif "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{where} is {value!r} but must match {schema['pattern']}"
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{where or 'it'} lacks {key!r}" for key in schema.get("required", []) if key not in value)
        for key, entry in value.items():
            if key not in known and others is False:
                yield f"{where or 'it'} has an unknown key {key!r}"
            elif key in known or isinstance(others, dict):
                yield from _departures(entry, known.get(key, others), definitions, f"{where}.{key}" if where else key)
    elif isinstance(value, list) and "items" in schema:
        for place, entry in enumerate(value):
            yield from _departures(entry, schema["items"], definitions, f"{where}[{place}]")


def _contradictions(data: dict[str, Any]) -> Iterator[str]:
    """Yield where a record that keeps to the schema contradicts itself: in what no schema can say."""
    tables = data["tables"]
    lengths = [len(table["tensors"]) for table in tables]
    yield from (f"tables[{i}]: as many clauses as tensors are needed" for i, table in enumerate(tables) if len(table["clauses"]) != lengths[i])
    for place, result in enumerate(data["results"]):
        if result["status"] in ("agrees", "diverges", "nondeterministic", "undetermined") and "measures" not in result:
            yield f"results[{place}] has a verdict but lacks 'measures'"
        if "measures" not in result:
            continue
        if not 0 <= result["table"] < len(tables):
            yield f"results[{place}].table is {result['table']} but there are {len(tables)} tables"
            continue
        measures = result["measures"]
        columns = [measures["status"], measures["ratio"]]
        columns += [column for kind in ("local", "end_to_end") for column in (measures[kind] or {}).values()]
        if any(len(column) != lengths[result["table"]] for column in columns):
            yield f"results[{place}].measures: every list must have {lengths[result['table']]} entries"
