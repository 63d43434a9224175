"""Call of a function of any framework in its own process: ``child.py TARGET INPUTS OUTPUTS``.

Concord is not imported, because the interpreter's environment may lack it.
"""

import json
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def called(function: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Arrays by name; without names, several by position, and a single one as ``output``."""
    positional = [inputs.pop(key) for key in sorted(filter(str.isdigit, inputs), key=int)]
    result = function(*positional, **inputs)
    if result is None:
        raise TypeError("the function returned None but must return named arrays")
    if isinstance(result, (tuple, list)) and all(hasattr(entry, "shape") for entry in result):
        result = {f"result {place}": entry for place, entry in enumerate(result)}
    return result if isinstance(result, dict) else {"output": result}


def main(target: str, inputs_path: str, outputs_path: str) -> None:
    """Call the function and save its arrays."""
    sys.path.insert(0, os.getcwd())
    try:
        arrays = called(pkgutil.resolve_name(target), load_file(inputs_path))
    except SystemExit as end:  # otherwise exit(0) would leave neither a result nor a message
        sys.exit(f"SystemExit: {end.code}")
    contents = {key: np.ascontiguousarray(np.asarray(array)) for key, array in arrays.items()}
    save_file(contents, outputs_path, {"names": json.dumps([*contents])})  # the file has another order


if __name__ == "__main__":
    main(*sys.argv[1:])
