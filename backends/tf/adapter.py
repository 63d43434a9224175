"""The TensorFlow backend: NumPy in and out, devices, dtypes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.tf import library
from concord.backends.tf.model import PARTS
from concord.backends.tf.optimizers import optimizer
from concord.backends.tf.session import Session, multiply, synchronize, timed
from concord.backends.tf.switches import Switches
from concord.backends.tf.weights import NativeWeights

DTYPES = {"float64": tf.float64, "float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}

# BiasAddGrad adds up in bfloat16 from term to term, on the CPU; in float16 it accumulates in float32.
KNOWN_DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [
        {
            "name": "narrow_bias_gradients",
            "value": 1,
            "reason": "BiasAddGrad on the CPU adds up in bfloat16 from term to term",
        }
    ],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "tf"
    version = f"{tf.__version__} (keras {keras.__version__})"
    dtypes = {kind: list(DTYPES) for kind in ("cpu", "cuda")}
    thread_switches = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
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
        return len(tf.config.list_physical_devices("GPU"))

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        # TensorFlow says 0 where nothing was set from Python: then the environment decides, or the number of cores.
        return tf.config.threading.get_intra_op_parallelism_threads() or int(
            os.environ.get("TF_NUM_INTRAOP_THREADS") or os.cpu_count() or 1
        )

    def place(self, kind: str, index: int) -> str:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""
        return f"/GPU:{index}" if kind == "cuda" else "/CPU:0"

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Do what a block does on the device of a request: TensorFlow takes the first GPU, wherever the operands lie."""
        with tf.device(self.device(request.device)), _refusing_missing_kernels(request.dtype):
            yield

    def construct(self, part: Callable[..., keras.Model], request: Request, device: str) -> keras.Model:
        """Return a part of the model in the dtype of a request, on a device, for weights to be loaded into it."""
        keras.config.disable_traceback_filtering()  # errors in the words of TensorFlow; Keras would wrap them
        model = part(request.config, dtype=request.dtype)
        model.build()
        return model

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> tf.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        with tf.device(device):
            return tf.constant(
                array, dtype=DTYPES[dtype] if np.issubdtype(array.dtype, np.floating) else array.dtype
            )

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device).removeprefix("/")
        if reset:
            tf.config.experimental.reset_memory_stats(place)
        return int(tf.config.experimental.get_memory_info(place)["peak"])


_NO_KERNEL = (
    "not find device for node",
    "in the list of allowed values",
    "in list of allowed values",
    "unsupported operations",
)


@contextmanager
def _refusing_missing_kernels(dtype: str) -> Iterator[None]:
    """Turn TensorFlow's report that it has no kernel for a half precision into a refusal (SPEC PRC-3)."""
    try:
        yield
    except (tf.errors.OpError, TypeError) as error:
        missing = isinstance(error, tf.errors.UnimplementedError) or any(
            words in str(error) for words in _NO_KERNEL
        )
        if dtype not in ("bfloat16", "float16") or not missing:
            raise
        raise Unsupported(f"tensorflow {tf.__version__} has no kernel in {dtype}: {error}") from error
