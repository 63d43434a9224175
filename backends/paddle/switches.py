"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from typing import Any

import paddle

from concord.backends.interface import Request

# The wheel for CPUs has no such flags, and raises an error for them.
_DETERMINISTIC = {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1} if paddle.is_compiled_with_cuda() else {}


def read_back() -> dict[str, Any]:
    """Return every switch as it is now, with what the environment says of it."""
    return {
        "cublas_tf32": paddle.base.core.get_cublas_switch(),
        "cudnn_tf32": paddle.base.core.get_cudnn_switch(),
        **paddle.get_flags(list(_DETERMINISTIC)),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }


DEFAULTS = read_back()
"""The switches as they were when the framework was imported: nothing has been set before this."""

SET = ("cublas_tf32", "cudnn_tf32")
"""Those of them that a precision sets."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "strict": dict(zip(SET, (False, False), strict=True)),
    "tf32": dict(zip(SET, (True, True), strict=True)),
    "default": {name: DEFAULTS[name] for name in SET},
}
"""What each of :data:`concord.backends.interface.PRECISION_MODES` sets."""


def set_precision(mode: str) -> None:
    """Have products of float32 numbers computed in one of :data:`concord.backends.interface.PRECISION_MODES`."""
    wanted = PRECISIONS[mode]
    paddle.base.core.set_cublas_switch(wanted["cublas_tf32"])
    paddle.base.core.set_cudnn_switch(wanted["cudnn_tf32"])


def set_determinism(on: bool) -> None:
    """Have only kernels run that give the same bits each time, or let any run."""
    paddle.set_flags(_DETERMINISTIC if on else {name: type(value)(0) for name, value in _DETERMINISTIC.items()})


def wanted(request: Request) -> dict[str, Any]:
    """Return the switches that a request sets, as they have to be still when it is done."""
    return {**PRECISIONS[request.precision], **(_DETERMINISTIC if request.deterministic else {})}


def defaults() -> dict[str, Any]:
    """Return the switches as imported, and in which arithmetic float32 products then run on each kind of device."""
    return {**DEFAULTS, "products": {"cpu": "float32", "cuda": "tf32" if DEFAULTS["cublas_tf32"] else "float32"}}


def has_tf32(device: str) -> bool:
    """Return whether a device has tensor cores for TF32."""
    return device.startswith("gpu:") and paddle.device.cuda.get_device_capability(int(device.removeprefix("gpu:"))) >= (8, 0)
