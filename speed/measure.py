"""The measurement: every mode in turn, by a team of backends."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from concord.speed.peers import PEER_EXECUTIONS, PEERS
from concord.speed.plan import Mode, SpeedPlan
from concord.speed.team import Known, Team, Tell

Keep = Callable[[dict[str, Any]], None]
"""Called with each entry as soon as it is complete."""


def measure(
    plan: SpeedPlan,
    keep: Keep = lambda entry: None,
    tell: Tell = lambda text: None,
) -> bool:
    """Measure all that a plan names; return whether the time sufficed for all of it.

    Args:
        keep: called with each entry of the record.
    """
    works = plan.workloads
    known = Known(plan, len(plan.modes) * len(works))
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        for mode in plan.modes:
            names = [name for name in plan.names if takes_part(name, mode, known.offered)]
            if not names:
                known.ahead -= len(works)
                continue
            if time.perf_counter() > known.end:
                return False
            with Team(plan, mode, names, works, known, Path(folder), tell) as team:
                for work in works:
                    if not known.suffices(work, team.different()):
                        return False
                    for entry in team.measure(work):
                        keep(entry)
    return True


def takes_part(name: str, mode: Mode, offered: Mapping[str, Sequence[str]]) -> bool:
    """Whether a backend has anything to do with a mode: not every one has every other's own implementations.

    Args:
        offered: the implementations of backends of which that is known.
    """
    if name in PEERS:
        return (
            mode.implementation == "library"
            and mode.execution in PEER_EXECUTIONS[name]
            and mode.profile == "tuned"
        )
    return ":" not in mode.implementation or mode.implementation in offered.get(name, [mode.implementation])
