"""Certificates as files: sealed by a digest, and read only if not one byte is another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from concord.conformance import record
from concord.porting.certificate.certificate import Certificate
from concord.spec.errors import SpecError, located, refuse, unknowns
from concord.spec.files import LARGEST, parse_json, read_bytes
from concord.spec.precision import PRECISIONS

KIND = "certificate"
CLASS = "concord.porting.certificate.certificate:Certificate"


def recorded(found: Certificate) -> record.Record:
    """Return a certificate as a record."""
    return record.made(found, KIND, f"{Path(found.source.path).name} as {Path(found.target.path).name}")


def text(made: record.Record) -> str:
    """Return a certificate as JSON text, sealed."""
    return record.lines(seal(record.data(made)))


def seal(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return data with the SHA-256 of all the rest of it, as JSON with sorted keys and nothing between."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    canonical = json.dumps(
        json.loads(record.lines(rest)), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return {**rest, "digest": hashlib.sha256(canonical.encode()).hexdigest()}


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
        refuse(unknowns("dtype", made.outcome.asked.dtypes, PRECISIONS))
    return made, made.outcome
