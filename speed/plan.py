"""What is measured, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from concord.conformance.campaign import Setup
from concord.speed.presets import Workload

PROFILES = ("tuned", "as shipped")
"""``tuned``: the same threads for all, and documented switches.

``as shipped``: what a framework does if nothing is said.
"""

SLICE = 0.3
"""Seconds that a turn lasts, or one step if that is longer."""

TURNS = 3
"""Turns at least."""

PATIENCE = 3
"""How many times as many turns there may be, while a measurement is unsteady and time is left."""

SQUARE = {"cpu": (2048, 2048, 2048), "cuda": (8192, 8192, 8192)}
"""A product large enough for any framework to be at its best, for each kind of device."""


@dataclass(frozen=True)
class Mode:
    """How a workload is run.

    Attributes:
        implementation, execution: as in :class:`concord.backends.interface.Request`.
        profile: one of :data:`PROFILES`.
    """

    implementation: str = "library"
    execution: str = "eager"
    profile: str = "tuned"

    @property
    def name(self) -> str:
        """A name for tables and records."""
        return f"{self.implementation} {self.execution}" + (
            "" if self.profile == "tuned" else f", {self.profile}"
        )


@dataclass(frozen=True)
class SpeedPlan:
    """What is measured.

    Attributes:
        names: of backends, and of :data:`concord.speed.peers.PEERS`.
        workloads, modes: all of the one in each of the other.
        settings: where and how: device, precision, threads, limits of workers.
        turns: how many turns there are at least.
        patience: how many times as many there may be, while a measurement is unsteady.
        budget: seconds within which to stay: turns are added for the sake of steadiness while they last, and
            what would not end within them is not begun. None: no limit.
        thorough: whether a large square product is measured, beside one of the model's size, and the time of
            imports: then the first workers start one after the other.
        slice: seconds that a turn lasts, or one step if that is longer.
    """

    names: tuple[str, ...]
    workloads: tuple[Workload, ...]
    modes: tuple[Mode, ...]
    settings: Setup = field(default_factory=Setup)
    turns: int = TURNS
    patience: int = PATIENCE
    budget: float | None = None
    thorough: bool = True
    slice: float = SLICE
