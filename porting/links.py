"""Links in a checkpoint's folder: what they lead to is read, and may be written into another folder.

So they must not lead anywhere.
"""

from __future__ import annotations

from pathlib import Path

BLOBS = "blobs"
"""The folder of Hugging Face's cache that keeps what ``snapshots/<revision>/*`` beside it are links to."""


def stays(path: Path, folder: Path) -> bool:
    """Say whether a file of a folder lies in it.

    Or is a link to the blobs of the cache that the folder belongs to.
    """
    try:
        here, there = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return there.is_relative_to(here) or there.parent == here.parent.parent / BLOBS
