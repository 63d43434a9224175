"""Files that are spoilt one at a time and read: in bounded time and memory, and nothing but what is said in a line is raised."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from concord.porting.located import Found, answer, understood
from concord.spec.errors import SpecError
from tests.toys.mutations import mutated

SECONDS = 20
"""Of the processor, that one spoilt file may take; a right one takes less than one."""

MEMORY = 1 << 30
"""Bytes beyond those at the start that may be held."""

PLACES = ("source=", "parameter=")
"""What else says where: of a checkpoint, of which there is one, the tensor."""


@dataclasses.dataclass
class Tally:
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


@contextmanager
def bounded() -> Iterator[None]:
    """Have what takes too long or holds too much fail, and not the machine."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 0
    before = signal.signal(signal.SIGPROF, _late)
    try:
        if held:
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _late(*_: object) -> None:
    raise TimeoutError(f"it took more than {SECONDS} s")


def campaign(make: Callable[[Path], None], read: Callable[[Path], object], times: int, folder: Path, first: int = 0, names: Sequence[str] = ()) -> Tally:
    """Spoil the files of a reader, one at a time, and let it read them.

    Args:
        make: writes right files into a folder.
        read: reads it.
        times: how often.
        first: seed, the next is one more.
        names: of the files that are spoilt; by default all.
    """
    make(folder)
    right = {path.name: path.read_bytes() for path in folder.iterdir()}
    read(folder)  # what is right is read
    tally = Tally()
    with bounded():
        for seed in range(first, first + times):
            random = Random(seed)
            name = random.choice(sorted(names or right))
            (folder / name).write_bytes(mutated(right[name], name, random))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                read(folder)
                tally.counts["read"] += 1
            except SpecError as error:
                tally.counts["refused"] += 1
                lines = [line for line in error.problems if "\n" in line or not any(where in line for where in (str(folder), name, *PLACES))]
                tally.wrong += [f"{seed} {name}: not one line that names the file: {line[:200]!r}" for line in lines[:1]]
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                frames = []
                trace = error.__traceback__
                while trace:
                    frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
                    trace = trace.tb_next
                tally.wrong.append(f"{seed} {name}: {type(error).__name__}: {str(error)[:150]} at {' '.join(frames[-4:])}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                (folder / name).write_bytes(right[name])
    return tally


def forked(path: Path, look: Callable[[Path], list[Found]]) -> list[Found]:
    """Look at a file as :func:`concord.porting.located.located` does, in a process that is a copy of this one, which is quicker."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(answer(path, look)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        _late()
    if not said:
        raise SpecError(f"{path}: cannot be read as a file of tensors: its process ended with {status}")
    return understood(json.loads(said), path)
