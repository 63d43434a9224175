"""Products whose factors are first rounded to a shorter format, as in tensor cores (SPEC PRC-1 to PRC-3)."""

from __future__ import annotations

from collections.abc import Callable

from concord.conformance.bugs.attention import PROJECTIONS
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.context import Array, Context, Edits, directly, in_last_layer

ROLES = ("query", "key", "value")
LINEAR = (
    *PROJECTIONS,
    "*attention.output",
    "*.feed_forward.inner",
    "*.feed_forward.outer",
    "pooler.dense",
    "logits",
)
"""Taps that come from a linear layer."""

PRODUCTS = (*LINEAR, "*attention.scores", "*attention.context")
"""Taps that come from a product."""


def products(m: Context, number_format: str, cut: bool = False) -> Array:
    """Recompute a tap's product, and its derivatives, with factors in a shorter format.

    Preceding products that a fused kernel hides are included.
    """
    shorten, shorten_gradient = (m.cut_to, m.cut_off) if cut else (m.round_to, m.rounded)

    def contract(multiply: Callable[[Array, Array], Array], a: Array, b: Array) -> Array:
        result = multiply(shorten(a, number_format), shorten(b, number_format))
        return m.with_gradient(result, lambda gradient: shorten_gradient(gradient, number_format))

    name, m.contract = m.tap.rpartition(".")[2], contract
    if name in ("scores", "context"):
        result = m.scores() if name == "scores" else m.context(m.used_weights)
    else:
        result = m.projected()
        result = m.activation(result, m.config.qkv_activation) if name in ROLES else result
    m.contract = directly
    return result


EMULATIONS: dict[str, Change] = {
    "tf32": Change(taps=PRODUCTS, edit=lambda m: products(m, "tf32")),
    "tf32_cut_off": Change(taps=PRODUCTS, edit=lambda m: products(m, "tf32", cut=True)),
}
"""Emulated hardware arithmetic: no bugs, but another precision. The part before ``_`` names the precision
whose rules apply.
"""

EDITS: Edits = {"outer_in_tf32_last": in_last_layer(lambda m: products(m, "tf32"))}
