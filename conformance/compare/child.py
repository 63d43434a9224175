"""Calls a function of any framework in a process of its own: ``child.py TARGET INPUTS OUTPUTS``.

It imports NumPy and safetensors, and nothing of Concord: the interpreter may be another environment's.
"""

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def called(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a function's arrays by name; a result that is no dictionary is the output."""
    positional = [inputs.pop(key) for key in sorted(key for key in inputs if key.isdigit())]
    result = function(*positional, **inputs)
    return result if isinstance(result, dict) else {"output": result}


def main(target: str, given: str, made: str) -> None:
    """Call the function on arrays by keyword, and write the arrays that it returns."""
    sys.path.insert(0, os.getcwd())
    try:
        arrays = called(pkgutil.resolve_name(target), load_file(given))
    except SystemExit as end:  # a plain exit would leave no result, with exit code 0 and without a word
        sys.exit(f"SystemExit: {end.code}")
    save_file({key: np.ascontiguousarray(np.asarray(array)) for key, array in arrays.items()}, made)


if __name__ == "__main__":
    main(*sys.argv[1:])
