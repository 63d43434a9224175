"""Expectations that one process derives and the others read."""

import hashlib
import os
import pickle
from functools import partial

from concord.conformance.judging.estimate import Cache


class SharedCache(Cache):
    """A cache in a folder that forgets nothing; each result is a file named by the digest of its key."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def get(self, key, make):
        return super().get(key, partial(self._read, key, make))

    def _read(self, key, make):
        file = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if file.exists():
            return pickle.loads(file.read_bytes())
        value = make()
        own = file.with_suffix(f".{os.getpid()}")  # another process may write the same file at this moment
        own.write_bytes(pickle.dumps(value))
        own.replace(file)
        return value
