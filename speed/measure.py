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
    done: Sequence[tuple[str, str, str]] = (),
    keep: Keep = lambda entry: None,
    tell: Tell = lambda text: None,
) -> bool:
    """Measure all that a plan names and that is not done yet; return whether the time sufficed for all of it.

    Args:
        done: backend, mode and workload of what an earlier run measured.
        keep: called with each entry of the record.
    """
    left = {
        mode: [work for work in plan.workloads if (mode, work) not in plan.left_out] for mode in plan.modes
    }
    known = Known(plan, sum(map(len, left.values())))
    with tempfile.TemporaryDirectory(prefix="concord-", ignore_cleanup_errors=True) as folder:
        for mode, works in left.items():
            names = [name for name in plan.names if takes_part(name, mode, known.offered)]
            asked = {
                work: wanted
                for work in works
                if (wanted := [name for name in names if (name, mode.name, work.name) not in done])
            }
            known.ahead -= len(works) - len(asked)
            if not asked:
                continue
            if time.perf_counter() > known.end:
                return False
            needed = [name for name in names if any(name in wanted for wanted in asked.values())]
            with Team(plan, mode, needed, list(asked), known, Path(folder), tell) as team:
                for work, wanted in asked.items():
                    if not known.suffices(work, team.different(wanted)):
                        return False
                    for entry in team.measure(work, wanted):
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
