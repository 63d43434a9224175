"""A tool that knows nothing of workers.

It computes exported cases from their files, and leaves its results beside them.

Usage: ``python standalone.py FOLDER [TENSOR]``. A tensor that is named comes out wrong.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from concord import spec


def answer(folder, wrong):
    case, arrays = json.loads((folder / "case.json").read_text()), load_file(folder / "case.safetensors")

    def given(prefix):
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    truth = spec.reference(
        spec.from_mapping(case["config"]),
        given("weights/"),
        spec.from_arrays(given("inputs/")),
        gradients=True,
        part=case["part"],
        dtype=case["dtype"],
        arithmetic=case["dtype"],
    )
    wanted = case["wanted"]
    results = {"output": truth.taps[wanted["output"]], "loss": truth.loss}
    results |= {f"taps/{name}": truth.taps[name] for name in wanted["taps"]}
    results |= {f"gradients/{name}": truth.gradients[name] for name in wanted["gradients"]}
    if wrong is not None and wrong in results:
        results[wrong] = results[wrong] * results[wrong].dtype.type(1.01)
    save_file(
        {name: np.asarray(array, order="C") for name, array in results.items()}, folder / "run.safetensors"
    )
    (folder / "run.json").write_text(json.dumps({"backend": "standalone", "info": {"numpy": np.__version__}}))


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).rglob("case.json")):
        answer(path.parent, sys.argv[2] if len(sys.argv) > 2 else None)
    assert not {"backends", "conformance", "execnet"} & sys.modules.keys()
