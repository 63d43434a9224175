"""Expectations that one process of a test session has derived, and the others read.

To derive takes a hundred times as long as to read.
"""

import hashlib
import os
import pickle
from functools import partial

from concord.conformance.judging.estimate import Cache


class SharedCache(Cache):
    """A cache with a folder below it, which forgets nothing.

    Args:
        folder: where results lie, each in a file of its own, under a digest of its key.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def get(self, key, make):
        return super().get(key, partial(self._read, key, make))

    def _read(self, key, make):
        file = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        made = make()
        own = file.with_suffix(f".{os.getpid()}")  # another process may make the same at this moment
        own.write_bytes(pickle.dumps(made))
        own.replace(file)
        return made
