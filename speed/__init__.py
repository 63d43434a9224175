"""Comparison of frameworks' speed, for correct programs."""

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
