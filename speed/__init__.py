"""How fast each framework computes it, side by side: of what conformed in the same run, and nothing else."""

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
