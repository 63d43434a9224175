"""Hugging Face's model as an ONNX graph, for engines on the CPU."""

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

from concord.backends.cores import available_cores
from concord.backends.interface import Request, Unsupported
from concord.speed.peers.hf import build, tensors

FILE = "model.onnx"

NAMES = ("input_ids", "attention_mask", "token_type_ids")


class Graph:
    """A session for the forward pass of a graph."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.dtype = engine, request.dtype
        inputs = tensors(request.config, request.batch)
        self.inputs = {name: inputs[name] for name in NAMES}
        self.folder = _exported(build(request.config, request.weights), self.inputs)

    def compile(self) -> None:
        """Load and optimise the graph."""
        self.running = self.engine.opened(Path(self.folder.name) / FILE, self.dtype)
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

    @abstractmethod
    def opened(self, path: Path, dtype: str) -> Any:
        """A graph that is ready to run in ``dtype``."""

    @abstractmethod
    def run_graph(self, graph: Any, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """Logits (B, C)."""

    @property
    def threads(self) -> int | None:
        """The number of threads, or None for the engine's default."""
        return int(os.environ.get("OMP_NUM_THREADS", "0")) or None

    def describe(self) -> dict[str, Any]:
        """Versions, devices and threads."""
        return {
            "version": self.version,
            "devices": ["cpu"],
            "dtypes": {"cpu": list(self.dtypes)},
            "threads": self.threads or available_cores(),
            "thread_switches": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        }

    def session(self, request: Request) -> Graph:
        """Export the model and load it."""
        if (
            request.implementation != "library"
            or request.execution != "compiled"
            or request.gradients
            or request.device != "cpu"
        ):
            raise Unsupported(
                f"{self.name} runs only optimised graphs, on cpu: --implementation library, --execution "
                "compiled, --kind inference"
            )
        if request.dtype not in self.dtypes:
            raise Unsupported(f"{self.name} is measured in {', '.join(self.dtypes)}, not in {request.dtype}")
        return Graph(self, request)


def _exported(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> tempfile.TemporaryDirectory[str]:
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
