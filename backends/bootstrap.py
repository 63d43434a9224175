"""The first lines of a worker, run by whichever interpreter it has: ``bootstrap.py ROOT TARGET``.

They stand on their own until they have decided where modules are found.
"""

import contextlib
import os
import select
import sys


def end_with_parent(connection: int) -> None:
    """Wait, in a process of its own, until the parent is gone; then end this one and all that it has started.

    A framework may keep every thread of its own process from running. This one has nothing but the
    connection, whose other end the parent holds: that is hung up once the parent is gone, however it ended.
    """
    if os.fork() != 0:
        return
    os.dup2(connection, 0)
    os.closerange(1, 256)
    parent = select.poll()
    parent.register(0, getattr(select, "POLLRDHUP", 0))
    parent.poll()
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
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end_with_parent(connection)
    search(root)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, this process goes first
    from concord.backends.remote import serve

    serve(connection, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
