"""Certificates as files: sealed by a digest, and read only if not one byte is another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.conformance import codec, record
from concord.porting.certificate.certificate import Certificate
from concord.porting.certificate.making import digest
from concord.spec.errors import SpecError
from concord.spec.files import LARGEST, parse_json, read_bytes

KIND = "certificate"


def recorded(found: Certificate) -> dict[str, Any]:
    """Return a certificate as a record that is sealed."""
    title = f"{Path(found.source.path).name} as {Path(found.target.path).name}"
    return seal(record.record({"exit_code": found.exit_code, **codec.plain(found)}, KIND, title))


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with the digest of all the rest of it."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return {**rest, "digest": digest(rest)}


def read(path: Path) -> tuple[dict[str, Any], Certificate]:
    """Read a certificate: the record, and what it says.

    Raises:
        SpecError: if it is none, or one byte is not as it was written.
    """
    content = read_bytes(path, LARGEST)
    data = parse_json(content, str(path))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{path}: holds no certificate: 'concord certify' writes them")
    problems = list(_altered(content, data))
    if problems:
        raise SpecError([f"{path}: {problem}" for problem in problems])
    definitions: dict[str, Any] = {"number": {"type": ["number", "string"]}}
    schema = {"type": "object", "properties": _properties(definitions), "$defs": definitions}
    wrong = record.problems(data) or list(codec.departures({key: data[key] for key in codec.hints_of(Certificate) if key in data}, schema))
    if wrong:
        raise SpecError([f"{path}: {problem}" for problem in wrong[:10]])
    return data, codec.restored(Certificate, {key: value for key, value in data.items() if key in codec.hints_of(Certificate)})


def _properties(definitions: dict[str, Any]) -> dict[str, Any]:
    return {name: codec.schema_of(hint, definitions) for name, hint in codec.hints_of(Certificate).items()}


def _altered(content: bytes, data: dict[str, Any]) -> list[str]:
    """Return what shows that a certificate was altered."""
    if data.get("digest") != seal(data)["digest"]:
        return [f"was altered: its digest is {data.get('digest')!s:.16}… but what it says has {seal(data)['digest']:.16}…"]
    return [] if content == record.text(data).encode() else ["was altered: it says the same, but is not laid out as it was written"]
