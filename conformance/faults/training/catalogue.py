"""Every fault of training by name."""

from __future__ import annotations

from concord.conformance.faults.training import (
    accumulation,
    clipping,
    data,
    decay,
    dropout,
    optimizers,
    schedules,
)
from concord.conformance.faults.training.fault import TrainingFault

ALL: tuple[TrainingFault, ...] = tuple(
    fault
    for group in (optimizers, decay, clipping, schedules, accumulation, dropout, data)
    for fault in group.FAULTS
)
"""Group by group."""

TRAINING: dict[str, TrainingFault] = {fault.name: fault for fault in ALL}
"""By name."""
