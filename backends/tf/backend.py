"""The TensorFlow backend. Shapes: M rows, N columns."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow import Tensor
from tensorflow.python.framework import config as framework

from concord.backends.adapter import FrameworkAdapter
from concord.backends.cores import available_cores
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.session import FrameworkSession
from concord.backends.tf import library, optimizers, training
from concord.backends.tf.model import PARTS


def _named_layers(layer: keras.Layer, path: str = "") -> Iterator[tuple[str, keras.Layer]]:
    yield path, layer
    for child in layer._flatten_layers(include_self=False, recursive=False):
        yield from _named_layers(child, f"{path}.{child.name}".removeprefix("."))


class ModelSession(FrameworkSession):
    """A :class:`concord.backends.interface.Session`."""

    def traced(
        self, function: Callable[..., Any], *given: Any, replaced: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        return (
            tf.function(function, autograph=False, jit_compile=True).get_concrete_function(*given)
            if self.compiled
            else function
        )

    def number(self, value: float) -> Tensor:
        return tf.constant(value, dtype=self.request.dtype)


class Adapter(FrameworkAdapter):
    """A :class:`concord.backends.interface.Backend`."""

    name = "tf"
    version = f"{tf.__version__} (keras {keras.__version__})"
    thread_switches = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    implementations = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}
    # On the CPU BiasAddGrad accumulates bfloat16 terms in bfloat16, and float16 terms in float32.
    known_deviations = {
        "cpu": [
            {
                "name": "narrow_bias_gradients",
                "value": 1,
                "reason": "BiasAddGrad on the CPU accumulates in bfloat16 term by term",
            }
        ],
        "cuda": [],
    }
    training, optimizers = training, optimizers
    precisions = {"strict": {"tensor_float_32": False}, "tf32": {"tensor_float_32": True}}
    determinism = {"op_determinism": True}
    session_type = ModelSession

    def cuda_devices(self) -> int:
        return len(tf.config.list_physical_devices("GPU"))

    def threads(self) -> int:
        # TensorFlow returns 0 if Python code has not set it; the environment or the number of cores then
        # decides.
        return tf.config.threading.get_intra_op_parallelism_threads() or int(
            os.environ.get("TF_NUM_INTRAOP_THREADS") or available_cores()
        )

    def place(self, kind: str, index: int) -> str:
        return f"/GPU:{index}" if kind == "cuda" else "/CPU:0"

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        # TensorFlow uses the first GPU, wherever the operands are.
        with tf.device(self.device(request.device)), _refusing_missing_kernels(request.dtype):
            yield

    def construct(self, part: Callable[..., keras.Model], request: Request, device: str) -> keras.Model:
        keras.config.disable_traceback_filtering()  # shows TensorFlow's own errors, which Keras would wrap
        model = part(request.config, dtype=request.dtype)
        model.build()
        return model

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> tf.Tensor:
        with tf.device(device):
            return tf.constant(array, dtype=dtype if np.issubdtype(array.dtype, np.floating) else array.dtype)

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        place = self.device(device).removeprefix("/")
        if reset:
            tf.config.experimental.reset_memory_stats(place)
        return int(tf.config.experimental.get_memory_info(place)["peak"])

    def event(self) -> Any:
        return None

    def layers(self, model: keras.Model) -> Iterable[tuple[str, keras.Layer]]:
        return _named_layers(model)

    def call(self, model: keras.Model, inputs: Mapping[str, Tensor]) -> Tensor:
        return model(inputs)

    def synchronize(self, computed: Tensor | None) -> None:
        tf.experimental.async_wait() if computed is None else computed[(0,) * computed.shape.rank].numpy()

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        with tf.device(left.device):  # otherwise the first GPU would get copies of both
            return tf.matmul(left, right)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        return {
            "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
            "op_determinism": framework.is_op_determinism_enabled(),
            "onednn_fpmath_mode": os.environ.get("TF_SET_ONEDNN_FPMATH_MODE"),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        tf.config.experimental.enable_tensor_float_32_execution(wanted["tensor_float_32"])

    def set_determinism(self, on: bool) -> None:
        # TensorFlow exports the function that enables determinism, but not the one that disables it.
        (tf.config.experimental.enable_op_determinism if on else framework.disable_op_determinism)()

    def has_tf32(self, device: str) -> bool:
        if not device.startswith("/GPU:"):
            return False
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[int(device.removeprefix("/GPU:"))]
        )
        return details.get("compute_capability", (0, 0)) >= (8, 0)

    # Weights.

    def assign(self, parameter: keras.Variable, array: np.ndarray) -> None:
        # Not tf.cast, which converts to float16 through float32 and flushes subnormal numbers to zero.
        parameter.assign(tf.constant(array, dtype=parameter.dtype))

    def to_numpy(self, tensor: Tensor | keras.Variable) -> np.ndarray:
        array = tf.convert_to_tensor(tensor).numpy()
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array


# TensorFlow has no exception for a missing kernel; its messages contain one of these.
_NO_KERNEL = (
    "not find device for node",
    "in the list of allowed values",
    "in list of allowed values",
    "unsupported operations",
)


@contextmanager
def _refusing_missing_kernels(dtype: str) -> Iterator[None]:
    try:
        yield
    except (tf.errors.OpError, TypeError) as error:
        missing = isinstance(error, tf.errors.UnimplementedError) or any(
            words in str(error) for words in _NO_KERNEL
        )
        if dtype not in ("bfloat16", "float16") or not missing:
            raise
        raise Unsupported(f"tensorflow {tf.__version__} has no kernel in {dtype}: {error}") from error
