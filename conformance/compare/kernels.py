"""Kernels whose errors exceed those of their operations; :mod:`~.aten_arithmetic` defines the sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel that a candidate may have run."""

    text: str  # continues "explained by"
    concerns: tuple[str, ...]  # at least one of these must occur
    switch: str = ""  # how to avoid it; empty for correct algorithms, which need no declaration


FAST_CONVOLUTION = "fast_convolution"
CUDNN_RECURRENT = "cudnn_recurrent"
CUDNN_WINOGRAD_9X9 = "cudnn_winograd_9x9"
TF32 = "tf32"

# Positions of the factors among a product's operands.
FACTORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "convolution"), range(2)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), range(1, 3)),
    "convolution_backward": range(3),
}

KERNELS = {
    FAST_CONVOLUTION: Kernel("a fast convolution (Winograd or FFT)", ("convolution", "convolution_backward")),
    CUDNN_RECURRENT: Kernel(
        "cuDNN's recurrent kernels, which approximate tanh and sigmoid",
        ("lstm", "gru", "rnn_tanh"),
        "torch.backends.cudnn.enabled = False",
    ),
    CUDNN_WINOGRAD_9X9: Kernel(
        "cuDNN's gradient of 5 x 5 weights by Winograd 9x9, with up to five times the error of TF32",
        ("convolution_backward",),
        "torch.backends.cudnn.enabled = False",
    ),
    # Last, because its error covers all others.
    TF32: Kernel(
        "products in TF32, which rounds their factors to 11 bits",
        tuple(FACTORS),
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False",
    ),
}
