"""The PyTorch backend: NumPy in and out, devices, dtypes, switches, and a session on a model.

Shapes: B batch, T tokens, C classes, M rows, N columns.
"""

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

REDUCED = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
"""Of ``torch.backends.cuda.matmul``: whether half precisions may be summed in themselves."""

MODES = {False: "default", True: "reduce-overhead"}
"""Of the compiler, by whether kernels are captured as a graph, which a GPU launches at once."""


class ModelSession(FrameworkSession):
    """A model and its inputs on a device (:class:`concord.backends.interface.Session`)."""

    def prepare(self) -> None:
        """Do once what a framework needs before it compiles."""
        training = self.request.training
        # Gradients of a batch that are added up later would be overwritten.
        self.captured = (
            self.compiled
            and self.device.type == "cuda"
            and (training is None or training.recipe.accumulation == 1)
        )
        if self.compiled:
            # A worker compiles a model for each session; what earlier ones left counts towards a limit.
            torch.compiler.reset()
            torch.compiler.config.recompile_limit = 2 * MOST

    def evaluation(self, captured: bool) -> Callable[..., Any]:
        """Return what evaluates the model, compiled if that is asked for."""
        if not self.compiled:
            return self.evaluate
        program = torch.compile(self.evaluate, fullgraph=True, dynamic=False, mode=MODES[captured])

        def begun(*given: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return program(*given)

        return begun if captured else program

    def forget(self) -> None:
        """Let go of what was compiled: PyTorch keeps all that it has compiled until it is told otherwise."""
        torch.compiler.reset()


class Adapter(FrameworkAdapter):
    """The backend (:class:`concord.backends.interface.Backend`)."""

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
        """Return the number of CUDA devices that the framework sees."""
        return torch.cuda.device_count()

    def threads(self) -> int:
        """Return the number of threads that the framework computes with on the CPU."""
        return torch.get_num_threads()

    def place(self, kind: str, index: int) -> torch.device:
        """Return the framework's device: ``"cpu"``, or ``"cuda"`` of that number."""
        return torch.device(kind, index) if kind == "cuda" else torch.device(kind)

    def construct(self, part: Callable[..., nn.Module], request: Request, device: torch.device) -> nn.Module:
        """Return a part of the model in the dtype of a request, on a device, without its weights."""
        return part(request.config, device=device, dtype=getattr(torch, request.dtype)).eval()

    def tensor(self, array: np.ndarray, dtype: str, device: torch.device) -> torch.Tensor:
        """Return an input as a tensor: numbers in the precision of the run, ids as int64, masks as bool."""
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device)
        return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor

    def peak_memory(self, device: str, reset: bool = False) -> int | None:
        """Return the largest number of bytes held on a device."""
        place = self.device(device)
        if reset:
            torch.cuda.reset_peak_memory_stats(place)
        return torch.cuda.max_memory_allocated(place)

    def event(self) -> Any:
        """Return an event of the device's clock; None if the framework does not give it away."""
        return torch.cuda.Event(enable_timing=True)

    def layers(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """Return all layers of a model with their paths."""
        return model.named_modules()

    def without_gradients(self) -> AbstractContextManager[Any]:
        """Return what computes without a thought of gradients."""
        return torch.inference_mode()

    def synchronize(self, computed: Tensor | None) -> None:
        """Wait until the device of a tensor is done."""
        if computed is not None and computed.is_cuda:
            torch.cuda.synchronize(computed.device)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """Start a matrix product: (M, K) and (K, N) to (M, N)."""
        return torch.mm(left, right)

    # Switches.

    def read_switches(self) -> dict[str, Any]:
        """Return every switch as it is now, with what the environment says of it."""
        return {
            "float32_matmul_precision": _told(torch.get_float32_matmul_precision),
            "cudnn_allow_tf32": _told(lambda: torch.backends.cudnn.allow_tf32),
            **{name: getattr(torch.backends.cuda.matmul, name) for name in REDUCED},
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE"),
        }

    def put_switches(self, wanted: Mapping[str, Any]) -> None:
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

    # Weights.

    def assign(self, parameter: Tensor, array: np.ndarray) -> None:
        """Copy an array of the native layout into a parameter, rounding to its dtype once."""
        # ``copy_`` would reach float16 by way of float32.
        parameter.detach().copy_(
            torch.from_numpy(precision(str(parameter.dtype).removeprefix("torch.")).round(array))
        )

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor as an array; the half precisions come as float32, exactly."""
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()


def _told(switch: Callable[[], Any]) -> Any:
    """Return what a switch says: PyTorch raises an error once somebody has set fp32_precision.

    Which is newer, besides.
    """
    try:
        return switch()
    except RuntimeError:
        return f"mixed up with fp32_precision = {torch.backends.cuda.matmul.fp32_precision}"
