"""The PaddlePaddle backend: NumPy in and out, devices, dtypes, switches, and a session on a model.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.paddle import library, optimizers, training
from concord.backends.paddle.model import PARTS
from concord.backends.session import FrameworkSession
from concord.spec.precision import PRECISIONS


class ModelSession(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    def prepare(self) -> None:
        """Do once what a framework needs before it compiles."""
        # Static programs overwrite tensors that they return, if allowed to compute in place.
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        # Every static program that ran stays in memory until this cache is cleared.
        paddle.base.core.clear_executor_cache()

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for and it is not by itself."""
        if not self.compiled or self.implementation.finish:
            return self.evaluate

        def evaluate(
            model: nn.Layer,
            inputs: Mapping[str, Tensor],
            zeros: Mapping[str, Tensor],
            recorded: bool,
            with_loss: bool = True,
        ) -> Any:
            return self.evaluate(model, inputs, zeros, recorded, with_loss)

        plain = paddle.jit.not_to_static(evaluate)  # traced as it stands: no branch depends on a value
        return paddle.jit.to_static(plain, full_graph=True, backend=None)

    def forget(self) -> None:
        """Let go of what was compiled: PaddlePaddle keeps every static program that ran."""
        paddle.base.core.clear_executor_cache()


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "paddle"
    version = paddle.version.full_version
    dtypes = {"cpu": ["float64", "float32"], "cuda": list(PRECISIONS)}
    thread_switches = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
    implementations = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}
    # Its softmax and log-softmax clip what lies below the largest entry at -64, in float64 too.
    known_deviations = {
        "cpu": [
            {
                "name": name,
                "value": -64.0,
                "reason": "the CPU kernel clips each entry less the largest at -64",
            }
            for name in ("softmax_floor", "log_softmax_floor")
        ],
        "cuda": [],
    }
    training, optimizers = training, optimizers
    precisions = {
        "strict": {"cublas_tf32": False, "cudnn_tf32": False},
        "tf32": {"cublas_tf32": True, "cudnn_tf32": True},
    }
    # The wheel for CPUs has no such flags, and raises an error for them.
    determinism = (
        {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
        if paddle.device.is_compiled_with_cuda()
        else {}
    )
    session_type = ModelSession

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
        """Return a part of the model in the dtype of a request, on a device, without its weights."""
        if device == "cpu" and request.dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle {self.version} has no {request.dtype} matrix product on cpu")
        paddle.set_default_dtype(getattr(paddle, request.dtype))  # in which parameters and constants are made
        try:
            return part(request.config).to(device=device).eval()
        finally:
            paddle.set_default_dtype("float32")

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> paddle.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = paddle.to_tensor(np.ascontiguousarray(array), place=device)
        return tensor.astype(getattr(paddle, dtype)) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device."""
        place = self.device(device)
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(place)
        return int(paddle.device.cuda.max_memory_allocated(place))

    def event(self) -> Any:
        """Return an event of the device's clock; None if the framework does not give it away."""
        return paddle.device.Event(enable_timing=True)

    def layers(self, model: nn.Layer) -> Iterable[tuple[str, nn.Layer]]:
        """Return all layers of a model with their paths."""
        return model.named_sublayers(include_self=True)

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return what computes without a thought of gradients."""
        return paddle.no_grad()

    def synchronize(self, computed: Tensor | None) -> None:
        """Wait until the device of a tensor is done."""
        if computed is not None and computed.place.is_gpu_place():
            paddle.device.synchronize()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Start a matrix product: (M, K) and (K, N) to (M, N)."""
        return paddle.matmul(left, right, transpose_x=False, transpose_y=False)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "cublas_tf32": paddle.base.core.get_cublas_switch(),
            "cudnn_tf32": paddle.base.core.get_cudnn_switch(),
            **paddle.get_flags(list(self.determinism)),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""
        paddle.base.core.set_cublas_switch(wanted["cublas_tf32"])
        paddle.base.core.set_cudnn_switch(wanted["cudnn_tf32"])

    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run."""
        paddle.set_flags({name: value if on else type(value)(0) for name, value in self.determinism.items()})

    def has_tf32(self, device: str) -> bool:
        """Return whether a device has tensor cores for TF32."""
        return device.startswith("gpu:") and paddle.device.cuda.get_device_capability(
            int(device.removeprefix("gpu:"))
        ) >= (8, 0)

    # Weights.

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        with paddle.no_grad():
            parameter.set_value(paddle.to_tensor(array, place=parameter.place).astype(parameter.dtype))

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        tensor = tensor.detach().cpu()
        return (
            tensor.astype(paddle.float32) if tensor.dtype in (paddle.bfloat16, paddle.float16) else tensor
        ).numpy()
