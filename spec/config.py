"""The configuration of a member of the model family."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from concord.spec.errors import ConfigError, unknown
from concord.spec.fields import build, replaced, to_toml, type_problems
from concord.spec.files import parse_toml, read_text

CHOICES: dict[str, tuple[str, ...]] = {
    "token_padding_forward": ("stored", "zero"),
    "embedding_scale": ("one", "sqrt_d_model"),
    "positions": ("sinusoidal", "learned"),
    "position_layout": ("interleaved", "halves"),
    "position_exponent": ("pair", "column"),
    "position_of_padding": ("counted", "zero_row", "pad_row"),
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
    "pooling": ("first", "flatten", "mean"),
    "pooler": ("none", "tanh", "relu"),
}
"""Values of each option (SPEC, section 2)."""

# Above these limits, parameter names or the table of fixed positions would exhaust memory.
MOST_LAYERS, MOST_HEADS, LARGEST_TABLE = 1 << 10, 1 << 17, 1 << 26

_AT_LEAST_ONE = ("vocab_size", "max_positions", "d_model", "num_heads", "d_ff", "num_layers", "num_classes")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """One member of the family (SPEC CFG-1).

    Attributes:
        vocab_size: rows of the token table.
        max_positions: rows of the position table.
        num_segments: rows of the segment table; 0 for none (SPEC EMB-5).
        d_model: width of the model, divisible by ``num_heads`` (SPEC ATT-2).
        num_heads: attention heads per layer.
        d_ff: width of the feed-forward sublayer (SPEC FFN-1).
        num_layers: encoder layers.
        num_classes: 1 for sigmoid, more for softmax cross-entropy (SPEC LOS-1).
        pad_id: token id that masks hide (SPEC MSK-1).
        token_padding_forward: forward value of row ``token_padding_row`` (SPEC EMB-3).
        embedding_scale: factor of token vectors (SPEC EMB-2).
        embedding_norm: whether a norm follows the sum of embeddings (SPEC EMB-6).
        positions: fixed or trained table (SPEC POS-1).
        position_start: position of the first token: 0, 1, or ``pad_id`` + 1 (SPEC POS-5, POS-6).
        position_of_padding: position of padding, and whether it is counted (SPEC POS-6).
        mask_fill: whether the mask constant replaces a score or is added to it (SPEC MSK-3).
        mask_value: the mask constant, finite and negative (SPEC MSK-2).
        mask_assignment: which sample's mask a head gets (SPEC MSK-7).
        query_mask: treatment of weights of padded queries (SPEC MSK-8).
        qkv_bias: whether query, key and value have biases (SPEC ATT-1).
        qkv_activation: activation after these projections (SPEC ATT-1).
        score_scale: divide scores or multiply queries (SPEC ATT-4).
        head_computation: all heads at once or in a loop (SPEC ATT-7).
        output_projection: whether a linear layer follows the joined heads (SPEC ATT-6).
        norm_placement: post-norm or pre-norm (SPEC NRM-1).
        norm_epsilon: finite and positive (SPEC NRM-2).
        norm_epsilon_placement: inside or outside the root (SPEC NRM-3).
        norm_variance: divided by D or by D - 1 (SPEC NRM-4).
        norm_sharing: whether both sublayers share one norm (SPEC NRM-5).
        final_norm: whether a norm follows the last layer (SPEC NRM-6).
        activation: activation of the feed-forward sublayer (SPEC FFN-2).
        pooling: first token, all tokens concatenated, or mean of real tokens (SPEC HED-1).
        pooler: layer between pooling and classifier (SPEC HED-2).
        l2_weight: weight of the penalty in the loss; 0 for none (SPEC LOS-4).
        token_padding_row, segment_padding_row, position_padding_row: table rows without a gradient (SPEC
            EMB-4, EMB-5, POS-7).
        position_layout, position_exponent, position_base: parameters of sinusoidal positions (SPEC POS-2 to
            POS-4).
        length_epsilon: lower bound of the pooled vector's length as a divisor; absent: no division (SPEC
            HED-5).
        ignore_label: label that does not count in the loss (SPEC LOS-3).

    Raises:
        ConfigError: listing all problems.
    """

    # Sizes.
    vocab_size: int
    max_positions: int
    num_segments: int
    d_model: int
    num_heads: int
    d_ff: int
    num_layers: int
    num_classes: int
    # Padding and embeddings.
    pad_id: int
    token_padding_forward: str
    embedding_scale: str
    embedding_norm: bool
    # Positions.
    positions: str
    position_start: int
    position_of_padding: str
    # Attention and its mask.
    mask_fill: str
    mask_value: float
    mask_assignment: str
    query_mask: str
    qkv_bias: bool
    qkv_activation: str
    score_scale: str
    head_computation: str
    output_projection: bool
    # Norms.
    norm_placement: str
    norm_epsilon: float
    norm_epsilon_placement: str
    norm_variance: str
    norm_sharing: str
    final_norm: bool
    # Feed-forward, head and loss.
    activation: str
    pooling: str
    pooler: str
    l2_weight: float
    # Rows and table options that may be absent.
    token_padding_row: int | None = None
    segment_padding_row: int | None = None
    position_padding_row: int | None = None
    position_layout: str | None = None
    position_exponent: str | None = None
    position_base: float | None = None
    length_epsilon: float | None = None
    ignore_label: int | None = None

    def __post_init__(self) -> None:
        # Compare values with each other only once all types are correct.
        problems = type_problems(self, CHOICES, "CFG-1") or _value_problems(self)
        if problems:
            raise ConfigError(problems)

    @property
    def head_dim(self) -> int:
        """Width of one head (SPEC ATT-2)."""
        return self.d_model // self.num_heads

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text (SPEC INP-2)."""
        return self.max_positions - self.position_start

    @property
    def rectifies(self) -> bool:
        """Whether the model has a ReLU, whose gradient jumps at 0."""
        return "relu" in (self.activation, self.qkv_activation, self.pooler)

    def replace(self, **fields: Any) -> EncoderConfig:
        """Return a copy with some fields replaced.

        Raises:
            UnknownNameError: for an unknown field.
            ConfigError: if the result is invalid.
        """
        return replaced(self, "configuration field", fields)

    def as_dict(self) -> dict[str, Any]:
        """Fields by name, without absent ones."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    def to_toml(self) -> str:
        """TOML text for :func:`from_toml`."""
        return to_toml(self.as_dict())


FIELDS: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(EncoderConfig)}
"""Fields of :class:`EncoderConfig` (SPEC CFG-1)."""


def from_mapping(fields: Mapping[str, Any], where: str = "configuration") -> EncoderConfig:
    """Build a configuration from plain data (SPEC CFG-1).

    Args:
        where: the data's name in messages.

    Raises:
        ConfigError: listing all unknown, missing and wrong fields.
    """
    return build(EncoderConfig, fields, where, "CFG-1")


def from_toml(text: str, where: str = "configuration") -> EncoderConfig:
    """Read a configuration from TOML, as printed by ``concord show variants NAME`` (SPEC CFG-1).

    Raises:
        SpecError: if the text is not TOML.
        ConfigError: if it does not describe a model.
    """
    return from_mapping(parse_toml(text, where), where)


_VARIANTS = Path(__file__).parent / "variants"


def variants() -> list[str]:
    """Published members of the family, oldest first."""
    # Reports list variants in this order, from the oldest encoder to bert and its successors.
    order = [
        "tf1-text-classifier",
        "bert-pytorch",
        "vanilla-encoder",
        "nndl-paddle",
        "nndl-paddle-api",
        "keras-attention",
        "bert",
        "roberta",
        "distilbert",
        "sentence-bert",
    ]
    names = sorted(path.stem for path in _VARIANTS.glob("*.toml"))
    return sorted(names, key=lambda name: (order.index(name) if name in order else len(order), name))


def variant(name: str, **fields: Any) -> EncoderConfig:
    """Return a published member of the family, with any field replaced, for example ``d_model=32``.

    Raises:
        UnknownNameError: for an unknown variant or field.
        ConfigError: if the result is invalid.
    """
    if name not in variants():
        raise unknown("variant", name, variants())
    path = _VARIANTS / f"{name}.toml"
    return from_toml(read_text(path), where=path.name).replace(**fields)


def _value_problems(config: EncoderConfig) -> list[str]:
    c = config
    problems = [
        f"{n!r} is {getattr(c, n)} but must be at least 1 [clause=CFG-1]"
        for n in _AT_LEAST_ONE
        if getattr(c, n) < 1
    ]
    if problems:
        return problems

    def require(holds: bool, problem: str) -> None:
        if not holds:
            problems.append(problem)

    sinusoid = (c.position_layout, c.position_exponent, c.position_base)
    require(
        c.num_layers <= MOST_LAYERS and c.num_layers * c.num_heads <= MOST_HEADS,
        f"'num_layers' is {c.num_layers} and 'num_heads' {c.num_heads} but there may be at most "
        f"{MOST_LAYERS} layers, and {MOST_HEADS} heads in total [clause=CFG-1]",
    )
    require(
        c.positions == "learned" or c.max_positions * c.d_model <= LARGEST_TABLE,
        f"'max_positions' is {c.max_positions} and 'd_model' {c.d_model} but a table of fixed positions may "
        f"have at most {LARGEST_TABLE} values [clause=POS-1]",
    )
    require(
        c.num_segments >= 0, f"'num_segments' is {c.num_segments} but must not be negative [clause=CFG-1]"
    )
    require(
        c.d_model % c.num_heads == 0,
        f"'d_model' is {c.d_model} but must be divisible by 'num_heads', which is {c.num_heads} "
        f"[clause=ATT-2]",
    )
    require(
        0 <= c.pad_id < c.vocab_size,
        f"'pad_id' is {c.pad_id} but must lie in [0, {c.vocab_size}) [clause=MSK-1]",
    )
    require(
        c.token_padding_row is None or 0 <= c.token_padding_row < c.vocab_size,
        f"'token_padding_row' is {c.token_padding_row} but must lie in [0, {c.vocab_size}) [clause=EMB-4]",
    )
    require(
        c.token_padding_forward == "stored" or c.token_padding_row is not None,
        "'token_padding_forward' is 'zero' but 'token_padding_row' is absent; it must name the row "
        "[clause=EMB-3]",
    )
    require(
        c.segment_padding_row is None or 0 <= c.segment_padding_row < c.num_segments,
        f"'segment_padding_row' is {c.segment_padding_row} but must lie in [0, {c.num_segments}) "
        f"[clause=EMB-5]",
    )
    require(
        c.positions == "learned" or None not in sinusoid,
        "'positions' is 'sinusoidal' but 'position_layout', 'position_exponent' and 'position_base' must "
        "be given with it [clause=POS-1]",
    )
    require(
        c.positions == "sinusoidal" or sinusoid == (None,) * 3,
        "'positions' is 'learned' but 'position_layout', 'position_exponent' and 'position_base' must be "
        "absent with it [clause=POS-1]",
    )
    require(
        c.position_layout != "halves" or c.d_model % 2 == 0,
        f"'d_model' is {c.d_model} but must be even with 'position_layout' 'halves' [clause=POS-2]",
    )
    require(
        c.position_base is None or (math.isfinite(c.position_base) and c.position_base > 1),
        f"'position_base' is {c.position_base} but must be finite and above 1 [clause=POS-4]",
    )
    require(
        c.position_start in (0, 1) or c.position_of_padding == "pad_row",
        f"'position_start' is {c.position_start} but must be 0 or 1 [clause=POS-5]",
    )
    require(
        c.position_of_padding != "pad_row" or c.position_start == c.pad_id + 1,
        f"'position_start' is {c.position_start} but must be {c.pad_id + 1} when 'position_of_padding' is "
        f"'pad_row': 'pad_id' is {c.pad_id}, and the next row is the first token's [clause=POS-6]",
    )
    require(
        c.position_padding_row is None
        or (c.positions == "learned" and 0 <= c.position_padding_row < c.max_positions),
        f"'position_padding_row' is {c.position_padding_row} but must lie in [0, {c.max_positions}), with "
        "'positions' 'learned' [clause=POS-7]",
    )
    require(
        c.position_of_padding != "zero_row" or c.position_start == 1,
        "'position_of_padding' is 'zero_row' but 'position_start' is 0; it must be 1, so that row 0 is "
        "free [clause=POS-6]",
    )
    require(
        c.max_positions > c.position_start,
        f"'max_positions' is {c.max_positions} but must be above 'position_start', which is "
        f"{c.position_start} [clause=POS-5]",
    )
    require(
        math.isfinite(c.mask_value) and c.mask_value < 0,
        f"'mask_value' is {c.mask_value} but must be finite and negative [clause=MSK-2]",
    )
    require(
        c.mask_assignment == "per_sample" or c.head_computation == "batched",
        "'mask_assignment' is 'batch_major' but 'head_computation' is 'looped'; it must be 'batched': "
        "'batch_major' needs stacked heads, and a loop does not stack them [clause=MSK-7]",
    )
    require(
        math.isfinite(c.norm_epsilon) and c.norm_epsilon > 0,
        f"'norm_epsilon' is {c.norm_epsilon} but must be finite and positive [clause=NRM-2]",
    )
    require(
        c.norm_variance == "biased" or c.d_model > 1,
        "'d_model' is 1 but must be above 1 with 'norm_variance' 'unbiased' [clause=NRM-4]",
    )
    require(
        c.pooler == "none" or c.pooling != "flatten",
        f"'pooler' is {c.pooler!r} but 'pooling' is 'flatten'; it must be 'first' or 'mean' [clause=HED-2]",
    )
    require(
        c.length_epsilon is None or (math.isfinite(c.length_epsilon) and c.length_epsilon > 0),
        f"'length_epsilon' is {c.length_epsilon} but must be finite and positive [clause=HED-5]",
    )
    require(
        math.isfinite(c.l2_weight) and c.l2_weight >= 0,
        f"'l2_weight' is {c.l2_weight} but must be finite and not negative [clause=LOS-4]",
    )
    require(
        c.ignore_label is None or (c.num_classes > 1 and 0 <= c.ignore_label < c.num_classes),
        f"'ignore_label' is {c.ignore_label} but must be a label below 'num_classes', which must be above "
        f"1 and is {c.num_classes} [clause=LOS-3]",
    )
    return problems
