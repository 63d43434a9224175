"""Certificates as files: sealed by a digest, and read only if not one byte is another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.conformance import codec, record
from concord.porting.certificate.certificate import Certificate
from concord.porting.certificate.making import digest
from concord.porting.certificate.verifying import stated
from concord.spec.errors import SpecError, located, refuse
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
    with located(str(path)):
        refuse(record.problems(data)[: codec.MOST_PROBLEMS])
        found: Certificate = codec.understood(Certificate, data)
        stated(found)
    return data, found


def _altered(content: bytes, data: dict[str, Any]) -> list[str]:
    """Return what shows that a certificate was altered."""
    if data.get("digest") != seal(data)["digest"]:
        return [
            f"was altered: its digest is {data.get('digest')!s:.16}… but what it says has {seal(data)['digest']:.16}…"
        ]
    return (
        []
        if content == record.text(data).encode()
        else ["was altered: it says the same, but is not laid out as it was written"]
    )
