"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from typing import Any

import jax

from concord.backends.interface import Request, Unsupported


def read_back() -> dict[str, Any]:
    """Return every switch as it is now, with what the environment says of it."""
    return {
        "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,
        "jax_enable_x64": jax.config.jax_enable_x64,
        "xla_gpu_deterministic_ops": "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "").split(),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
    }


DEFAULTS = read_back()
"""The switches as they were when the framework was imported: nothing has been set before this."""

SET = ("jax_default_matmul_precision",)
"""Those of them that a precision sets."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "strict": dict(zip(SET, ("highest",), strict=True)),
    "tf32": dict(zip(SET, ("tensorfloat32",), strict=True)),
    "default": {name: DEFAULTS[name] for name in SET},
}
"""What each of :data:`concord.backends.interface.PRECISION_MODES` sets."""


def set_precision(mode: str) -> None:
    """Have products of float32 numbers computed in one of :data:`concord.backends.interface.PRECISION_MODES`."""
    wanted = PRECISIONS[mode]
    jax.config.update("jax_default_matmul_precision", wanted["jax_default_matmul_precision"])


def set_determinism(on: bool) -> None:
    """Have only kernels run that give the same bits each time, or let any run.

    Raises:
        Unsupported: if XLA was started without: it reads its flags once.
    """
    if on and not read_back()["xla_gpu_deterministic_ops"]:
        raise Unsupported("jax is deterministic only if its process is started with --xla_gpu_deterministic_ops=true in XLA_FLAGS; this one was not")


def wanted(request: Request) -> dict[str, Any]:
    """Return the switches that a request sets, as they have to be still when it is done."""
    return {**PRECISIONS[request.precision], **({"xla_gpu_deterministic_ops": True} if request.deterministic else {})}


def defaults() -> dict[str, Any]:
    """Return the switches as imported, and in which arithmetic float32 products then run on each kind of device."""
    full = DEFAULTS["jax_default_matmul_precision"] in ("highest", "float32", "F32_F32_F32")
    return {**DEFAULTS, "products": {"cpu": "float32", "cuda": "float32" if full else "tf32"}}


def has_tf32(device: jax.Device) -> bool:
    """Return whether a device has tensor cores for TF32."""
    return device.platform == "gpu" and tuple(map(int, device.compute_capability.split("."))) >= (8, 0)
