"""Declared deviations, where a framework cannot follow the specification (SPEC PRC-4).

The reference follows them for that backend, so no tolerance widens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from concord.spec.errors import SpecError, unknowns

Deviations = Mapping[str, float]
"""Value of each deviation (:data:`KNOWN_DEVIATIONS`) by name."""

# The largest meaningful value of any deviation.
LARGEST = 1e6

NONE: Deviations = MappingProxyType({})


@dataclass(frozen=True)
class KnownDeviation:
    """A deviation that the reference can follow."""

    clause: str  # the clause that it departs from
    meaning: str  # of its value
    dtypes: tuple[str, ...] = ()  # the precisions that it affects; empty for all
    rounds: bool = False  # whether it affects rounding only, so that the truth stays the same
    # Whether the judge excludes the tensors instead, because the reference cannot compute them.
    excuses: bool = False
    alone: str = ""  # the verdict on a run that would agree with this declaration


UNCOMPUTED_PADDING, WIDER_OUTPUT, BLIND_ROWS_ZERO = "uncomputed_padding", "wider_output", "blind_rows_zero"


KNOWN_DEVIATIONS: dict[str, KnownDeviation] = {
    "softmax_floor": KnownDeviation(
        "ATT-5",
        "softmax clips each entry, after subtracting the maximum, at this value, so that no weight falls "
        "below its exponential",
    ),
    "padding_left_out": KnownDeviation(
        "ATT-5",
        "padded tokens are left out, except for a sample's first token, so that the floor of softmax gives "
        "them no weight (value 1)",
    ),
    BLIND_ROWS_ZERO: KnownDeviation(
        "MSK-5",
        "the attention weights of a query that sees no key are zero, as in PyTorch's "
        "scaled_dot_product_attention (value 1)",
        alone="only rows without a visible key differ",
    ),
    UNCOMPUTED_PADDING: KnownDeviation(
        "MSK-4",
        "padding rows are not computed, or are computed differently, and may hold any values (value 1)",
        excuses=True,
        alone="only padding rows differ",
    ),
    WIDER_OUTPUT: KnownDeviation(
        "PRC-2",
        "the output, and the loss computed from it, have more digits than the run's precision (value 1)",
        excuses=True,
        alone="only the output is wider than the run's precision",
    ),
    "norm_epsilon_bits": KnownDeviation(
        "NRM-2",
        "layer norm rounds its epsilon to this number of significant bits, in every precision",
        ("float64",),
    ),
    "gelu_constant_bits": KnownDeviation(
        "FFN-2",
        "GELU rounds the constants sqrt(1/2) and 0.044715 to this number of significant bits, in every "
        "precision",
        ("float64",),
    ),
    "log_softmax_floor": KnownDeviation(
        "LOS-1",
        "log-softmax clips each entry, after subtracting the maximum, at this value, so that a loss "
        "saturates",
    ),
    "optimizer_constant_bits": KnownDeviation(
        "OPT-1",
        "the optimizer rounds its constants to this number of significant bits before it uses them",
    ),
    "narrow_bias_gradients": KnownDeviation(
        "PRC-2",
        "the gradient of a linear layer's bias is summed in bfloat16 itself, not in float32 (value 1)",
        ("bfloat16",),
        rounds=True,
    ),
}
"""Every deviation that can be declared."""

BLIND_ROWS_UNIFORM = "blind_rows_uniform"

# Only for module candidates: in the family, such rows are uniform anyway (SPEC MSK-5).
OF_MODULES: dict[str, KnownDeviation] = {
    BLIND_ROWS_UNIFORM: KnownDeviation(
        "MSK-5",
        "the attention weights of a query that sees no key are uniform, as when the same constant hides all "
        "scores",
        alone="only rows without a visible key differ",
    )
}


def parse_deviations(entries: Sequence[Mapping[str, Any]]) -> Deviations:
    """Check and read declarations.

    Args:
        entries: each with ``name`` (of :data:`KNOWN_DEVIATIONS`), ``value`` and ``reason``.

    Raises:
        SpecError: listing every unknown name, missing reason and invalid value.
    """
    problems, values = [], {}
    for entry in entries:
        name, value, reason = (entry.get(key) for key in ("name", "value", "reason"))
        if not isinstance(name, str) or name not in KNOWN_DEVIATIONS:
            problems += unknowns("deviation", [str(name)], KNOWN_DEVIATIONS)
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST:
            problems.append(
                f"deviation {name!r} has value {repr(value)[:40]} but must have a number between "
                f"-{LARGEST:g} and {LARGEST:g} [clause=PRC-4]"
            )
        elif not (isinstance(reason, str) and reason):
            problems.append(f"deviation {name!r} has no reason but must give one [clause=PRC-4]")
        else:
            values[name] = float(value)
    if problems:
        raise SpecError(problems)
    return values


def in_precision(deviations: Deviations, dtype: str) -> Deviations:
    """Deviations that affect a precision."""
    return {
        name: value
        for name, value in deviations.items()
        if not KNOWN_DEVIATIONS[name].dtypes or dtype in KNOWN_DEVIATIONS[name].dtypes
    }
