"""Certificates as files: sealed by a digest, and read only if not one byte is another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.conformance import record
from concord.porting.certificate.certificate import Certificate
from concord.porting.certificate.making import digest
from concord.porting.certificate.verifying import stated
from concord.spec.errors import SpecError, located
from concord.spec.files import LARGEST, parse_json, read_bytes

KIND = "certificate"
CLASS = "concord.porting.certificate.certificate:Certificate"


def recorded(found: Certificate) -> record.Record:
    """Return a certificate as a record."""
    return record.made(found, KIND, f"{Path(found.source.path).name} as {Path(found.target.path).name}")


def text(made: record.Record) -> str:
    """Return a certificate as JSON text, sealed."""
    return record.lines(seal(record.data(made)))


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with the digest of all the rest of it."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return {**rest, "digest": digest(json.loads(record.lines(rest)))}


def read(path: Path) -> tuple[record.Record, Certificate]:
    """Read a certificate: the record, and what it says.

    Raises:
        SpecError: if it is none, or one byte is not as it was written.
    """
    content = read_bytes(path, LARGEST)
    data = parse_json(content, str(path))
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise SpecError(f"{path}: holds no certificate: 'concord certify' writes them")
    with located(str(path)):
        sealed = seal(data)
        if data.get("digest") != sealed["digest"]:
            raise SpecError(
                f"was altered: its digest is {data.get('digest')!s:.16}… but what it says has "
                f"{sealed['digest']:.16}…"
            )
        if content != record.lines(data).encode():
            raise SpecError("was altered: it says the same, but is not laid out as it was written")
        made = record.parsed(content, {KIND: CLASS})
        stated(made.outcome)
    return made, made.outcome
