"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config as framework

from concord.backends.switches import FrameworkSwitches


class Switches(FrameworkSwitches):
    """TensorFlow's (:class:`concord.backends.switches.FrameworkSwitches`)."""

    precisions = {"strict": {"tensor_float_32": False}, "tf32": {"tensor_float_32": True}}
    determinism = {"op_determinism": True}

    def read_back(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "tensor_float_32": tf.config.experimental.tensor_float_32_execution_enabled(),
            "op_determinism": framework.is_op_determinism_enabled(),
            "onednn_fpmath_mode": os.environ.get("TF_SET_ONEDNN_FPMATH_MODE"),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def full_products(self) -> bool:
        """Return whether GPUs compute products of float32 numbers in full, as imported."""
        return not self.defaults["tensor_float_32"]

    def put(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""
        tf.config.experimental.enable_tensor_float_32_execution(wanted["tensor_float_32"])

    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run."""
        # TensorFlow exports what switches it on, and not what switches it off.
        (tf.config.experimental.enable_op_determinism if on else framework.disable_op_determinism)()

    def has_tf32(self, device: str) -> bool:
        """Return whether a device has tensor cores for TF32."""
        if not device.startswith("/GPU:"):
            return False
        details = tf.config.experimental.get_device_details(
            tf.config.list_physical_devices("GPU")[int(device.removeprefix("/GPU:"))]
        )
        return details.get("compute_capability", (0, 0)) >= (8, 0)
