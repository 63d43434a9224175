"""How fast each framework computes the family, side by side, if its results were right in the same run."""

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
