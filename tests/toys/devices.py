"""What stands for a GPU where there is none: a device whose memory is made up."""

from tests.toys.measurable import Measurable, Program


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


class WithADevice(Measurable):
    """Has a device with a memory of its own."""

    held, program = 7 * 2**20, OnADevice

    def peak_memory(self, device, reset=False):
        return self.held
