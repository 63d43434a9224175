"""Linear algebra results that signs, orders and conditioning leave undetermined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from concord.conformance.compare.aten_operations import is_continuous, snapshot
from concord.conformance.judging.estimate import Z

# Operations of linear algebra, and the operands that carry their backward error, relative to the norm.
SOLVING: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("linalg_inv_ex", "_linalg_solve_ex", "linalg_solve_triangular", "linalg_matrix_exp"), (0,)
    ),
    **dict.fromkeys(("cholesky", "linalg_cholesky_ex", "cholesky_inverse", "linalg_pinv", "geqrf"), (0,)),
    **dict.fromkeys(("linalg_qr", "_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals"), (0,)),
    **dict.fromkeys(("linalg_lu_factor_ex", "linalg_lu", "linalg_lu_solve", "_linalg_det"), (0,)),
    **dict.fromkeys(("_linalg_slogdet", "linalg_ldl_factor_ex", "linalg_ldl_solve"), (0,)),
    **dict.fromkeys(("cholesky_solve", "triangular_solve"), (1,)),
    "linalg_lstsq": (0, 1),
}

# Products of reflections, whose error is relative to the reflected matrix.
REFLECTING = ("linalg_householder_product", "ormqr")

# Results whose vectors have free signs, and the axis of each vector.
VECTORS: Mapping[str, Mapping[int, int]] = {
    "_linalg_eigh": {1: -2},
    "_linalg_svd": {0: -2, 2: -1},
    "linalg_qr": {0: -2, 1: -1},
}

# Operations whose values have no defined order.
UNORDERED_VALUES = ("linalg_eig", "_linalg_eigvals")

# If sigma exceeds this share of its row, judgement is impossible: the tolerance would be half of a value.
LEFT = 1 / (2 * Z)


class Solution:
    """An exact result; ``choice`` contains signs of vectors or an order."""

    def __init__(self, func: Any, exact: Any) -> None:
        self.name = str(func.overloadpacket.__name__)
        self.several = not isinstance(exact, Tensor)
        self.exact = [snapshot(x) for x in (exact if self.several else (exact,))]
        self.choice = torch.empty(0)
        if self.name in UNORDERED_VALUES:
            values = self.exact[0]
            self.choice = torch.arange(values.shape[-1], device=values.device).expand(values.shape).clone()
        elif (places := self._vectors) and all(self.exact[place].numel() for place in places):
            count = min(self.exact[place].shape[-3 - axis] for place, axis in places.items())
            lead = self.exact[next(iter(places))]
            self.choice = lead.new_ones((*lead.shape[:-2], count))

    @property
    def _vectors(self) -> Mapping[int, int]:
        return VECTORS.get(self.name, {})

    @property
    def others(self) -> list[Tensor]:
        """Alternative signs or orders."""
        if not self.choice.numel():
            return []
        if self.name in UNORDERED_VALUES:
            count = self.choice.shape[-1]
            return [self.choice.roll(by, -1) for by in sorted({1, 2, count // 3, count // 2} - {0, count})]
        return [self.choice * (1j if self.choice.is_complex() else -1)]

    def turned(self, results: Any, turn: Tensor) -> Any:
        """Results with exact signs or order, after a change."""
        tensors = list(results) if self.several else [results]
        if self.name.endswith("_ex"):  # success does not depend on a sample
            tensors[-1] = self.exact[-1].clone()
        if self.name in UNORDERED_VALUES:
            order = _matching(tensors[0], self.exact[0]).gather(-1, turn)
            tensors[0] = tensors[0].gather(-1, order)
            if self.several:
                tensors[1] = tensors[1].gather(-1, order.unsqueeze(-2).expand(tensors[1].shape))
        elif turn.numel():
            count, factor = turn.shape[-1], None
            for place, axis in self._vectors.items():
                x, exact = tensors[place], self.exact[place]
                if factor is None:
                    along = (exact.conj() * x).sum(axis)[..., :count].sgn().conj()
                    factor = torch.where(along == 0, 1, along) * turn
                else:
                    factor = factor.conj()
                rest = x.shape[-3 - axis] - count  # vectors of a null space
                full = torch.cat([factor, factor.new_ones((*factor.shape[:-1], rest))], -1)
                tensors[place] = x * full.unsqueeze(axis)
        return tuple(tensors) if self.several else tensors[0]

    @property
    def undefined(self) -> Any:
        """Results filled with NaN."""
        tensors = [torch.full_like(x, torch.nan) if is_continuous(x) else x.clone() for x in self.exact]
        return tuple(tensors) if self.several else tensors[0]


def size_of(x: Tensor) -> Tensor:
    """Each matrix's norm, expanded."""
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).real.expand(x.shape)


def _matching(values: Tensor, exact: Tensor) -> Tensor:
    flat, places = values.reshape(-1, values.shape[-1]), torch.empty_like(values, dtype=torch.long)
    for row, target, place in zip(flat, exact.reshape(flat.shape), places.view(flat.shape), strict=True):
        distances = (row[None] - target[:, None]).abs().nan_to_num(nan=0.0)
        # Each value is matched once.
        for number in range(len(row)):
            place[number] = distances[number].argmin()
            distances[:, place[number]] = torch.inf
    return places
