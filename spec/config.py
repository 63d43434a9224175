"""The configuration of a member of the model family: data, never code."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.spec.errors import ConfigError, unknown

CHOICES: dict[str, tuple[str, ...]] = {
    "token_padding_forward": ("stored", "zero"),
    "embedding_scale": ("one", "sqrt_d_model"),
    "positions": ("sinusoidal", "learned"),
    "position_layout": ("interleaved", "halves"),
    "position_exponent": ("pair", "column"),
    "position_of_padding": ("counted", "zero_row"),
    "mask_fill": ("replace", "add"),
    "mask_assignment": ("per_sample", "batch_major"),
    "query_mask": ("none", "overwrite"),
    "qkv_activation": ("none", "relu"),
    "score_scale": ("divide_scores", "multiply_query"),
    "head_computation": ("batched", "looped"),
    "norm_placement": ("post", "pre"),
    "norm_epsilon_placement": ("inside", "outside"),
    "norm_variance": ("biased", "unbiased"),
    "norm_sharing": ("separate", "shared"),
    "activation": ("relu", "gelu_erf", "gelu_tanh"),
    "pooling": ("first", "flatten"),
    "pooler": ("none", "tanh"),
}
"""The values that each option may take (SPEC, section 2)."""

_AT_LEAST_ONE = ("vocab_size", "max_positions", "d_model", "num_heads", "d_ff", "num_layers", "num_classes")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One member of the family (SPEC CFG-1). Every field is stated; only rows that may be absent have a default.

    Raises:
        ConfigError: listing everything that is wrong with the fields, at once.
    """

    # Sizes.
    vocab_size: int
    max_positions: int  # rows of the position table
    num_segments: int  # rows of the segment table; 0: the model takes no segment ids
    d_model: int
    num_heads: int
    d_ff: int
    num_layers: int
    num_classes: int  # 1: sigmoid cross-entropy; more: softmax cross-entropy (LOS-1)
    # Padding and embeddings.
    pad_id: int  # the token id that masks hide (MSK-1)
    token_padding_forward: str  # EMB-3
    embedding_scale: str  # EMB-2
    embedding_norm: bool  # EMB-6
    # Positions.
    positions: str  # POS-1
    position_start: int  # POS-5: the position number of the first token
    position_of_padding: str  # POS-6
    # Attention and its mask.
    mask_fill: str  # MSK-3
    mask_value: float  # MSK-2
    mask_assignment: str  # MSK-7
    query_mask: str  # MSK-8
    qkv_bias: bool  # ATT-1
    qkv_activation: str  # ATT-1
    score_scale: str  # ATT-4
    head_computation: str  # ATT-7
    output_projection: bool  # ATT-6
    # Norms.
    norm_placement: str  # NRM-1
    norm_epsilon: float  # NRM-2
    norm_epsilon_placement: str  # NRM-3
    norm_variance: str  # NRM-4
    norm_sharing: str  # NRM-5
    final_norm: bool  # NRM-6
    # Feed-forward, head and loss.
    activation: str  # FFN-2
    pooling: str  # HED-1
    pooler: str  # HED-2
    l2_weight: float  # LOS-4
    # Rows and table options that may be absent.
    token_padding_row: int | None = None  # EMB-4: the row of the token table that gets no gradient
    segment_padding_row: int | None = None  # EMB-5: the same of the segment table
    position_layout: str | None = None  # POS-2, sinusoidal only
    position_exponent: str | None = None  # POS-3, sinusoidal only
    position_base: float | None = None  # POS-4, sinusoidal only
    ignore_label: int | None = None  # LOS-3

    def __post_init__(self) -> None:
        problems = _type_problems(self) or _value_problems(self)
        if problems:
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        """Width of one head, d_model / num_heads (ATT-2)."""
        return self.d_model // self.num_heads

    def replace(self, **fields: Any) -> EncoderConfig:
        """Return a copy with some fields replaced.

        Raises:
            UnknownNameError: for a field that does not exist, with the nearest names.
            ConfigError: if the result describes no model.
        """
        for name in fields:
            if name not in FIELDS:
                raise unknown("configuration field", name, list(FIELDS))
        return dataclasses.replace(self, **fields)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without those that are absent (None)."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def to_toml(self) -> str:
        """Return the configuration as TOML text that :func:`from_toml` reads back to an equal one."""
        # A TOML scalar of these types is spelled as its JSON form.
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.as_dict().items())


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(EncoderConfig)}


def from_mapping(fields: Mapping[str, Any], where: str = "configuration") -> EncoderConfig:
    """Build a configuration from plain data.

    Args:
        fields: field names and values.
        where: what to call the data in an error message.

    Raises:
        ConfigError: listing unknown and missing fields and wrong values, at once.
    """
    required = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]
    problems = [f"{where}: {unknown('field', name, list(FIELDS))}" for name in fields if name not in FIELDS]
    problems += [f"{where}: field {name!r} is missing but is required [clause=CFG-1]" for name in required if name not in fields]
    if problems:
        raise ConfigError(problems)
    # TOML and JSON writers may spell a whole number without a point.
    numbers = {n: float(v) for n, v in fields.items() if "float" in str(FIELDS[n].type) and type(v) is int}
    return EncoderConfig(**{**fields, **numbers})


def from_toml(text: str, where: str = "configuration") -> EncoderConfig:
    """Read a configuration from TOML text.

    Raises:
        ConfigError: if the text is not TOML or describes no model.
    """
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    return from_mapping(fields, where)


_VARIANTS = Path(__file__).parent / "variants"


