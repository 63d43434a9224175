"""A BERT exported to ONNX, in ONNX Runtime and in OpenVINO.

By default OpenVINO computes in bfloat16 where the processor can. That is right by the rules of bfloat16, if
the reference is in bfloat16 too.
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
    """Return the precision of OpenVINO for a graph, and a function that runs it."""
    import onnx
    import openvino

    graph = onnx.load(path)
    # The exporter records the module of each node, so that results of modules can become outputs.
    names = show(graph.graph, [name for name, _ in model.named_modules() if name])
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(graph.SerializeToString()), "CPU", settings)

    def run(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        results = compiled(inputs)
        hidden, pooled = (results[place] for place in range(2))
        outputs = {"output[last_hidden_state]": hidden, "output[pooler_output]": pooled}
        return {path: results[name] for path, name in names.items()} | outputs

    return compiled.get_property("INFERENCE_PRECISION_HINT").to_string(), run


def main() -> None:
    needs("transformers", *TRANSFORMERS)
    needs("exported", *REQUIREMENTS)
    model: Any = bert()
    path = str(FOLDER / "bert.onnx")
    torch.onnx.export(model, (), path, kwargs=texts(), dynamo=True, verbose=False)
    judge("ONNX Runtime", model, path)
    precision, run = in_openvino(path, model)
    judge(f"OpenVINO with default settings: {precision}", model, run)
    judge("OpenVINO, float32", model, in_openvino(path, model, INFERENCE_PRECISION_HINT="f32")[1])
    if precision == "bf16":
        judge("OpenVINO in bfloat16, judged by bfloat16 rules", copy.deepcopy(model).bfloat16(), run)


if __name__ == "__main__":
    main()
