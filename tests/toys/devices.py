"""What stands for a GPU where there is none.

A device whose clock and memory are made up, and the frameworks' own events.
"""

import importlib

from concord.backends.interface import Unsupported
from tests.toys.measurable import Measurable, Program

SECONDS = 0.25
"""Of each step, by the made up clock."""


class OnADevice(Program):
    """Notes when it is told to wait."""

    def __init__(self, *given):
        super().__init__(*given)
        self.said = []

    def step(self):
        self.said.append("step")
        super().step()

    def synchronize(self):
        self.said.append("synchronize")

    def timed(self, steps):
        for _ in range(steps):
            self.step()
        self.synchronize()
        return [SECONDS] * steps


class WithADevice(Measurable):
    """Has a device with a clock and a memory of its own."""

    held, program = 7 * 2**20, OnADevice

    def peak_memory(self, device, reset=False):
        return self.held


class _Event:
    """An event of a device whose clock goes on by one millisecond with each."""

    recorded = []

    def __init__(self, enable_timing=False):
        self.timed, self.place = enable_timing, -1

    def record(self):
        self.place = len(self.recorded)
        self.recorded.append(self)

    def elapsed_time(self, other):
        assert self.timed
        assert other.timed
        return float(other.place - self.place)


class _Steps:
    """Steps that note what is done with it."""

    def __init__(self):
        self.said = []

    def step(self):
        self.said.append("step")

    def synchronize(self):
        self.said.append("synchronize")


class Clock:
    """Says what a framework's ``timed`` makes of three steps, its events being made up."""

    name = "clock"
    package, owner = "", ""

    def describe(self):
        timed = importlib.import_module(f"backends.{self.package}.backend").timed
        if self.owner:
            module, _, rest = self.owner.partition(".")
            owner = importlib.import_module(module)
            for name in filter(None, rest.split(".")):
                owner = getattr(owner, name)
            owner.Event = _Event
        steps = _Steps()
        return {"version": "", "seconds": timed(steps, 3), "said": steps.said}

    def run(self, request):
        raise Unsupported("a clock")


def clock(package, owner=""):
    return type("ClockOfOne", (Clock,), {"package": package, "owner": owner})


TorchClock, PaddleClock = clock("torch", "torch.cuda"), clock("paddle", "paddle.device")
TfClock, JaxClock = clock("tf"), clock("jax")
