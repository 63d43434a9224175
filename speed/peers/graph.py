"""Hugging Face's model as an ONNX graph, for inference engines."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from concord.backends.interface import Request, Unsupported, refuse_tf32
from concord.speed.peers.hf import build, tensors


class Graph:
    """A session for the forward pass of a graph."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self.inputs = tensors(request.config, request.batch)
        del self.inputs["labels"]
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "model.onnx"
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            torch.onnx.export(
                build(request.config, request.weights),
                (),
                self.path,
                kwargs={name: torch.from_numpy(array) for name, array in self.inputs.items()},
                input_names=list(self.inputs),
                output_names=["logits"],
                dynamo=True,
                external_data=True,
            )

    def compile(self) -> None:
        """Load and optimise the graph."""
        self.running = self.engine.opened(self.path, self.request)
        self.folder.cleanup()

    def step(self) -> None:
        """Run one forward pass."""
        self.logits = self.engine.run_graph(self.running, self.inputs)

    def synchronize(self) -> None:
        """Do nothing; steps are synchronous."""

    def results(self) -> dict[str, np.ndarray]:
        """Logits (B, C)."""
        return {"logits": self.logits}


class Engine(ABC):
    """An engine for ONNX graphs, without judgement by tensor."""

    name = ""
    version = ""
    dtypes: tuple[str, ...] = ("float32",)
    devices: tuple[str, ...] = ("cpu",)  # kinds

    @abstractmethod
    def opened(self, path: Path, request: Request) -> Any:
        """A graph that is ready to run in the request's precision, on its device."""

    @abstractmethod
    def run_graph(self, graph: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits (B, C)."""

    @property
    def threads(self) -> int:
        """The number of threads, which every worker's environment states."""
        return int(os.environ["OMP_NUM_THREADS"])

    def describe(self) -> dict[str, Any]:
        """Versions, devices and threads."""
        return {
            "version": self.version,
            "devices": list(self.devices),
            "dtypes": {kind: list(self.dtypes) for kind in self.devices},
            "threads": self.threads,
            "thread_switches": {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]},
        }

    def session(self, request: Request) -> Graph:
        """Export the model and load it."""
        if request.gradients or request.device.partition(":")[0] not in self.devices:
            raise Unsupported(f"{self.name} runs only inference, on {' and '.join(self.devices)}")
        refuse_tf32(self.name, request, request.device != "cpu")
        if request.dtype not in self.dtypes:
            raise Unsupported(f"{self.name} is measured in {', '.join(self.dtypes)}, not in {request.dtype}")
        return Graph(self, request)
