"""Functions of another file or for another process: three return, the others end it."""

import os
import signal
import sys


def backwards(input):
    return {f"part {place}": input * place for place in (2, 0, 1)}


def halved(x):
    return {"output": x / 2}


def misshapen(input):
    return {"output": input}


def leaves(**inputs):
    sys.exit(0)


def raises(*inputs, **named):
    raise KeyError("no such layer")


def dies(**inputs):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_without_a_word(**inputs):
    os._exit(0)
