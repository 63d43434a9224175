"""Disturbed backends: ``tests.toys.disturbed:WHAT_WHEN``, for example ``hangs_run``.

*WHAT* is a key of :data:`HAPPENINGS`, and *WHEN* is one of :data:`WHEN`.
"""

import os
import signal
import sys
import time

import numpy as np

from tests.toys.numpy_backend import NumpyBackend, note

# On import of the module, when it is described, in each run, or in the run of a single sample.
WHEN = ("found", "described", "run", "alone")

# Seconds, far more than any test waits.
LONG = 100


def raising(error):
    def happens():
        raise error

    return happens


def killed():
    note("ran")
    print("first words\nlast words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    print("waiting for a lock", file=sys.stderr, flush=True)
    note("hanging")
    time.sleep(LONG)


def spins():
    # One call of C code, which blocks all other threads of the process.
    note("hanging")
    sum(range(10**15))


def forks(then):
    # The child has all file descriptors of this process.
    ready, writer = os.pipe()
    if os.fork() == 0:
        note("hanging")
        os.write(writer, b"!")
        time.sleep(LONG)
        os._exit(0)
    os.read(ready, 1)
    then()


def hoards():
    print("allocating", file=sys.stderr, flush=True)
    arrays = []
    for _ in range(96):
        arrays.append(np.ones(1 << 22))  # 32 MiB, touched
        time.sleep(0.01)


HAPPENINGS = {
    "SIGKILL": killed,
    "exits with a code": lambda: os._exit(77),
    "hangs": hangs,
    "spins": spins,
    "forks and hangs": lambda: forks(hangs),
    "forks and exits": lambda: forks(lambda: os._exit(9)),
    "hoards": hoards,
    "raises": raising(ArithmeticError("it broke\nand has more to say")),
    "raises what cannot be shown": raising(
        ArithmeticError("lone \ud800 surrogate, [/red] markup, \x1b[31m colour")
    ),
    "raises for want of memory": lambda: np.ones(2**50),
    "lacks a library": raising(ImportError("libtoy.so.1: cannot open shared object file")),
    "lacks its framework": raising(ModuleNotFoundError("No module named 'no_such_framework'")),
}


def name_of(happening, when="run"):
    return f"tests.toys.disturbed:{happening.replace(' ', '_')}_{when}"


def __getattr__(name):
    happening, _, when = name.rpartition("_")
    happens = HAPPENINGS.get(happening.replace("_", " "))
    if happens is None or when not in WHEN:
        raise AttributeError(name)
    if when == "found":
        happens()

    class Disturbed(NumpyBackend):
        def describe(self):
            if when == "described":
                happens()
            return super().describe()

        def run(self, request):
            if when == "run" or (when == "alone" and len(request.batch.required("labels")) == 1):
                happens()
            return super().run(request)

    return Disturbed
