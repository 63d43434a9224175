"""ONNX Runtime, on Hugging Face's model as PyTorch exports it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from concord.backends.interface import Request, Session, Unsupported
from concord.spec.batch import Batch
from concord.speed.peers import Peer
from concord.speed.peers.hf import build, tensors

FILE = "model.onnx"

NAMES = ("input_ids", "attention_mask", "token_type_ids")


class Graph:
    """Forward passes (:class:`concord.backends.interface.Session`); weights are part of the graph."""

    def __init__(self, request: Request, threads: int | None) -> None:
        self.request, self.threads = request, threads
        self.feed(request.batch)
        model = build(request.config, request.weights)
        self.folder: tempfile.TemporaryDirectory[str] | None = _exported(model, self.inputs)
        self.running: onnxruntime.InferenceSession | None = None
        self.output: np.ndarray | None = None

    def feed(self, batch: Batch) -> None:
        """Take other inputs, of the same shapes."""
        self.inputs = {
            name: array for name, array in tensors(self.request.config, batch).items() if name in NAMES
        }

    def compile(self) -> None:
        """Optimise the graph, as far as ONNX Runtime does."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3
        if self.threads:
            options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        assert self.folder is not None
        self.running = onnxruntime.InferenceSession(
            Path(self.folder.name) / FILE, options, providers=["CPUExecutionProvider"]
        )
        self.folder = self.folder.cleanup()

    def step(self) -> None:
        """Run one forward pass."""
        assert self.running is not None
        (self.output,) = self.running.run(["logits"], self.inputs)

    def synchronize(self) -> None:
        """Do nothing: a step ends when it is done."""

    def timed(self, steps: int) -> list[float]:
        """Refuse: it is on no device but the CPU."""
        raise Unsupported("ort is measured on cpu alone")

    def results(self) -> dict[str, np.ndarray]:
        """Return the logits (B, C)."""
        assert self.output is not None
        return {"logits": self.output}

    def state(self) -> dict[str, np.ndarray]:
        """Return nothing: the parameters are part of the graph, and there is no optimizer."""
        return {}


class OnnxRuntimePeer(Peer):
    """The peer (:class:`concord.backends.interface.Measurable`)."""

    name = "ort"

    def describe(self) -> dict[str, Any]:
        """Return versions, devices and threads."""
        return {
            "version": f"onnxruntime {onnxruntime.__version__}",
            "devices": ["cpu"],
            "dtypes": {"cpu": ["float32"]},
            "threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1),
            "thread_switches": {"intra_op_num_threads": os.environ.get("OMP_NUM_THREADS")},
        }

    def session(self, request: Request) -> Session:
        """Export the model and load it, to be run many times."""
        if (
            request.implementation != "library"
            or request.execution != "compiled"
            or request.gradients
            or request.device != "cpu"
        ):
            raise Unsupported(
                "ort runs optimised graphs on cpu: --implementation library, --execution compiled, --kind "
                "inference"
            )
        if request.dtype != "float32":
            raise Unsupported(f"ort is measured in float32, not in {request.dtype}")
        threads = os.environ.get("OMP_NUM_THREADS")
        return Graph(request, int(threads) if threads else None)


def _exported(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the model as an ONNX file, and its weights in another."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    arguments = {name: torch.from_numpy(array) for name, array in inputs.items()}
    folder = tempfile.TemporaryDirectory()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder.name) / FILE
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=arguments,
            input_names=list(arguments),
            output_names=["logits"],
            dynamo=True,
            external_data=True,
        )
    return folder
