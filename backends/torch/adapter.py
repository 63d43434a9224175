"""The PyTorch backend: NumPy in and out, devices, dtypes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request
from concord.backends.torch import library
from concord.backends.torch.model import PARTS
from concord.backends.torch.optimizers import optimizer
from concord.backends.torch.session import Session, multiply, synchronize, timed
from concord.backends.torch.switches import Switches
from concord.backends.torch.weights import NativeWeights

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

KNOWN_DEVIATIONS: dict[str, list[dict[str, Any]]] = {"cpu": [], "cuda": []}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "torch"
    version = torch.__version__
    dtypes = {kind: list(DTYPES) for kind in ("cpu", "cuda")}
    thread_switches = ("OMP_NUM_THREADS",)
    implementations = IMPLEMENTATIONS
    known_deviations = KNOWN_DEVIATIONS
    switches = Switches()
    weights = NativeWeights()
    session_type = Session
    optimizer = staticmethod(optimizer)
    multiply = staticmethod(multiply)
    synchronize = staticmethod(synchronize)
    timed = staticmethod(timed)

    def cuda_devices(self) -> int:
        """Return the number of CUDA devices that the framework sees."""
        return torch.cuda.device_count()

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        return torch.get_num_threads()

    def place(self, kind: str, index: int) -> torch.device:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""
        return torch.device(kind, index) if kind == "cuda" else torch.device(kind)

    def construct(self, part: Callable[..., nn.Module], request: Request, device: torch.device) -> nn.Module:
        """Return a part of the model in the dtype of a request, on a device, for weights to be loaded into it."""
        return part(request.config, device=device, dtype=DTYPES[request.dtype]).eval()

    def tensor(self, array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.max_memory_allocated(place)