def variants() -> list[str]:
    """Return the names of the published members of the family, in the order of the design's table."""
    order = ["tf1-text-classifier", "bert-pytorch", "vanilla-encoder", "nndl-paddle", "nndl-paddle-api", "keras-attention"]
    names = sorted(path.stem for path in _VARIANTS.glob("*.toml"))
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def variant(name: str, **fields: Any) -> EncoderConfig:
    """Return a published member of the family, with any field replaced.

    Args:
        name: one of :func:`variants`.
        fields: fields of :class:`EncoderConfig` to replace, for example ``d_model=32``.

    Raises:
        UnknownNameError: for an unknown variant or field, with the nearest names.
        ConfigError: if the result describes no model.
    """
    if name not in variants():
        raise unknown("variant", name, variants())
    path = _VARIANTS / f"{name}.toml"
    return from_toml(path.read_text(), where=path.name).replace(**fields)


def _type_problems(config: EncoderConfig) -> list[str]:
    problems = []
    for name, field in FIELDS.items():
        value = getattr(config, name)
        allowed = str(field.type).split(" | ")
        actual = "None" if value is None else type(value).__name__
        if actual not in allowed:
            problems.append(f"{name!r} is {value!r} ({actual}) but must be {' or '.join(allowed)} [clause=CFG-1]")
        elif name in CHOICES and value is not None and value not in CHOICES[name]:
            problems.append(f"{name!r} is {value!r} but must be one of {', '.join(CHOICES[name])} [clause=CFG-1]")
    return problems


def _value_problems(config: EncoderConfig) -> list[str]:
    """Return what is wrong with fields whose types are right."""
    c = config
    problems = [f"{n!r} is {getattr(c, n)} but must be at least 1 [clause=CFG-1]" for n in _AT_LEAST_ONE if getattr(c, n) < 1]
    if problems:
        return problems

    def require(holds: bool, problem: str) -> None:
        if not holds:
            problems.append(problem)

    sinusoid = (c.position_layout, c.position_exponent, c.position_base)
    require(c.num_segments >= 0, f"'num_segments' is {c.num_segments} but must not be negative [clause=CFG-1]")
    require(c.d_model % c.num_heads == 0, f"'d_model' is {c.d_model} but must be divisible by 'num_heads', which is {c.num_heads} [clause=ATT-2]")
    require(0 <= c.pad_id < c.vocab_size, f"'pad_id' is {c.pad_id} but must lie in [0, {c.vocab_size}) [clause=MSK-1]")
    require(c.token_padding_row is None or 0 <= c.token_padding_row < c.vocab_size, f"'token_padding_row' is {c.token_padding_row} but must lie in [0, {c.vocab_size}) [clause=EMB-4]")
    require(c.token_padding_forward == "stored" or c.token_padding_row is not None, "'token_padding_forward' is 'zero' but 'token_padding_row' is absent; it must name the row [clause=EMB-3]")
    require(c.segment_padding_row is None or 0 <= c.segment_padding_row < c.num_segments, f"'segment_padding_row' is {c.segment_padding_row} but must lie in [0, {c.num_segments}) [clause=EMB-5]")
    require(c.positions == "learned" or None not in sinusoid, "'positions' is 'sinusoidal' but 'position_layout', 'position_exponent' and 'position_base' must be given with it [clause=POS-1]")
    require(c.positions == "sinusoidal" or sinusoid == (None,) * 3, "'positions' is 'learned' but 'position_layout', 'position_exponent' and 'position_base' must be absent with it [clause=POS-1]")
    require(c.position_layout != "halves" or c.d_model % 2 == 0, f"'d_model' is {c.d_model} but must be even with 'position_layout' 'halves' [clause=POS-2]")
    require(c.position_base is None or (math.isfinite(c.position_base) and c.position_base > 1), f"'position_base' is {c.position_base} but must be finite and above 1 [clause=POS-4]")
    require(c.position_start in (0, 1), f"'position_start' is {c.position_start} but must be 0 or 1 [clause=POS-5]")
    require(c.position_of_padding == "counted" or c.position_start == 1, "'position_of_padding' is 'zero_row' but 'position_start' is 0; it must be 1, so that row 0 is free [clause=POS-6]")
    require(c.max_positions > c.position_start, f"'max_positions' is {c.max_positions} but must be above 'position_start', which is {c.position_start} [clause=POS-5]")
    require(math.isfinite(c.mask_value) and c.mask_value < 0, f"'mask_value' is {c.mask_value} but must be finite and negative [clause=MSK-2]")
    require(c.mask_assignment == "per_sample" or c.head_computation == "batched", "'mask_assignment' is 'batch_major' but 'head_computation' is 'looped'; it must be 'batched': a loop over heads stacks nothing [clause=MSK-7]")
    require(math.isfinite(c.norm_epsilon) and c.norm_epsilon > 0, f"'norm_epsilon' is {c.norm_epsilon} but must be finite and positive [clause=NRM-2]")
    require(c.norm_variance == "biased" or c.d_model > 1, "'d_model' is 1 but must be above 1 with 'norm_variance' 'unbiased' [clause=NRM-4]")
    require(c.pooler == "none" or c.pooling == "first", "'pooler' is 'tanh' but 'pooling' is 'flatten'; it must be 'first' [clause=HED-2]")
    require(math.isfinite(c.l2_weight) and c.l2_weight >= 0, f"'l2_weight' is {c.l2_weight} but must be finite and not negative [clause=LOS-4]")
    require(c.ignore_label is None or (c.num_classes > 1 and 0 <= c.ignore_label < c.num_classes), f"'ignore_label' is {c.ignore_label} but must be a label below 'num_classes', which must be above 1 and is {c.num_classes} [clause=LOS-3]")
    return problems
