"""Training in lockstep: the same batches through several backends, each step judged by what rounding alone explains."""

from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.outcome import Divergence, Lockstep, Track
from concord.conformance.lockstep.running import Entrant, first_divergence, free_running, resynchronised

__all__ = [
    "Divergence",
    "Entrant",
    "JudgedTraining",
    "Lockstep",
    "Track",
    "first_divergence",
    "free_running",
    "resynchronised",
]
