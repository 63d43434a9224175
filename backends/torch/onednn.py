"""Linear layers by oneDNN's kernel: on the CPU ``F.linear`` calls MKL, which is slow on some processors."""

from typing import ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from concord.backends.interface import Implementation, Request
from concord.backends.library import UNDELIVERED
from concord.backends.torch import library


class ReorderedLinear(nn.Module):
    """A linear layer whose weight lies as oneDNN's kernel reads it: (..., in) to (..., out). It has no gradient."""

    living: ClassVar[WeakValueDictionary[int, "ReorderedLinear"]] = WeakValueDictionary()

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.features = linear.out_features
        self.number = id(self)
        self.living[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        return reordered_linear(x, self.number, self.features)


# The compiler cannot look into a weight of such a layout: it sees one operation, and the layer's number in place of the weight.
@torch.library.custom_op("concord::reordered_linear", mutates_args=())
def reordered_linear(x: Tensor, number: int, features: int) -> Tensor:
    layer = ReorderedLinear.living[number]
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


@reordered_linear.register_fake
def _(x: Tensor, number: int, features: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def reorder_linears(module: nn.Module) -> nn.Module:
    """Put reordered layers in the place of all linear ones."""
    for name, child in module.named_children():
        setattr(
            module, name, ReorderedLinear(child) if isinstance(child, nn.Linear) else reorder_linears(child)
        )
    return module


def unsupported_reasons(request: Request) -> list[str]:
    """Return what keeps a request from being computed with reordered weights; nothing if it can be."""
    found = library.unsupported_reasons(request)
    if request.gradients:
        found.append("gradients: reordered weights have none (GRD-1)")
    if request.dtype != "float32" or request.device != "cpu":
        found.append(
            f"dtype={request.dtype!r}, device={request.device!r}: reordered weights are those of float32 on cpu (PRC-3)"
        )
    return found


IMPLEMENTATIONS = {
    "library:onednn": Implementation(library.PARTS, unsupported_reasons, UNDELIVERED, finish=reorder_linears)
}
