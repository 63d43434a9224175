"""How fast each framework computes it, side by side: of what conformed in the same run, and nothing else."""

from speed.compare import compare
from speed.measure import measure
from speed.plan import Mode, Plan
from speed.presets import PRESETS, Workload, workload
from speed.record import Record, read

__all__ = ["PRESETS", "Mode", "Plan", "Record", "Workload", "compare", "measure", "read", "workload"]
