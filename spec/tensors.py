"""Names, order and symbolic shapes of each part's inputs, taps and output."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from concord.spec.config import EncoderConfig
from concord.spec.errors import unknown

PARTS: dict[str, str] = {
    "model": "token ids to logits and loss",
    "pooled": "token ids to the pooled vector, which a classifier would take: a sentence embedding",
    "encoder": "token ids to the encoder's output",
    "stack": "given embeddings to the encoder's output",
    "attention": "multi-head attention on given queries, keys and values",
    "dot_product": "scaled dot-product attention on given heads",
}
"""Parts of the model that can be run and judged on their own (SPEC PRT-1)."""

POOLED = ("model", "pooled")
"""Parts that pool a text into one vector."""

OF_IDS = (*POOLED, "encoder")
"""Parts that look up embeddings."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the specification."""

    shape: str  # axis names separated by spaces, for example "batch heads query key"; empty for a scalar
    clause: str  # the clause of SPEC.md that defines it
    kind: str = "float"  # "float", "int" or "bool"
    required: bool = True  # whether an input must be given


def check_part(part: str) -> str:
    """Return ``part``, or raise ``UnknownNameError`` if it is not in :data:`PARTS`."""
    if part not in PARTS:
        raise unknown("part", part, list(PARTS))
    return part


def inputs(config: EncoderConfig, part: str = "model") -> dict[str, Tensor]:
    """Inputs of a part (SPEC INP-1, PRT-1)."""
    ids = {"input_ids": Tensor("batch tokens", "INP-1", "int")}
    segments = {"segment_ids": Tensor("batch tokens", "EMB-5", "int")} if config.num_segments else {}
    masks = {
        "key_mask": Tensor("batch key", "MSK-4", "bool", required=False),
        "query_mask": Tensor("batch query", "MSK-8", "bool", required=False),
    }
    match check_part(part):
        case "model":
            return {**ids, **segments, "labels": Tensor("batch", "INP-3", "int")}
        case "pooled":
            return {**ids, **segments, "cotangent": Tensor("batch features", "LOS-5")}
        case "encoder":
            return {**ids, **segments, "cotangent": Tensor("batch tokens d_model", "LOS-5")}
        case "stack":
            return {
                **ids,
                "embeddings": Tensor("batch tokens d_model", "PRT-1"),
                "cotangent": Tensor("batch tokens d_model", "LOS-5"),
            }
        case "attention":
            width = "d_model"
        case _:
            width = "heads head_dim"
    axes = {"query": "query", "key": "key", "value": "key"}
    attended = {name: Tensor(f"batch {axis} {width}", "PRT-1") for name, axis in axes.items()}
    return {**attended, **masks, "cotangent": Tensor("batch query d_model", "LOS-5")}


def differentiable_inputs(part: str) -> tuple[str, ...]:
    """Inputs with a gradient, as ``inputs.<name>`` (SPEC GRD-5)."""
    return {
        "stack": ("embeddings",),
        "attention": ("query", "key", "value"),
        "dot_product": ("query", "key", "value"),
    }.get(check_part(part), ())


