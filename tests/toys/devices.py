"""What stands for a GPU where there is none: a device whose clock and memory are made up."""

from tests.toys.measurable import Measurable, Program

SECONDS = 0.25
"""Between two events of the made up clock."""


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


class Event:
    def record(self):
        pass

    def elapsed_time(self, later):
        return 1e3 * SECONDS


class WithADevice(Measurable):
    """Has a device with a clock and a memory of its own."""

    held, program = 7 * 2**20, OnADevice

    def peak_memory(self, device, reset=False):
        return self.held

    def event(self):
        return Event()
