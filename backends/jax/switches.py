"""How products of float32 numbers are computed, and whether only deterministic kernels run: the framework's own switches."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from concord.backends.interface import Unsupported
from concord.backends.switches import FrameworkSwitches


class Switches(FrameworkSwitches):
    """JAX's (:class:`concord.backends.switches.FrameworkSwitches`)."""

    precisions = {
        "strict": {"jax_default_matmul_precision": "highest"},
        "tf32": {"jax_default_matmul_precision": "tensorfloat32"},
    }
    determinism = {"xla_gpu_deterministic_ops": True}

    def read_back(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
            "jax_enable_x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
            "xla_gpu_deterministic_ops": "--xla_gpu_deterministic_ops=true"
            in os.environ.get("XLA_FLAGS", "").split(),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def full_products(self) -> bool:
        """Return whether GPUs compute products of float32 numbers in full, as imported."""
        return self.defaults["jax_default_matmul_precision"] in ("highest", "float32", "F32_F32_F32")

    def put(self, wanted: Mapping[str, Any]) -> None:
        """Set switches of a precision."""
        jax.config.update("jax_default_matmul_precision", wanted["jax_default_matmul_precision"])

    def set_determinism(self, on: bool) -> None:
        """Have only kernels run that give the same bits each time, or let any run.

        Raises:
            Unsupported: if XLA was started without: it reads its flags once.
        """
        if on and not self.read_back()["xla_gpu_deterministic_ops"]:
            raise Unsupported(
                "jax is deterministic only if its process is started with --xla_gpu_deterministic_ops=true in XLA_FLAGS; this one was not"
            )

    def has_tf32(self, device: jax.Device) -> bool:
        """Return whether a device has tensor cores for TF32."""
        return device.platform == "gpu" and tuple(map(int, device.compute_capability.split("."))) >= (8, 0)
