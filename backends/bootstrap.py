"""The first lines of a worker, run by whichever interpreter it has: ``bootstrap.py ROOT TARGET``.

They stand on their own until they have decided where modules are found.
"""

import contextlib
import os
import select
import sys
from typing import BinaryIO

MARK = "CONCORD_WORKER"
"""The variable by which a process, and all that it starts, are known in their environment."""

SIZE = 8
"""Bytes before each message that say how long it is."""

READY = b"ready"
"""What a process says first, so that an interpreter is known from any other program."""


def head(message: bytes) -> bytes:
    """Return what stands before a message."""
    return len(message).to_bytes(SIZE, "little")


def send(writing: BinaryIO, message: bytes) -> None:
    """Send a message."""
    writing.write(head(message))
    writing.write(message)
    writing.flush()


def marked(mark: str) -> list[int]:
    """Return the processes that have a mark in their environment; none where the system does not say."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(name))
        except (OSError, ValueError):  # ended, another user's, or no process
            pass
    return found


def end_with_parent(reading: BinaryIO, mark: str) -> None:
    """Wait, in a process of its own, until the parent is gone; then end all that this one has started.

    A framework may keep every thread of its own process from running. This one has nothing but the pipe of
    which the parent has the other end: that is hung up once the parent is gone, however it ended.
    """
    if os.fork() != 0:
        return
    os.dup2(reading.fileno(), 0)
    os.closerange(1, 256)
    pipe = select.poll()
    pipe.register(0, getattr(select, "POLLRDHUP", 0))
    pipe.poll()
    for pid in marked(mark):
        if pid != os.getpid():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
    os.killpg(0, 9)


def search(root: str) -> None:
    """Have the package found in a folder, and everything else where it is installed."""
    here = os.path.realpath(os.getcwd())
    # A folder whose subfolders bear the frameworks' names must never be searched for imports.
    shadowing = os.path.join(root, "backends")
    searched = [
        os.path.abspath(entry or ".") if os.path.exists(entry or ".") else entry for entry in sys.path
    ]
    others = [entry for entry in searched if os.path.realpath(entry) not in (shadowing, root, here)]
    sys.path[:] = [root, *others]  # the index has another "concord"
    import concord  # noqa: F401

    # The folder where somebody happens to stand may hold a torch.py: what is installed comes first.
    sys.path[:] = [*others, *dict.fromkeys((root, os.getcwd() if here not in (root, shadowing) else root))]


def main(root: str, target: str) -> None:
    """Answer for an object of ``target``, ``"package.module:name"``."""
    os.environ.pop("PYTHONSAFEPATH", None)
    # Whatever a framework prints must not get among the messages.
    reading, writing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    end_with_parent(reading, os.environ[MARK])
    send(writing, READY)
    search(root)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, this process goes first
    from concord.backends.remote import serve

    serve(reading, writing, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