def taps(
    config: EncoderConfig, part: str = "model", given: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Every intermediate tensor of a part, in order of computation (SPEC PRT-1).

    Args:
        given: names of the given inputs, by default all; masked tensors need masks.
    """
    if given is None or part not in ("attention", "dot_product"):
        return dict(_listed(config, check_part(part), True, True))
    return dict(_listed(config, part, "key_mask" in given, "query_mask" in given))


def output_name(config: EncoderConfig, part: str = "model") -> str:
    """Name of a part's result (SPEC PRT-1)."""
    if part == "model":
        return "logits"
    # The output is the last tap before the loss; in the whole model other taps follow the logits.
    return [name for name in taps(config, part) if name != "loss"][-1]


def from_output_on(config: EncoderConfig, part: str = "model") -> list[str]:
    """A part's result and later taps, which may be wider than the run's precision."""
    names = list(taps(config, part))
    return names[names.index(output_name(config, part)) :]


def axis_sizes(config: EncoderConfig, **lengths: int) -> dict[str, int]:
    """Sizes of all axes; ``lengths`` adds batch, tokens, query and key."""
    return {
        "vocab": config.vocab_size,
        "positions": config.max_positions,
        "segments": config.num_segments,
        "d_model": config.d_model,
        "heads": config.num_heads,
        "head_dim": config.head_dim,
        "d_ff": config.d_ff,
        "classes": config.num_classes,
        "features": config.d_model * (config.max_positions if config.pooling == "flatten" else 1),
        **lengths,
    }


def sizes_of(config: EncoderConfig, given: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Sizes of all axes for these inputs."""
    lengths = {"batch": len(next(iter(given.values())))}
    for axis, name in (("tokens", "input_ids"), ("query", "query"), ("key", "key")):
        if name in given:
            lengths[axis] = given[name].shape[1]
    return axis_sizes(config, **lengths)


def resolve(shape: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Turn a symbolic shape into a numeric one."""
    return tuple(sizes[axis] for axis in shape.split())


@functools.lru_cache(maxsize=1 << 14)
def clause_of(config: EncoderConfig, name: str, part: str = "model") -> str:
    """The clause that defines a tap or gradient."""
    # A wrong tap gradient is a wrong derivative of the step that uses the tap.
    if name.startswith("gradients.taps."):
        return _clause_of_use(config, name.removeprefix("gradients.taps."), part)
    if name.startswith("gradients."):
        return "GRD-5" if name.startswith("gradients.inputs.") else "GRD-1"
    tap = taps(config, part).get(name)
    return tap.clause if tap else "PRT-1"


@functools.lru_cache(maxsize=1 << 14)
def source_of(config: EncoderConfig, tap: str, part: str = "model", which: str = "") -> str:
    """Input of the step that computes a tap: a tap, or ``inputs.<name>``; ``"result"`` selects a residual's
    sublayer.
    """
    scope, _, leaf = tap.rpartition(".")
    if part in ALONE and leaf in ("query", "key", "value"):
        return f"inputs.{leaf}"
    # Query, key and value share an input: key and value do not depend on the preceding tap.
    if leaf in ("key", "value"):
        tap = f"{scope}.query"
    elif leaf in ("residual1", "residual2") and which != "result":
        begins = {"residual1": "attention.query", "residual2": "feed_forward.inner"}[leaf]
        tap = f"{scope}.{begins if config.norm_placement == 'post' else leaf.replace('residual', 'norm')}"
    names = list(taps(config, part))
    place = names.index(tap)
    return names[place - 1] if place else "inputs.embeddings"


# The step that uses a tap, where that is not the next one; by the last parts of their names.
USES = {
    "query": "scores",
    "key": "scores",
    "value": "context",
    "token": "sum",
    "position": "sum",
    "segment": "sum",
}


def _clause_of_use(config: EncoderConfig, tap: str, part: str) -> str:
    table, (scope, _, leaf) = taps(config, part), tap.rpartition(".")
    if tap not in table:
        return "GRD-1"
    names = [*table, "loss"]
    following = f"{scope}.{USES[leaf]}" if leaf in USES else names[names.index(tap) + 1]
    step = following.rpartition(".")[2]
    if step in ("norm", "norm1", "norm2", "final_norm"):
        return "NRM-2"
    return "ATT-1" if step == "query" else table[following].clause


Entry = tuple[str, str, str]
"""Name, axes and clause of a tap."""


@functools.lru_cache(maxsize=256)
def _listed(config: EncoderConfig, part: str, keys: bool, queries: bool) -> dict[str, Tensor]:
    return {name: Tensor(axes, clause) for name, axes, clause in _taps(config, part, keys, queries)}


def _taps(config: EncoderConfig, part: str, keys: bool, queries: bool) -> Iterator[Entry]:
    wide = "batch tokens d_model"
    if part in ALONE:
        yield from ALONE[part](config, "attention", "query", "key", keys, queries)
    if part in OF_IDS:
        yield "embeddings.token", wide, "EMB-2"
        yield "embeddings.position", wide, "POS-5"
        if config.num_segments:
            yield "embeddings.segment", wide, "EMB-5"
        yield "embeddings.sum", wide, "EMB-6"
        if config.embedding_norm:
            yield "embeddings.norm", wide, "EMB-6"
    if part in (*OF_IDS, "stack"):
        for i in range(config.num_layers):
            yield from _layer_taps(config, f"layers.{i}", wide)
        if config.final_norm:
            yield "final_norm", wide, "NRM-6"
    yield from _head_taps(config, part)
    yield "loss", "", "LOS-2" if part == "model" else "LOS-5"


def _head_taps(config: EncoderConfig, part: str) -> Iterator[Entry]:
    if part in POOLED:
        yield "pooling", "batch features", "HED-1"
        if config.pooler != "none":
            yield "pooler.dense", "batch d_model", "HED-2"
            yield "pooler.output", "batch d_model", "HED-2"
        if config.length_epsilon is not None:
            yield "normalized", "batch features", "HED-5"
    if part == "model":
        yield "logits", "batch classes", "HED-3"
        if config.num_classes > 1:
            yield "log_probabilities", "batch classes", "LOS-1"
        yield "losses", "batch", "LOS-1"


def _dot_product_taps(
    config: EncoderConfig, name: str, query: str, key: str, keys: bool = True, queries: bool = True
) -> Iterator[Entry]:
    weights = f"batch heads {query} {key}"
    yield f"{name}.scores", weights, "ATT-4"
    if keys:
        yield f"{name}.masked_scores", weights, "MSK-3"
    yield f"{name}.weights", weights, "ATT-5"
    if queries and config.query_mask == "overwrite":
        yield f"{name}.masked_weights", weights, "MSK-8"
    yield f"{name}.context", f"batch {query} d_model", "ATT-6"


def _attention_taps(
    config: EncoderConfig, name: str, query: str, key: str, keys: bool = True, queries: bool = True
) -> Iterator[Entry]:
    for role, axis in (("query", query), ("key", key), ("value", key)):
        yield f"{name}.{role}", f"batch {axis} heads head_dim", "ATT-2"
    yield from _dot_product_taps(config, name, query, key, keys, queries)
    if config.output_projection:
        yield f"{name}.output", f"batch {query} d_model", "ATT-6"


ALONE = {"dot_product": _dot_product_taps, "attention": _attention_taps}
"""Parts that consist of attention only."""


def _layer_taps(config: EncoderConfig, name: str, wide: str) -> Iterator[Entry]:
    feed_forward = (
        (f"{name}.feed_forward.inner", "batch tokens d_ff", "FFN-1"),
        (f"{name}.feed_forward.activation", "batch tokens d_ff", "FFN-2"),
        (f"{name}.feed_forward.outer", wide, "FFN-1"),
    )
    sublayers = _attention_taps(config, f"{name}.attention", "tokens", "tokens"), feed_forward
    for number, steps in enumerate(sublayers, start=1):
        norm = f"{name}.norm{number}", wide, "NRM-1"
        if config.norm_placement == "pre":
            yield norm
        yield from steps
        yield f"{name}.residual{number}", wide, "RES-1"
        if config.norm_placement == "post":
            yield norm
