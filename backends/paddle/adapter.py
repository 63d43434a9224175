"""The PaddlePaddle backend: NumPy in and out, devices, dtypes."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.paddle import library
from concord.backends.paddle.model import PARTS
from concord.backends.paddle.optimizers import optimizer
from concord.backends.paddle.session import Session, multiply, synchronize, timed
from concord.backends.paddle.switches import Switches
from concord.backends.paddle.weights import NativeWeights

DTYPES = {
    "float64": paddle.float64,
    "float32": paddle.float32,
    "bfloat16": paddle.bfloat16,
    "float16": paddle.float16,
}

# Its softmax and log-softmax clip what lies below the largest entry at -64, on the CPU and in float64 too.
KNOWN_DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [
        {"name": name, "value": -64.0, "reason": "the CPU kernel clips each entry less the largest at -64"}
        for name in ("softmax_floor", "log_softmax_floor")
    ],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "paddle"
    version = paddle.version.full_version
    dtypes = {"cpu": ["float64", "float32"], "cuda": list(DTYPES)}
    thread_switches = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
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
        return int(paddle.device.cuda.device_count())

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        return int(
            os.environ["OMP_NUM_THREADS"]
        )  # PaddlePaddle sets it when imported, to 1 unless it was set

    def place(self, kind: str, index: int) -> str:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""
        paddle.device.set_device(f"gpu:{index}" if kind == "cuda" else kind)  # the one for new tensors
        return str(paddle.device.get_device())

    def construct(self, part: Callable[..., nn.Layer], request: Request, device: str) -> nn.Layer:
        """Return a part of the model in the dtype of a request, on a device, for weights to be loaded into it."""
        if device == "cpu" and request.dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle {self.version} has no {request.dtype} matrix product on cpu")
        paddle.set_default_dtype(DTYPES[request.dtype])  # in which parameters and constants are made
        try:
            return part(request.config).to(device=device).eval()
        finally:
            paddle.set_default_dtype("float32")

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> paddle.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = paddle.to_tensor(np.ascontiguousarray(array), place=device)
        return tensor.astype(DTYPES[dtype]) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(place)
        return int(paddle.device.cuda.max_memory_allocated(place))
