"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from concord.backends.switches import FrameworkSwitches

REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Of ``torch.backends.cuda.matmul``: whether half precisions may be summed in themselves."""


class Switches(FrameworkSwitches):
    """PyTorch's (:class:`concord.backends.switches.FrameworkSwitches`)."""

    precisions = {
        "strict": {
            "float32_matmul_precision": "highest",
            "cudnn_allow_tf32": False,
            **dict.fromkeys(REDUCED, False),
        },
        "tf32": {
            "float32_matmul_precision": "high",
            "cudnn_allow_tf32": True,
            **dict.fromkeys(REDUCED, False),
        },
    }
    determinism = {"deterministic_algorithms": True}

    def read_back(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "float32_matmul_precision": _told(torch.get_float32_matmul_precision),
            "cudnn_allow_tf32": _told(lambda: torch.backends.cudnn.allow_tf32),
            **{name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED},
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def full_products(self) -> bool:
        """Return whether GPUs compute products of float32 numbers in full, as imported."""
        return bool(self.defaults["float32_matmul_precision"] == "highest")

    def put(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""
        # The older switches alone: PyTorch raises an error where those and fp32_precision are mixed.
        torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
        torch.backends.cudnn.allow_tf32 = wanted["cudnn_allow_tf32"]
        for name in REDUCED:
            setattr(torch.backends.cuda.matmul, name, wanted[name])

    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run."""
        torch.use_deterministic_algorithms(on, warn_only=False)

    def has_tf32(self, device: torch.device) -> bool:
        """Return whether a device has tensor cores for TF32."""
        return (
            device.type == "cuda"
            and torch.version.cuda is not None
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )


def _told(switch: Callable[[], Any]) -> Any:
    """Return what a switch says: PyTorch raises an error once somebody has set fp32_precision, which is newer, besides."""
    try:
        return switch()
    except RuntimeError:
        return f"mixed up with fp32_precision = {torch.backends.cuda.matmul.fp32_precision}"
