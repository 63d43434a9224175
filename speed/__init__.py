"""Comparison of frameworks' speed, among programs with correct results."""

from concord.speed.measurement import Mode, SpeedPlan, measure
from concord.speed.measurement_record import SpeedRecord
from concord.speed.presets import Workload, workload

__all__ = [
    "Mode",
    "SpeedPlan",
    "SpeedRecord",
    "Workload",
    "measure",
    "workload",
]
