"""Records: writing of results as JSON, and reading (docs/reference/json.md)."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from concord.backends import machine
from concord.conformance.record_fields import Count, Unwritten
from concord.conformance.run.campaign import Report
from concord.spec.config import EncoderConfig
from concord.spec.errors import SpecError, located, optional, refuse
from concord.spec.files import LARGEST, parse_json, read_bytes, typed, write_text

SCHEMA: Final = "concord.report/6"

# Exit codes above it belong to commands that a signal stopped.
SIGNALLED = 128

# Outcome classes by kind.
KINDS = {
    "check": "concord.conformance.run.campaign:Report",
    "golden": "concord.conformance.run.campaign:Report",
    "compare": "concord.conformance.run.campaign:Report",
    "fuzz": "concord.conformance.fuzz.findings:Findings",
    "mutants": "concord.conformance.mutants.matrix:Matrix",
    "lockstep": "concord.conformance.lockstep.outcome:Lockstep",
}


@dataclass(frozen=True)
class Record:
    """The outcome of a command.

    Attributes:
        kind: check, golden, compare, fuzz, mutants, lockstep, speed, attention or certificate.
        title: description of the run.
        written: creation time in ISO 8601, UTC.
        exit_code: exit code of the command: 0, 1 or 3, or 128 plus the number of the signal that stopped it.
        machine: the judging machine and process.
        schema: version, which increases if a key changes its meaning or disappears.
        outcome: an object of the kind's class.
    """

    kind: str
    title: str
    written: str
    exit_code: Count
    machine: dict[str, str | int | float | None]
    schema: Literal["concord.report/6"]
    outcome: Unwritten = None


def make_record(outcome: Any, kind: str, title: str = "") -> Record:
    """A record of an outcome."""
    if isinstance(outcome, Report):
        outcome = outcome.explained()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    exit_code = outcome["exit_code"] if isinstance(outcome, dict) else outcome.exit_code
    return Record(kind, title, now, exit_code, machine.describe(), SCHEMA, outcome)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    factories = {
        field.name: field.default_factory for field in fields(kind) if field.default_factory is not MISSING
    }
    return {
        field.name: factories[field.name]() if field.name in factories else field.default
        for field in fields(kind)
        if field.type != "Unwritten"
    }


def plain(value: Any) -> Any:
    """Convert a value to JSON types, without defaults."""
    # Without pydantic, which some measuring machines lack.
    if isinstance(value, EncoderConfig):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        kept = {
            name: plain(entry)
            for name, default in _defaults(type(value)).items()
            if (entry := getattr(value, name)) != default
        }
        return value.as_written(kept) if hasattr(value, "as_written") else kept
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def data(record: Record) -> dict[str, Any]:
    """Fields of a record and its outcome."""
    return {"schema": record.schema, **plain(record), **plain(record.outcome)}


def text(record: Record) -> str:
    """A record as JSON."""
    return lines(data(record))


def lines(value: Any) -> str:
    """Data as JSON, one entry per line."""
    return _lines(value, "") + "\n"


def _lines(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, Mapping):
        entries = [f"{json.dumps(_scalar(key))}: {_lines(entry, inner)}" for key, entry in value.items()]
        if not indent or any(map(_deep, value.values())):
            return "{\n" + ",\n".join(inner + entry for entry in entries) + f"\n{indent}}}"
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, (list, tuple)):
        entries = [_lines(entry, inner) for entry in value]
        if _deep(value):
            return "[\n" + ",\n".join(inner + entry for entry in entries) + f"\n{indent}]"
        return f"[{','.join(entries)}]"
    return json.dumps(_scalar(value), allow_nan=False)


def _deep(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and any(map(_deep, value)))


def _scalar(value: Any) -> Any:
    # JSON has no infinity or NaN.
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, str) and not value.isascii():  # a file name may be invalid text
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_text(path, text(record))


def read(path: Path, kinds: Mapping[str, str] = KINDS) -> Record:
    """Read a record from a file.

    Args:
        kinds: classes of accepted kinds.

    Raises:
        SpecError: if the file is missing, malformed, of a wrong schema or kind, or inconsistent.
    """
    content = read_bytes(path, LARGEST)
    parse_json(content, str(path))
    with located(str(path)):
        return parsed(content, kinds)


def parsed(content: bytes, kinds: Mapping[str, str] = KINDS) -> Record:
    """Parse a record's JSON."""
    contents = json.loads(content)
    schema, kind = (contents.get(key) if isinstance(contents, dict) else None for key in ("schema", "kind"))
    if schema != SCHEMA:
        raise SpecError(
            f"has schema {schema!r} but must have {SCHEMA!r}, which --json of this version writes"
        )
    if not isinstance(kind, str) or kind not in kinds:
        raise SpecError(f"kind is {kind!r} but must be one of {', '.join(map(repr, kinds))}")
    with optional(f"a record of concord {kind}", "fuzz"):
        outcome = typed(pkgutil.resolve_name(kinds[kind]), content)
    record = replace(typed(Record, content), outcome=outcome)
    # A record may have been edited: statuses must follow from tensors, and the exit code from statuses,
    # unless a signal gave it.
    refuse(list(getattr(outcome, "contradictions", list)()))
    if not isinstance(outcome, dict) and SIGNALLED > record.exit_code != outcome.exit_code:
        raise SpecError(f"exit_code is {record.exit_code} but its contents imply {outcome.exit_code}")
    return record
