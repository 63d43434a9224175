"""A backend whose framework is installed and cannot be imported."""

import sys

from tests.toys.numpy_backend import NumpyBackend as NumpyBackend
from tests.toys.numpy_backend import note

note("started")
print("loading libtoy", file=sys.stderr)
raise ImportError("libtoy.so.1: cannot open shared object file")
