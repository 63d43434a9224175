"""A BERT's export to ONNX, in ONNX Runtime and in OpenVINO.

OpenVINO computes in bfloat16 where the processor can, unless it is told otherwise. A run in bfloat16
is right by the rules of bfloat16: then the reference is the module in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from small import FOLDER, TRANSFORMERS, bert, judge, needs, texts

from concord.conformance.compare.candidates import show

REQUIREMENTS = ("onnx>=1.18", "onnxruntime>=1.22", "onnxscript>=0.5", "onnx_ir>=0.1", "openvino>=2026")


def in_openvino(path: str, model: Any, **settings: str) -> tuple[str, Callable[..., dict[str, np.ndarray]]]:
    """Return the precision in which OpenVINO computes a graph, and a function that does.

    It gives what the modules return too, where the exporter noted which nodes are whose.
    """
    import onnx
    import openvino

    graph = onnx.load(path)
    shown = show(graph.graph, [name for name, _ in model.named_modules() if name])
    core = openvino.Core()
    made = core.compile_model(core.read_model(graph.SerializeToString()), "CPU", settings)

    def run(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        found = made(inputs)
        hidden, pooled = (found[place] for place in range(2))
        outputs = {"output[last_hidden_state]": hidden, "output[pooler_output]": pooled}
        return {path: found[name] for path, name in shown.items()} | outputs

    return made.get_property("INFERENCE_PRECISION_HINT").to_string(), run


def main() -> None:
    needs("transformers", *TRANSFORMERS)
    needs("exported", *REQUIREMENTS)
    model: Any = bert()
    path = str(FOLDER / "bert.onnx")
    torch.onnx.export(model, (), path, kwargs=texts(), dynamo=True, verbose=False)
    judge("ONNX Runtime", model, path)
    precision, run = in_openvino(path, model)
    judge(f"OpenVINO as it comes: {precision}", model, run)
    judge("OpenVINO, float32", model, in_openvino(path, model, INFERENCE_PRECISION_HINT="f32")[1])
    if precision == "bf16":
        judge("OpenVINO, bfloat16 by its own rules", copy.deepcopy(model).bfloat16(), run)


if __name__ == "__main__":
    main()
