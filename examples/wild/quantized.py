"""A BERT with 8-bit weights from torchao, and a BERT that PyTorch runs in 8 bits.

Quantization changes the weights, so the original cannot judge the computation. A module with the dequantized
weights can: a tensor that diverges from it is a wrong step, or rounds more than the weights.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from small import bert, judge, needs
from torch import nn

REQUIREMENTS = ("torchao>=0.18",)


def dequantized(quantized: nn.Module, original: nn.Module) -> nn.Module:
    copied = copy.deepcopy(original)
    for path, module in quantized.named_modules():
        weight: Any = getattr(module, "weight", None)
        weight = weight() if callable(weight) else weight
        if weight is not None and hasattr(weight, "dequantize"):
            copied.get_submodule(path).weight = nn.Parameter(weight.detach().dequantize())
    return copied


def main() -> None:
    needs("torchao", *REQUIREMENTS)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    warnings.simplefilter("ignore")
    original, weights = bert(), bert()
    quantize_(weights, Int8WeightOnlyConfig())
    name = "torchao, int8 weights"
    judge(f"{name}, compared with the float32 weights", original, weights)
    judge(f"{name}, compared with the dequantized weights", dequantized(weights, original), weights)
    dynamic = torch.ao.quantization.quantize_dynamic(bert(), {nn.Linear}, dtype=torch.qint8)
    restored = dequantized(dynamic, original)
    judge("PyTorch, dynamic int8, compared with its dequantized weights", restored, dynamic)


if __name__ == "__main__":
    main()
