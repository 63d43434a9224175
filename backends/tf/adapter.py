"""The TensorFlow backend: NumPy in and out, devices, dtypes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request, Unsupported
from concord.backends.tf import library, packing, switches, weights
from concord.backends.tf.model import PARTS
from concord.backends.tf.session import Session, multiply, synchronize, timed

DTYPES = {"float64": tf.float64, "float32": tf.float32, "bfloat16": tf.bfloat16, "float16": tf.float16}

# BiasAddGrad adds up in bfloat16 from term to term, on the CPU; in float16 it accumulates in float32.
DEVIATIONS: dict[str, list[dict[str, Any]]] = {
    "cpu": [{"name": "narrow_bias_gradients", "value": 1, "reason": "BiasAddGrad on the CPU adds up in bfloat16 from term to term"}],
    "cuda": [],
}

IMPLEMENTATIONS = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS, **packing.IMPLEMENTATIONS}


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

    name = "tf"
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
        controls = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        return {
            "version": f"{tf.__version__} (keras {keras.__version__})",
            "devices": ["cpu", *(f"cuda:{i}" for i in range(len(tf.config.list_physical_devices("GPU"))))],
            "dtypes": {device: list(DTYPES) for device in ("cpu", "cuda")},
            # TensorFlow says 0 where nothing was set from Python: then the environment decides, or the number of cores.
            "threads": tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ.get(controls[0]) or os.cpu_count() or 1),
            "thread_switches": {name: os.environ.get(name) for name in controls},
        }

    @contextmanager
    def within(self, request: Request) -> Iterator[None]:
        """Do what a block does on the device of a request: TensorFlow takes the first GPU, wherever the operands lie."""
        with tf.device(self.device(request.device)), _refusing_missing_kernels(request.dtype):
            yield

    def build(self, request: Request, device: str) -> keras.layers.Layer:
        """Return the part of the model with the weights loaded."""
        # Errors in the words of TensorFlow; Keras would wrap them.
        keras.config.disable_traceback_filtering()
        keras.config.set_dtype_policy(request.dtype)
        with tf.device(device):
            model = self.implementation(request).parts[request.part](request.config)
            weights.load(model, request.config, request.weights, request.part)
        return model

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device (:meth:`concord.backends.interface.Measurable.peak_memory`)."""
        place = self.device(device).removeprefix("/")
        if reset:
            tf.config.experimental.reset_memory_stats(place)
        return int(tf.config.experimental.get_memory_info(place)["peak"])

    def device(self, name: str) -> str:
        """Return the device of that name.

        Raises:
            Unsupported: if this machine has none.
        """
        count = len(tf.config.list_physical_devices("GPU"))
        if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= count:
            raise Unsupported(f"tensorflow {tf.__version__} sees {count} CUDA devices; {name!r} is not among them")
        return f"/GPU:{name.partition(':')[2] or 0}" if name.startswith("cuda") else "/CPU:0"

    def tensor(self, array: np.ndarray, dtype: str, device: str) -> tf.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        with tf.device(device):
            return tf.constant(array, dtype=DTYPES[dtype] if np.issubdtype(array.dtype, np.floating) else array.dtype)


_NO_KERNEL = ("not find device for node", "in the list of allowed values", "in list of allowed values", "unsupported operations")


@contextmanager
def _refusing_missing_kernels(dtype: str) -> Iterator[None]:
    """Turn TensorFlow's report that it has no kernel for a half precision into a refusal (SPEC PRC-3)."""
    try:
        yield
    except (tf.errors.OpError, TypeError) as error:
        missing = isinstance(error, tf.errors.UnimplementedError) or any(words in str(error) for words in _NO_KERNEL)
        if dtype not in ("bfloat16", "float16") or not missing:
            raise
        raise Unsupported(f"tensorflow {tf.__version__} has no kernel in {dtype}: {error}") from error
