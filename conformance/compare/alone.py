"""Calls a function of any framework in a process of its own: ``alone.py TARGET INPUTS OUTPUTS``.

It needs NumPy and safetensors, and nothing of Concord: the interpreter may be another environment's.
"""

import os
import pkgutil
import sys

import numpy as np
from safetensors.numpy import load_file, save_file


def main(target: str, given: str, made: str) -> None:
    """Call the function on arrays by keyword, and write the arrays that it returns by name."""
    sys.path.insert(0, os.getcwd())
    inputs = load_file(given)
    positional = [inputs.pop(key) for key in sorted(key for key in inputs if key.isdigit())]
    found = pkgutil.resolve_name(target)(*positional, **inputs)
    if not isinstance(found, dict):
        found = {"output": found}
    save_file({key: np.ascontiguousarray(np.asarray(array)) for key, array in found.items()}, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
