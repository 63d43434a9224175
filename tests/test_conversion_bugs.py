"""Bugs of conversion: each is refused, or named where it goes wrong, and what is harmless alarms nobody."""

import pytest

from concord.porting.bugs.bug import find
from concord.porting.bugs.catalogue import CONVERSION, MADE

ALL = [*CONVERSION.values()]

NAMED = {bug.group: bug for bug in reversed(ALL) if bug.expected == "named"}
"""The first of each group that is read, and judged, which takes longer."""

SLOWLY = [
    pytest.param(
        bug,
        id=bug.name,
        marks=[pytest.mark.slow] if bug.expected == "named" and bug not in NAMED.values() else [],
    )
    for bug in ALL
]


def test_table_is_large_and_has_every_group():
    assert len(ALL) > 80
    assert sum(bool(bug.source) for bug in ALL) >= 60
    assert len({bug.group for bug in ALL}) == 7
    assert {bug.expected for bug in ALL} == {"refused", "named", "harmless"}


@pytest.mark.parametrize("bug", SLOWLY)
def test_bug_is_refused_or_named_or_harmless(tmp_path, bug):
    found = find(bug, tmp_path)
    assert (found.outcome, found.first) == (bug.expected, bug.first), found
    assert any(bug.says in line for line in found.said) or not bug.says, found
    if found.outcome == "refused":
        assert all("\n" not in line for line in found.said)
    assert not list(tmp_path.rglob(MADE))
