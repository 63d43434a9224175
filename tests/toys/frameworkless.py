"""A backend whose framework is not installed."""

import no_such_framework  # noqa: F401

from tests.toys.numpy_backend import NumpyBackend as NumpyBackend
