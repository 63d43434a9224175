"""ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from concord.speed.peers.graph import Engine


class OnnxRuntimePeer(Engine):
    """ONNX Runtime, in float32 only."""

    name = "ort"
    version = f"onnxruntime {onnxruntime.__version__}"

    def opened(self, path: Path, dtype: str) -> Any:
        """An inference session."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3
        if self.threads:
            options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run_graph(self, graph: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits (B, C)."""
        return graph.run(["logits"], inputs)[0]
