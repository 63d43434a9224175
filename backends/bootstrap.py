"""Entry point of a worker, executed by its own interpreter: ``bootstrap.py ROOT TARGET``.

Imports nothing from concord until the search path is set.
"""

import contextlib
import os
import select
import sys


def end_with_parent(connection: int) -> None:
    """Fork a process that kills this one when the parent ends."""
    # A thread of the worker could not do this: a framework may hold the interpreter's lock forever.
    # PR_SET_PDEATHSIG fires when the starting thread ends, and does not reach children (decision 0001). The
    # forked process holds only the connection, which closes however the parent ends.
    if os.fork() != 0:
        return
    os.dup2(connection, 0)
    os.closerange(1, 256)
    parent = select.poll()
    parent.register(0, getattr(select, "POLLRDHUP", 0))
    parent.poll()
    os.killpg(0, 9)


def search(root: str) -> None:
    """Set the search path: this package from a folder, others as installed."""
    here = os.path.realpath(os.getcwd())
    # Subfolders of backends/ have the frameworks' names, and must never be imported instead of them.
    shadowing = os.path.join(root, "backends")
    searched = [
        os.path.abspath(entry or ".") if os.path.exists(entry or ".") else entry for entry in sys.path
    ]
    others = [entry for entry in searched if os.path.realpath(entry) not in (shadowing, root, here)]
    sys.path[:] = [root, *others]
    # Import from the checkout now: an unrelated "concord" may be installed.
    import concord  # noqa: F401

    # The user's current folder may contain a torch.py, so installed packages come first.
    sys.path[:] = [*others, *dict.fromkeys((root, os.getcwd() if here not in (root, shadowing) else root))]


def main(root: str, target: str) -> None:
    """Serve the object that ``target`` names, as ``"package.module:name"``."""
    os.environ.pop("PYTHONSAFEPATH", None)
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    end_with_parent(connection)
    search(root)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is killed first
    from concord.backends.remote import serve

    serve(connection, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
