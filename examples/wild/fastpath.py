"""PyTorch's encoder compared with its own fast path, which returns zeros for padding."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from small import judge, large, texts
from torch import Tensor, nn

REQUIREMENTS = ()


class Encoder(nn.Module):
    """Ids and a mask (B, T), 1 for real tokens, to hidden states (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(997, 36)
        layer = nn.TransformerEncoderLayer(36, 4, 52, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(self.token(input_ids), src_key_padding_mask=attention_mask == 0)


def main() -> None:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
    torch.manual_seed(0)
    model: Any = large(Encoder())
    inputs = {name: tensor for name, tensor in texts().items() if name != "token_type_ids"}

    def fast(**arrays: np.ndarray) -> np.ndarray:
        torch.backends.mha.set_fastpath_enabled(True)
        with torch.no_grad():
            hidden = model(**{name: torch.from_numpy(array) for name, array in arrays.items()}).numpy()
        torch.backends.mha.set_fastpath_enabled(False)
        return hidden

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        name = "PyTorch's fast path of `nn.TransformerEncoder`"
        judge(name, model, fast, inputs)
        judge(
            f"{name}, padding declared as not computed", model, fast, inputs, declared=["uncomputed_padding"]
        )
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


if __name__ == "__main__":
    main()
