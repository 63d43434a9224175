"""The PyTorch backend: NumPy in and out, devices, dtypes."""

import os
from typing import Any

import numpy as np
import torch

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.torch import library, packing, switches, weights
from concord.backends.torch.model import PARTS
from concord.backends.torch.session import Session, multiply, synchronize, timed

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "torch"
    implementations = IMPLEMENTATIONS
    deviations = DEVIATIONS
    switches = switches
    weights = weights
    session_type = Session
    multiply = staticmethod(multiply)
    synchronize = staticmethod(synchronize)
    timed = staticmethod(timed)

    def environment(self) -> dict[str, Any]:
        """Return version, devices, dtypes and threads."""
        return {
            "version": torch.__version__,
            "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            "threads": torch.get_num_threads(),
            "thread_switches": {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        }

    def build(self, request: Request, device: torch.device) -> torch.nn.Module:
        """Return the part of the model with the weights loaded."""
        model = self.implementation(request).parts[request.part](request.config).to(device=device, dtype=DTYPES[request.dtype]).eval()
        weights.load(model, request.config, request.weights, request.part)
        return model

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.max_memory_allocated(place)

    def device(self, name: str) -> torch.device:
        """Return the device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
            raise Unsupported(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices; {name!r} is not among them")
        return torch.device(name)

    def tensor(self, array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor
