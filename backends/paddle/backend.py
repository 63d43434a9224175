"""The PaddlePaddle backend. Shapes: M rows, N columns."""

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
    """A :class:`concord.backends.interface.Session`."""

    def prepare(self) -> None:
        # In-place computation would make static programs overwrite tensors that they return.
        paddle.set_flags({"FLAGS_pir_apply_inplace_pass": False})
        # Every static program stays in memory until this cache is cleared.
        paddle.base.core.clear_executor_cache()

    def evaluation(self, captured: bool) -> Callable[..., Any]:
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

        # Traced without converting control flow, since no branch depends on a value.
        plain = paddle.jit.not_to_static(evaluate)
        return paddle.jit.to_static(plain, full_graph=True, backend=None)

    def forget(self) -> None:
        paddle.base.core.clear_executor_cache()


class Adapter(FrameworkAdapter):
    """A :class:`concord.backends.interface.Backend`."""

    name = "paddle"
    version = paddle.version.full_version
    dtypes = {"cpu": ["float64", "float32"], "cuda": list(PRECISIONS)}
    thread_switches = ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE")
    implementations = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}
    # Softmax and log-softmax clip shifted scores at -64, even in float64.
    known_deviations = {
        "cpu": [
            {
                "name": name,
                "value": -64.0,
                "reason": "the CPU kernel clips each entry, after subtracting the maximum, at -64",
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
    # The CPU wheel lacks these flags and raises an error for them.
    determinism = (
        {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}
        if paddle.device.is_compiled_with_cuda()
        else {}
    )
    session_type = ModelSession

    def cuda_devices(self) -> int:
        return int(paddle.device.cuda.device_count())

    def threads(self) -> int:
        return int(os.environ["OMP_NUM_THREADS"])  # PaddlePaddle sets it to 1 at import if unset

    def place(self, kind: str, index: int) -> str:
        paddle.device.set_device(f"gpu:{index}" if kind == "cuda" else kind)  # the device of new tensors
        return str(paddle.device.get_device())

    def construct(self, part: Callable[..., nn.Layer], request: Request, device: str) -> nn.Layer:
        if device == "cpu" and request.dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle {self.version} has no {request.dtype} matrix product on cpu")
        paddle.set_default_dtype(getattr(paddle, request.dtype))  # the dtype of new parameters and constants
        try:
            return part(request.config).to(device=device).eval()
        finally:
            paddle.set_default_dtype("float32")

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> paddle.Tensor:
        tensor = paddle.to_tensor(np.ascontiguousarray(array), place=device)
        return tensor.astype(getattr(paddle, dtype)) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        place = self.device(device)
        if reset:
            paddle.device.cuda.reset_max_memory_allocated(place)
        return int(paddle.device.cuda.max_memory_allocated(place))

    def event(self) -> Any:
        return paddle.device.Event(enable_timing=True)

    def layers(self, model: nn.Layer) -> Iterable[tuple[str, nn.Layer]]:
        return model.named_sublayers(include_self=True)

    def without_gradients(self) -> AbstractContextManager[Any]:
        return paddle.no_grad()

    def synchronize(self, computed: Tensor | None) -> None:
        if computed is not None and computed.place.is_gpu_place():
            paddle.device.synchronize()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return paddle.matmul(left, right, transpose_x=False, transpose_y=False)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        return {
            "cublas_tf32": paddle.base.core.get_cublas_switch(),
            "cudnn_tf32": paddle.base.core.get_cudnn_switch(),
            **paddle.get_flags(list(self.determinism)),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        paddle.base.core.set_cublas_switch(wanted["cublas_tf32"])
        paddle.base.core.set_cudnn_switch(wanted["cudnn_tf32"])

    def set_determinism(self, on: bool) -> None:
        paddle.set_flags({name: value if on else type(value)(0) for name, value in self.determinism.items()})

    def has_tf32(self, device: str) -> bool:
        return device.startswith("gpu:") and paddle.device.cuda.get_device_capability(
            int(device.removeprefix("gpu:"))
        ) >= (8, 0)

    # Weights.

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        with paddle.no_grad():
            parameter.set_value(paddle.to_tensor(array, place=parameter.place).astype(parameter.dtype))

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()
        return (
            tensor.astype(paddle.float32) if tensor.dtype in (paddle.bfloat16, paddle.float16) else tensor
        ).numpy()
