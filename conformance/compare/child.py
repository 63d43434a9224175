"""Calls a function of any framework in a process of its own: ``child.py TARGET INPUTS OUTPUTS``.

It needs NumPy and safetensors, and nothing of Concord: the interpreter may be another environment's.
"""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def called(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what a function makes of arrays, by name; what is no dictionary is the output."""
    positional = [inputs.pop(key) for key in sorted(key for key in inputs if key.isdigit())]
    found = function(*positional, **inputs)
    return found if isinstance(found, dict) else {"output": found}


def main(target: str, given: str, made: str) -> None:
    """Call the function on arrays by keyword, and write the arrays that it returns by name."""
    sys.path.insert(0, os.getcwd())
    try:
        found = called(pkgutil.resolve_name(target), load_file(given))
    except SystemExit as end:  # else no result would come with exit code 0, and without a word
        sys.exit(f"SystemExit: {end.code}")
    save_file({key: np.ascontiguousarray(np.asarray(array)) for key, array in found.items()}, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
