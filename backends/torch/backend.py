"""The PyTorch backend. Shapes: M rows, N columns."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from concord.backends.adapter import FrameworkAdapter
from concord.backends.interface import Implementation, Request
from concord.backends.session import FrameworkSession
from concord.backends.torch import library, optimizers, training
from concord.backends.torch.model import PARTS
from concord.backends.trainer import MOST
from concord.spec.precision import precision

# Switches of torch.backends.cuda.matmul that allow sums in half precision (SPEC PRC-2).
REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

# Compiler modes, without and with kernels captured as a CUDA graph.
MODES = {False: "default", True: "reduce-overhead"}


class ModelSession(FrameworkSession):
    """A :class:`concord.backends.interface.Session`."""

    def prepare(self) -> None:
        training = self.request.training
        # A captured graph reuses its memory and would overwrite gradients accumulated over batches.
        self.captured = (
            self.compiled
            and self.device.type == "cuda"
            and (training is None or training.recipe.accumulation == 1)
        )
        if self.compiled:
            # A worker compiles one model per session; otherwise, earlier sessions would count towards the
            # recompilation limit.
            torch.compiler.reset()
            torch.compiler.config.recompile_limit = 2 * MOST

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        if not self.compiled:
            return self.evaluate
        program = torch.compile(self.evaluate, fullgraph=True, dynamic=False, mode=MODES[captured])

        def begun(*arguments: Any) -> Any:
            # Otherwise the graph would overwrite the previous step's outputs while they are in use.
            torch.compiler.cudagraph_mark_step_begin()
            return program(*arguments)

        return begun if captured else program

    def forget(self) -> None:
        torch.compiler.reset()


class Adapter(FrameworkAdapter):
    """A :class:`concord.backends.interface.Backend`."""

    name = "torch"
    version = torch.__version__
    thread_switches = ("OMP_NUM_THREADS",)
    implementations = {"explicit": Implementation(PARTS), **library.IMPLEMENTATIONS}
    known_deviations = {"cpu": [], "cuda": []}
    training, optimizers = training, optimizers
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
    session_type = ModelSession

    def cuda_devices(self) -> int:
        return torch.cuda.device_count()

    def threads(self) -> int:
        return torch.get_num_threads()

    def place(self, kind: str, index: int) -> torch.device:
        return torch.device(kind, index) if kind == "cuda" else torch.device(kind)

    def construct(self, part: Callable[..., nn.Module], request: Request, device: torch.device) -> nn.Module:
        return part(request.config, device=device, dtype=getattr(torch, request.dtype)).eval()

    def tensor(self, array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        place = self.device(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.max_memory_allocated(place)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def layers(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        return model.named_modules()

    def without_gradients(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def synchronize(self, computed: Tensor | None) -> None:
        if computed is not None and computed.is_cuda:
            torch.cuda.synchronize(computed.device)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.mm(left, right)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        return {
            "float32_matmul_precision": _told(torch.get_float32_matmul_precision),
            "cudnn_allow_tf32": _told(lambda: torch.backends.cudnn.allow_tf32),
            **{name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED},
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
        # Only the older switches: PyTorch raises an error if they are mixed with fp32_precision.
        torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
        torch.backends.cudnn.allow_tf32 = wanted["cudnn_allow_tf32"]
        for name in REDUCED:
            setattr(torch.backends.cuda.matmul, name, wanted[name])

    def set_determinism(self, on: bool) -> None:
        torch.use_deterministic_algorithms(on, warn_only=False)

    def has_tf32(self, device: torch.device) -> bool:
        return (
            device.type == "cuda"
            and torch.version.cuda is not None
            and torch.cuda.get_device_capability(device) >= (8, 0)
        )

    # Weights.

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        # copy_ converts float64 to float16 through float32, which rounds twice.
        parameter.detach().copy_(
            torch.from_numpy(precision(str(parameter.dtype).removeprefix("torch.")).round(array))
        )

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def _told(switch: Callable[[], Any]) -> Any:
    # PyTorch raises an error here after the newer fp32_precision has been set.
    try:
        return switch()
    except RuntimeError:
        return f"unreadable, because fp32_precision was set to {torch.backends.cuda.matmul.fp32_precision}"
