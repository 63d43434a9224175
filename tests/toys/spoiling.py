"""Files that are spoilt one at a time and read: in bounded time and memory.

And nothing but what is said in a line is raised.
"""

import os
import resource
import signal
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from concord.spec.errors import SpecError
from tests.toys.mutations import mutated

SECONDS = 20
"""Of the processor, that one spoilt file may take; a right one takes less than one."""

PATIENCE = 300
"""Seconds that it may take where it waits for something."""

MEMORY = 1 << 30
"""Bytes beyond those at the start that may be held."""

PLACES = ("source=", "parameter=")
"""What else says where: of a checkpoint, of which there is one, the tensor."""


@contextmanager
def bounded():
    """Have what takes too long or holds too much fail, and not the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = (
        int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if sys.platform == "linux"
        else 0
    )
    before = {kind: signal.signal(kind, _late) for kind in (signal.SIGPROF, signal.SIGALRM)}
    try:
        if held:
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _late(*_):
    raise TimeoutError(f"it took more than {SECONDS} s of the processor, or {PATIENCE} s")


def campaign(make, read, times, folder, first=0):
    """Spoil the files of a reader, one at a time, and let it read them.

    Args:
        make: writes right files into a folder.
        read: reads it.
        times: how often.
        folder: an empty one, in which the reader gets another; nothing may come or go in it.
        first: seed, the next is one more.

    Returns:
        how often it was refused without the end of a process, and what was wrong.
    """
    here, temporary = folder / "here", folder / "temporary"
    here.mkdir()
    temporary.mkdir()
    make(here)
    right = {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    read(here)  # what is right is read
    refused, wrong, before = 0, [], {*folder.rglob("*")}
    with bounded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))  # where what is left of them is seen
        for seed in range(first, first + times):
            random = Random(seed)
            name = random.choice(sorted(right))
            (here / name).write_bytes(mutated(right[name], name, random))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            try:
                read(here)
            except SpecError as error:
                refused += "its process ended" not in str(error)
                where = (str(here), name, *PLACES)
                wrong += [
                    f"{seed} {name}: not one line that names the file: {line[:200]!r}"
                    for line in error.problems
                    if "\n" in line or not any(place in line for place in where)
                ]
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 - whatever is raised is wrong
                wrong.append(f"{seed} {name}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                (here / name).write_bytes(right[name])
            if new := {*folder.rglob("*")} ^ before:
                wrong.append(f"{seed} {name}: has come or gone: {sorted(new)[:3]}")
                before = {*folder.rglob("*")}
    return refused, wrong
