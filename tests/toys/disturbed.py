"""Backends to which something happens: ``tests.toys.disturbed:WHAT_WHEN``, for example ``aborts_run``.

*What* is a function of this module, *when* one of :data:`WHEN`, or ``alone``: when a run has one sample. What
they start has the environment of the test.
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

from tests.toys.numpy_backend import NumpyBackend, note

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
        note("ran")
        print("first words\nlast words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)
        time.sleep(LONG)

    return happens


def hangs():
    print("waiting for a lock", file=sys.stderr, flush=True)
    note("hanging")
    time.sleep(LONG)


def forks(then=lambda: None, daemon=False, hungry=False):
    """Start a process that holds everything this one has, and go on when it is there."""
    ready, told = os.pipe()
    if os.fork() == 0:
        if daemon:
            os.setsid()
        if hungry:
            HELD.append(np.ones(3 << 26))  # 1.5 GiB
        note("hanging")
        os.write(told, b"!")
        time.sleep(LONG)
        os._exit(0)
    os.read(ready, 1)
    then()


def spins():
    """Compute in one call of C code, which lets no other thread of its process run."""
    note("hanging")
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


def floods(times=256):
    for _ in range(times):
        os.write(2, b"noise\n" * (1 << 16) * 1)


def floods_and_raises():
    """Write more than a parent should hold, and have the last words at the end."""
    floods(64)
    raise ArithmeticError("after much noise")


def hoards():
    print("allocating", file=sys.stderr, flush=True)
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
    "raises": raising(ArithmeticError("it broke\nand has more to say")),
    "raises what cannot be shown": raising(
        ArithmeticError("lone \ud800 surrogate, [/red] markup, \x1b[31m colour")
    ),
    "raises what is odd": raising(Odd()),
    "raises an interrupt": raising(KeyboardInterrupt()),
    "raises for want of memory": lambda: np.ones(2**50),
    "lacks a library": raising(ImportError("libtoy.so.1: cannot open shared object file")),
    "lacks its framework": raising(ModuleNotFoundError("No module named 'no_such_framework'")),
    "raises at length": raising(ValueError("long " * (1 << 20))),
    "floods and raises": floods_and_raises,
    "recurses": recurses,
    "hangs": hangs,
    "spins": spins,
    "waits for itself": waits_for_itself,
    "heeds nothing": heeds_nothing,
    "scribbles": scribbles,
    "closes all": lambda: os.closerange(0, 256),
    "hoards": hoards,
    "forks and hangs": lambda: forks(hangs),
    "forks and exits": lambda: forks(lambda: os._exit(9)),
    "leaves a daemon and exits": lambda: forks(lambda: os._exit(9), daemon=True),
    "forks a hungry one": lambda: forks(hangs, hungry=True),
    "opens all": opens_all,
    "starves": starves,
}
"""After these it may have no result."""


def name_of(what, when="run"):
    """Return how a backend to which something happens is asked for."""
    return f"tests.toys.disturbed:{what.replace(' ', '_')}_{when}"


def __getattr__(name):
    what, _, when = name.rpartition("_")
    happens = (HARMLESS | DEADLY).get(what.replace("_", " "))
    if happens is None or when not in (*WHEN, "alone"):
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
            if when == "run" or (when == "alone" and len(request.batch.required("labels")) == 1):
                happens()
            return super().run(request)

    return Disturbed
