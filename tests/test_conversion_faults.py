"""Faults of conversion: each is refused, or named where it goes wrong, and what is harmless alarms nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from concord.porting.faults.catalogue import ALL, CONVERSION
from concord.porting.faults.fault import GROUPS, HUB, ConversionFault
from concord.porting.faults.files import MADE
from concord.porting.faults.finding import find

SPECIFICATION = (Path(__file__).parent.parent / "spec" / "SPEC.md").read_text()


NAMED = {fault.group: fault for fault in reversed(ALL) if fault.expected == "named"}
"""The first of each group that is read, and judged, which takes longer."""

SLOWLY = [
    pytest.param(
        fault,
        id=fault.name,
        marks=[pytest.mark.slow] if fault.expected == "named" and fault not in NAMED.values() else [],
    )
    for fault in ALL
]


def test_table_is_large_and_has_every_group() -> None:
    assert len(CONVERSION) == len(ALL), "names are unique"
    assert len(ALL) > 80
    assert sum(bool(fault.source) for fault in ALL) >= 60
    assert {fault.group for fault in ALL} == set(GROUPS)
    assert {fault.expected for fault in ALL} == {"refused", "named", "harmless"}


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_fault_is_documented(fault: ConversionFault) -> None:
    assert re.fullmatch("[a-z0-9_]+", fault.name)
    assert fault.what.endswith(".")
    assert f"**{fault.clause}**" in SPECIFICATION
    assert fault.says or fault.expected != "refused"
    assert not fault.source or re.fullmatch(f"{HUB}[^/ ]+/[^/ ]+/(issues|pull)/[0-9]+", fault.source)


@pytest.mark.parametrize("fault", SLOWLY)
def test_fault_is_refused_or_named_or_harmless(tmp_path: Path, fault: ConversionFault) -> None:
    found = find(fault, tmp_path)
    assert (found.outcome, found.first) == (fault.expected, fault.first), found
    assert any(fault.says in line for line in found.said) or not fault.says, found
    if found.outcome == "refused":
        assert all("\n" not in line for line in found.said)
    assert not list(tmp_path.rglob(MADE))
