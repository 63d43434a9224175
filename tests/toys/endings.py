"""Functions and a module that end the process in which they run."""

import itertools
import os
import signal
import sys

from torch import nn


def leaves(**given):
    sys.exit(0)


def leaves_with_words(**given):
    sys.exit("enough")


def raises(**given):
    raise KeyError("no such layer")


def dies(**given):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_without_a_word(**given):
    os._exit(0)


def leaves_where_it_is_built():
    sys.exit(0)


class Leaving(nn.Linear):
    """Ends the process when it is called for this time."""

    def __init__(self, time):
        super().__init__(5, 3)
        calls = itertools.count(1)  # no state of the module: each run would start from it anew
        self.leaves = lambda: next(calls) == time

    def forward(self, input):
        if self.leaves():
            sys.exit(0)
        return super().forward(input)


def leaving():
    return Leaving(1).eval()


def linear():
    return nn.Linear(5, 3).eval()
