"""Backends to which something happens: ``tests.toys.disturbed:WHAT_WHEN``, for example ``aborts_run``.

*What* is a function of this module, *when* one of :data:`WHEN`. What they start has the environment of the
test.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from tests.toys.numpy_backend import NumpyBackend

WHEN = ("found", "built", "described", "run")

LONG = 100
"""Seconds that what does not end lasts: far longer than a test waits."""

HELD = []


class Odd(BaseException):
    """No Exception, and it cannot say what it is."""

    def __str__(self):
        raise ValueError("it cannot be said")


def raising(error):
    def happens():
        raise error

    return happens


def signalled(number):
    def happens():
        os.kill(os.getpid(), number)
        time.sleep(LONG)

    return happens


def forks(daemon=False, hungry=False):
    """Start a process that holds everything this one has."""
    if os.fork() == 0:
        if daemon:
            os.setsid()
        if hungry:
            HELD.append(np.ones(3 << 26))  # 1.5 GiB
        time.sleep(LONG)
        os._exit(0)


def forks_a_hungry_one():
    forks(hungry=True)
    time.sleep(LONG)


def spins():
    sum(range(10**15))


def waits_for_itself():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def heeds_nothing():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LONG)


def recurses():
    recurses()


def prints():
    for file in (sys.stdout, sys.__stdout__, sys.stderr):
        print("garbage\0\x1b[31m" * 10_000, file=file, flush=True)
    os.write(1, b"\xff" * 10_000)


def scribbles():
    """Write into whatever is open: into the pipe of the answers too."""
    for number in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(number, b"\xff" * 100)


def floods():
    for _ in range(256):
        os.write(2, b"noise\n" * (1 << 16) * 1)


def hoards():
    for _ in range(96):
        HELD.append(np.ones(1 << 22))  # 32 MiB, touched
        time.sleep(0.01)


def opens_all():
    try:
        while True:
            HELD.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass


def starves():
    """Take what a process needs away from it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    spins()


HARMLESS = {
    "forks": forks,
    "leaves a daemon": lambda: forks(daemon=True),
    "starts another": lambda: HELD.append(subprocess.Popen(["sleep", str(LONG)], start_new_session=True)),
    "leaves a thread": lambda: threading.Thread(target=time.sleep, args=(LONG,)).start(),
    "prints": prints,
    "floods": floods,
}
"""After these a backend is right all the same."""

DEADLY = {
    "exits": lambda: os._exit(0),
    "exits with a code": lambda: os._exit(77),
    "leaves": raising(SystemExit("it leaves")),
    "leaves well": raising(SystemExit(0)),
    "aborts": os.abort,
    "reads nowhere": lambda: ctypes.string_at(0) and None,
    **{
        number.name: signalled(number)
        for number in (
            signal.SIGKILL,
            signal.SIGTERM,
            signal.SIGHUP,
            signal.SIGINT,
            signal.SIGFPE,
            signal.SIGBUS,
            signal.SIGSTOP,
        )
    },
    "a signal without a name": signalled(signal.SIGRTMIN + 5),
    "raises": raising(ArithmeticError("lone \ud800 surrogate")),
    "raises what is odd": raising(Odd()),
    "raises an interrupt": raising(KeyboardInterrupt()),
    "raises an end": raising(StopIteration(3)),
    "raises an exit": raising(GeneratorExit()),
    "raises a group": raising(ExceptionGroup("all\nof them", [ValueError("one"), TypeError("two")])),
    "raises for want of memory": raising(MemoryError()),
    "raises at length": raising(ValueError("long " * (1 << 20))),
    "recurses": recurses,
    "spins": spins,
    "waits for itself": waits_for_itself,
    "heeds nothing": heeds_nothing,
    "scribbles": scribbles,
    "closes all": lambda: os.closerange(0, 256),
    "hoards": hoards,
    "forks a hungry one": forks_a_hungry_one,
    "opens all": opens_all,
    "starves": starves,
}
"""After these it may have no result."""


def name_of(what, when):
    """Return how a backend to which something happens is asked for."""
    return f"tests.toys.disturbed:{what.replace(' ', '_')}_{when}"


def __getattr__(name):
    what, _, when = name.rpartition("_")
    happens = (HARMLESS | DEADLY).get(what.replace("_", " "))
    if happens is None or when not in WHEN:
        raise AttributeError(name)
    if when == "found":
        happens()

    class Disturbed(NumpyBackend):
        def __init__(self):
            super().__init__()
            if when == "built":
                happens()

        def describe(self):
            if when == "described":
                happens()
            return super().describe()

        def run(self, request):
            if when == "run":
                happens()
            return super().run(request)

    return Disturbed
