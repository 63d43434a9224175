"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from collections.abc import Callable
from typing import Any

import torch

from concord.backends.interface import Request


def _told(switch: Callable[[], Any]) -> Any:
    """Return what a switch says: PyTorch raises an error once somebody has set fp32_precision, which is newer, besides."""
    try:
        return switch()
    except RuntimeError:
        return f"mixed up with fp32_precision = {torch.backends.cuda.matmul.fp32_precision}"


def read_back() -> dict[str, Any]:
    """Return every switch as it is now, with what the environment says of it."""
    return {
        "float32_matmul_precision": _told(torch.get_float32_matmul_precision),
        "cudnn_allow_tf32": _told(lambda: torch.backends.cudnn.allow_tf32),
        "allow_bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }


DEFAULTS = read_back()
"""The switches as they were when the framework was imported: nothing has been set before this."""

SET = ("float32_matmul_precision", "cudnn_allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Those of them that a precision sets."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "strict": dict(zip(SET, ("highest", False, False, False), strict=True)),
    "tf32": dict(zip(SET, ("high", True, False, False), strict=True)),
    "default": {name: DEFAULTS[name] for name in SET},
}
"""What each of :data:`concord.backends.interface.PRECISION_MODES` sets."""


def set_precision(mode: str) -> None:
    """Have products of float32 numbers computed in one of :data:`concord.backends.interface.PRECISION_MODES`."""
    wanted = PRECISIONS[mode]
    # The older switches alone: PyTorch raises an error where those and fp32_precision are mixed.
    torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
    torch.backends.cudnn.allow_tf32 = wanted["cudnn_allow_tf32"]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = wanted["allow_bf16_reduced_precision_reduction"]
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = wanted["allow_fp16_reduced_precision_reduction"]


def set_determinism(on: bool) -> None:
    """Have only kernels run that give the same bits each time, or let any run."""
    torch.use_deterministic_algorithms(on, warn_only=False)


def wanted(request: Request) -> dict[str, Any]:
    """Return the switches that a request sets, as they have to be still when it is done."""
    return {**PRECISIONS[request.precision], **({"deterministic_algorithms": True} if request.deterministic else {})}


def defaults() -> dict[str, Any]:
    """Return the switches as imported, and in which arithmetic float32 products then run on each kind of device."""
    return {**DEFAULTS, "products": {"cpu": "float32", "cuda": "float32" if DEFAULTS["float32_matmul_precision"] == "highest" else "tf32"}}


def has_tf32(device: torch.device) -> bool:
    """Return whether a device has tensor cores for TF32."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)
