"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config as framework

from concord.backends.interface import Request


def read_back() -> dict[str, Any]:
    """Return every switch as it is now, with what the environment says of it."""
    return {
        "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "op_determinism": framework.is_op_determinism_enabled(),
        "onednn_fpmath_mode": os.environ.get("TF_SET_ONEDNN_FPMATH_MODE"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }


DEFAULTS = read_back()
"""The switches as they were when the framework was imported: nothing has been set before this."""

SET = ("tensor_float_32",)
"""Those of them that a precision sets."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "strict": dict(zip(SET, (False,), strict=True)),
    "tf32": dict(zip(SET, (True,), strict=True)),
    "default": {name: DEFAULTS[name] for name in SET},
}
"""What each of :data:`concord.backends.interface.PRECISION_MODES` sets."""


def set_precision(mode: str) -> None:
    """Have products of float32 numbers computed in one of :data:`concord.backends.interface.PRECISION_MODES`."""
    wanted = PRECISIONS[mode]
    tf.config.experimental.enable_tensor_float_32_execution(wanted["tensor_float_32"])


def set_determinism(on: bool) -> None:
    """Have only kernels run that give the same bits each time, or let any run."""
    # TensorFlow exports what switches it on, and not what switches it off.
    (tf.config.experimental.enable_op_determinism if on else framework.disable_op_determinism)()


def wanted(request: Request) -> dict[str, Any]:
    """Return the switches that a request sets, as they have to be still when it is done."""
    return {**PRECISIONS[request.precision], **({"op_determinism": True} if request.deterministic else {})}


def defaults() -> dict[str, Any]:
    """Return the switches as imported, and in which arithmetic float32 products then run on each kind of device."""
    return {**DEFAULTS, "products": {"cpu": "float32", "cuda": "tf32" if DEFAULTS["tensor_float_32"] else "float32"}}


def has_tf32(device: str) -> bool:
    """Return whether a device has tensor cores for TF32."""
    if not device.startswith("/GPU:"):
        return False
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[int(device.removeprefix("/GPU:"))])
    return details.get("compute_capability", (0, 0)) >= (8, 0)
