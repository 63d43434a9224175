"""Training in lockstep: the same batches through several backends, each step judged."""

from concord.conformance.expectation import JudgedTraining
from concord.conformance.lockstep.candidate import Candidate
from concord.conformance.lockstep.outcome import Divergence, Lockstep, Track
from concord.conformance.lockstep.running import first_divergence, free_running, resynchronised

__all__ = [
    "Candidate",
    "Divergence",
    "JudgedTraining",
    "Lockstep",
    "Track",
    "first_divergence",
    "free_running",
    "resynchronised",
]
