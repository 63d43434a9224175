"""OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino

from concord.backends.interface import Request
from concord.speed.peers.graph import Engine

TYPES = {"float32": openvino.Type.f32, "bfloat16": openvino.Type.bf16}


class OpenVinoPeer(Engine):
    """OpenVINO, at a given precision."""

    name = "openvino"
    version = f"openvino {openvino.__version__}"
    dtypes = tuple(TYPES)

    def opened(self, path: Path, request: Request) -> Any:
        """A compiled model."""
        properties = {
            # By default OpenVINO chooses a precision for the processor.
            "INFERENCE_PRECISION_HINT": TYPES[request.dtype],
            "EXECUTION_MODE_HINT": "ACCURACY",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": self.threads,
        }
        return openvino.Core().compile_model(path, "CPU", properties)

    def run_graph(self, graph: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits (B, C)."""
        return graph(inputs)["logits"]
