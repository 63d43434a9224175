"""The built-in backends with attention weights that are an output alone.

``tests.toys.aside:NAME``, a class for each of them.
"""

import importlib

from concord.backends import BUILT_IN


def __getattr__(name):
    if name not in BUILT_IN:
        raise AttributeError(name)
    adapter = importlib.import_module(f"concord.backends.{name}.backend").Adapter

    class Aside(adapter):
        """Delivers weights with which the model does not go on, as beside a fused kernel that keeps its
        own.
        """

        def trace(self, request):
            def beside(record, tap, tensor):
                recorded = record(tap, tensor)
                return tensor if tap.endswith("attention.weights") else recorded

            return lambda model, inputs, record: lambda tap, tensor: beside(record, tap, tensor)

    return Aside
