"""The PaddlePaddle backend: NumPy in and out, devices, dtypes."""

import os
from typing import Any

import numpy as np
import paddle

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.paddle import library, packing, switches, weights
from concord.backends.paddle.model import PARTS
from concord.backends.paddle.session import Session, multiply, synchronize, timed

DTYPES = {"float64": paddle.float64, "float32": paddle.float32, "bfloat16": paddle.bfloat16, "float16": paddle.float16}

# Its softmax and log-softmax clip what lies below the largest entry at -64, on the CPU and in float64 too.
DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"name": name, "value": -64.0, "reason": "the CPU kernel clips each entry less the largest at -64"} for name in ("softmax_floor", "log_softmax_floor")],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "paddle"
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
            "version": paddle.version.full_version,
            "devices": ["cpu", *(f"cuda:{i}" for i in range(paddle.device.cuda.device_count()))],
            "dtypes": {"cpu": ["float64", "float32"], "cuda": list(DTYPES)},
            "threads": int(os.environ["OMP_NUM_THREADS"]),  # PaddlePaddle sets it when imported, to 1 unless it was set
            "thread_switches": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")},
        }

    def build(self, request: Request, device: str) -> paddle.nn.Layer:
        """Return the part of the model with the weights loaded."""
        if device == "cpu" and request.dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle {paddle.version.full_version} has no {request.dtype} matrix product on cpu")
        model = self.implementation(request).parts[request.part](request.config).to(device=device, dtype=DTYPES[request.dtype]).eval()
        weights.load(model, request.config, request.weights, request.part)
        return model

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device)
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(place)
        return int(paddle.device.cuda.max_memory_allocated(place))

    def device(self, name: str) -> str:
        """Return the device of that name, and make it the one for new tensors.

        Raises:
            Unsupported: if this machine has none.
        """
        count = paddle.device.cuda.device_count()
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
            raise Unsupported(f"paddle {paddle.version.full_version} sees {count} CUDA devices; {name!r} is not among them")
        paddle.set_device(name.replace("cuda", "gpu"))
        return paddle.get_device()

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> paddle.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = paddle.to_tensor(np.ascontiguousarray(array), place=device)
        return tensor.astype(DTYPES[dtype]) if tensor.is_floating_point() else tensor
