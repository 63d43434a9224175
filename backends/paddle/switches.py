"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from collections.abc import Mapping
from typing import Any

import paddle

from concord.backends.switches import FrameworkSwitches


class Switches(FrameworkSwitches):
    """PaddlePaddle's (:class:`concord.backends.switches.FrameworkSwitches`)."""

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

    def read_back(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "cublas_tf32": paddle.base.core.get_cublas_switch(),
            "cudnn_tf32": paddle.base.core.get_cudnn_switch(),
            **paddle.get_flags(list(self.determinism)),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def full_products(self) -> bool:
        """Return whether GPUs compute products of float32 numbers in full, as imported."""
        return not self.defaults["cublas_tf32"]

    def put(self, wanted: Mapping[str, Any]) -> None:
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
