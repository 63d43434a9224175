"""ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from concord.backends.interface import Request
from concord.speed.peers.graph import Engine

CUDA = "CUDAExecutionProvider"


class OnnxRuntimePeer(Engine):
    """ONNX Runtime, in float32 only; on GPUs with the package onnxruntime-gpu."""

    name = "ort"
    version = f"onnxruntime {onnxruntime.__version__}"
    devices = ("cpu", "cuda") if CUDA in onnxruntime.get_available_providers() else ("cpu",)

    def opened(self, path: Path, request: Request) -> Any:
        """An inference session."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        kind, _, index = request.device.partition(":")
        on_gpu = CUDA, {"device_id": int(index or 0), "use_tf32": int(request.precision == "tf32")}
        return onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"] if kind == "cpu" else [on_gpu]
        )

    def run_graph(self, graph: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits (B, C)."""
        return graph.run(["logits"], inputs)[0]
