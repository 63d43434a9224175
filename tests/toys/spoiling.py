"""Files that are spoilt one at a time and read: in bounded time and memory.

And nothing but what is said in a line is raised.
"""

import dataclasses
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from random import Random

from concord.spec.errors import SpecError
from tests.toys.mutations import mutated

SECONDS = 20
"""Of the processor, that one spoilt file may take; a right one takes less than one."""

PATIENCE = 300
"""Seconds that it may take where it waits for something."""

MEMORY = 1 << 30
"""Bytes beyond those at the start that may be held."""

ENDED = "its process ended"

PLACES = ("source=", "parameter=")
"""What else says where: of a checkpoint, of which there is one, the tensor."""


@dataclasses.dataclass
class Tally:
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


@contextmanager
def temporary(folder):
    """Have temporary files lie in a folder, where what is left of them is seen."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    folder.mkdir()
    try:
        yield
    finally:
        tempfile.tempdir = before


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


def there(folder):
    """Return all that lies in a folder, in whatever folder of it."""
    return {str(path) for path in folder.rglob("*")}


def campaign(
    make,
    read,
    times,
    folder,
    first=0,
    names=(),
):
    """Spoil the files of a reader, one at a time, and let it read them.

    Args:
        make: writes right files into a folder.
        read: reads it.
        times: how often.
        folder: an empty one, in which the reader gets another; nothing may come or go in it.
        first: seed, the next is one more.
        names: of the files that are spoilt; by default all.
    """
    here = folder / "here"
    here.mkdir()
    make(here)
    right = {str(path.relative_to(here)): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    read(here)  # what is right is read
    tally = Tally()
    with bounded(), temporary(folder / "temporary"):
        before = there(folder)
        for seed in range(first, first + times):
            random = Random(seed)
            name = random.choice(sorted(names or right))
            (here / name).write_bytes(mutated(right[name], name, random))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
            try:
                read(here)
                tally.counts["read"] += 1
            except SpecError as error:
                tally.counts["refused: its process ended" if ENDED in str(error) else "refused"] += 1
                where = (str(here), name, *PLACES)
                for line in error.problems:
                    if "\n" in line or not any(place in line for place in where):
                        tally.wrong.append(f"{seed} {name}: not one line that names the file: {line[:200]!r}")
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 - whatever is raised is wrong
                tally.wrong.append(f"{seed} {name}: {traceback.format_exc(limit=-4)}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                (here / name).write_bytes(right[name])
            if new := there(folder) ^ before:
                tally.wrong.append(f"{seed} {name}: has come or gone: {sorted(new)[:3]}")
                before = there(folder)
    return tally
