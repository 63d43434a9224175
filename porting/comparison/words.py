"""What a difference between tensors is called, and what is likely to have caused it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from concord.porting.comparison.kinds import TensorDifference
from concord.spec.config import EncoderConfig
from concord.spec.sources.table import POSITIONS

USUAL = {
    "heads permuted": "the heads of this tensor alone were reordered, or all of the layer's: then the "
    "model computes the same",
    "heads interleaved": "the width was split as (head_dim, heads) where it is (heads, head_dim)",
    "rounding": "it was computed again, or went through another precision and back",
}
"""Causes that depend on nothing else."""


def say(found: TensorDifference, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Return how a tensor differs, in words.

    Args:
        shapes: of the first and of the second.
    """
    which = {"first": "A", "second": "B"}.get(found.swapped, "B")
    size = _size(found)
    return {
        "same": "the same bits",
        "same numbers": "the same numbers in another dtype",
        "signs of zeros": f"{found.by:g} {'zero has' if found.by == 1 else 'zeros have'} the other sign; "
        "all other bits are the same",
        "transposed": "transposed",
        "heads permuted": "heads permuted: B's heads are A's "
        f"{', '.join(map(str, found.order[:16]))}{' …' if len(found.order) > 16 else ''}",
        "heads interleaved": "heads interleaved: what stands together for each head in A takes turns in "
        "B, or the other way about",
        "rows shifted": f"rows are shifted by {abs(found.by):g}: row i of B is row i "
        f"{'-' if found.by > 0 else '+'} {abs(found.by):g} of A",
        **{
            f"{what} permuted": f"{found.by:g} {what} stand in another order, the first at "
            f"{', '.join(map(str, found.rows))}"
            for what in ("rows", "columns", "elements")
        },
        "rows missing": f"{which} has {found.by:g} more rows; all others are the same",
        "rounded": f"{which} is rounded to {found.precision}: {size}",
        "scaled": f"B is A times {found.by:.9g}",
        "offset": f"B is A plus {found.by:.9g}",
        "all the same": f"all numbers of {which} are {'NaN' if math.isnan(found.by) else f'{found.by:g}'}",
        "rounding": f"the same but for the last digits: {size}",
        "some rows": f"{found.by:g} rows differ, the first at {', '.join(map(str, found.rows))}: {size}",
        "quantised": f"{which} has at most {found.by:g} different numbers in {found.among}: {size}",
        "another shape": f"has shape {shapes[0]} in A and {shapes[1]} in B",
        "different": f"different: {size}",
    }[found.kind]


def _size(found: TensorDifference) -> str:
    """Return how many numbers differ, and by how much."""
    said = f"{found.elements} of {found.size} numbers differ"
    if found.largest:
        said += (
            f", by at most {found.largest:.3g}"
            if math.isfinite(found.largest)
            else ", by more than float64 holds"
        )
    if found.largest and math.isfinite(found.relative):
        said += f", {found.relative:.2g} of their size (root mean square)"
    odd = [
        f"{count} {'are' if count > 1 else 'is'} {_both(mine, theirs)}" for mine, theirs, count in found.odd
    ]
    return said + (f"; of these {', '.join(odd)}" if odd else "")


def _both(mine: str, theirs: str) -> str:
    return f"{mine} in both, of other bits" if mine == theirs else f"{mine} in A and {theirs} in B"


def cause(name: str, found: TensorDifference, config: EncoderConfig, square: bool) -> str:
    """Return what is likely to have caused a difference; empty: nobody can say.

    Args:
        square: whether the tensor has as many rows as columns.
    """
    return next(_causes(name, found, config, square), "")


def _causes(name: str, found: TensorDifference, config: EncoderConfig, square: bool) -> Iterator[str]:
    if found.kind == "transposed":
        yield (
            "a kernel of (out, in) was taken for one of (in, out), or the other way "
            f"about{'; no shape shows it, since it is square' if square else ''}"
        )
    elif found.kind in USUAL:
        yield USUAL[found.kind]
    elif found.kind.endswith("permuted"):
        yield from _of_order(name, found)
    elif found.kind.startswith("rows"):
        yield from _of_rows(name, found)
    elif found.kind == "quantised":
        yield f"it was quantised to {max(math.ceil(math.log2(found.by)), 1)} bits, and back"
    elif found.kind == "rounded":
        yield f"the file was saved in, or went through, {found.precision}"
    elif found.kind == "scaled":
        yield from _of_scale(found, config)
    elif found.kind == "offset" and name.endswith(".weight") and abs(abs(found.by) - 1) < 1e-5:
        yield "one of them keeps a gamma without its 1"
    elif found.kind == "all the same":
        yield (
            "it was never loaded: this is how a new model begins"
            if found.by in (0.0, 1.0)
            else "it was filled, not loaded"
        )
    elif found.kind == "some rows" and found.rows == (config.pad_id,):
        yield "the row of padding was zeroed, or trained"


HIDDEN = (
    ("feed_forward.inner.weight", "columns permuted"),
    ("feed_forward.inner.bias", "elements permuted"),
    ("feed_forward.outer.weight", "rows permuted"),
)
"""Where the units between the two feed-forward layers stand."""


def _of_order(name: str, found: TensorDifference) -> Iterator[str]:
    if "token" in name and found.kind == "rows permuted":
        yield "the vocabulary was reordered"
    elif name.startswith("classifier") and found.kind != "rows permuted":
        yield "the classes were reordered"
    elif any(name.endswith(end) and found.kind == kind for end, kind in HIDDEN):
        yield (
            "the units between the two feed-forward layers were reordered: the model computes the same "
            "if all of the layer's tensors were"
        )
    else:
        yield "they were sorted or mapped anew"


def _of_rows(name: str, found: TensorDifference) -> Iterator[str]:
    if found.kind == "rows missing":
        yield (
            "the table was padded to a round number of rows, or tokens were added"
            if "token" in name
            else "the table was cut off or made longer"
        )
    elif name == POSITIONS and abs(found.by) == 2:
        yield "positions counted from the padding id: the first token has position 2"
    elif name == POSITIONS:
        yield f"positions counted from {abs(found.by):g} in one and from 0 in the other"
    else:
        yield "rows before the first were added to one of them, such as one for padding"


def _of_scale(found: TensorDifference, config: EncoderConfig) -> Iterator[str]:
    named = {
        "the root of d_model": (math.sqrt(config.d_model), "the scale of embeddings is multiplied into it"),
        "the root of head_dim": (
            math.sqrt(config.d_model / config.num_heads),
            "the scale of scores is multiplied into it",
        ),
    }
    for what, (number, why) in named.items():
        for by, word in ((found.by, ""), (1 / found.by, "1 / ")):
            if math.isclose(by, number, rel_tol=1e-5):
                yield f"{word}{what}: {why}"
    if math.isclose(found.by, -1, rel_tol=1e-6):
        yield "its sign is the other one"
