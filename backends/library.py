"""What the library implementations of the four frameworks share: what their layers cannot express. No framework is called here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from concord.backends.interface import Request
from concord.spec.config import EncoderConfig
from concord.spec.masks import mask_constants, sees_nothing

ATTENTION_ALONE = ("attention", "dot_product")
"""The parts that have no norm."""

UNDELIVERED = ("*attention.scores", "*attention.masked_scores", "*attention.weights")
"""Patterns of the taps that stay inside the kernel."""

UNDELIVERED_BY_LAYERS = (
    "layers.*.attention.*",
    "layers.*.feed_forward.*",
    "layers.*.norm?",
    "layers.*.residual?",
)
"""Patterns of the taps that stay inside an encoder layer of the framework's own. Its result is delivered."""

ABSORBING = 2.0**40
"""What leaves no digit of a score of a half precision if a float32 adds it."""

ENCODER_LAYER = {
    ("qkv_bias", False): "nn.TransformerEncoderLayer has biases everywhere or nowhere (ATT-1)",
    ("qkv_activation", "relu"): "nn.TransformerEncoderLayer has none on query, key and value (ATT-1)",
    ("output_projection", False): "nn.TransformerEncoderLayer always has one (ATT-6)",
    ("norm_sharing", "shared"): "nn.TransformerEncoderLayer has two norms (NRM-5)",
    ("mask_assignment", "batch_major"): "its mask is one for all heads of a sample (MSK-7)",
}
"""What PyTorch's encoder layer cannot express, and Paddle's neither, which was made after it."""


def reasons_of(config: EncoderConfig, options: Mapping[tuple[str, Any], str]) -> list[str]:
    """Return what keeps a configuration from being computed, one line for each option that it has."""
    return [
        f"{option}={value!r}: {why}"
        for (option, value), why in options.items()
        if getattr(config, option) == value
    ]


@dataclass(frozen=True)
class LibraryLayers:
    """What library layers are made of.

    Attributes:
        attention, norm: how the framework calls them.
        float32_scores: whether the scores of half precisions are float32 there.
    """

    attention: str
    norm: str
    float32_scores: bool

    def unsupported_reasons(self, request: Request) -> list[str]:
        """Return what keeps a request from being computed by library layers, one line for each option; nothing if they can."""
        found = reasons_of(
            request.config,
            self.of_attention()
            if request.part in ATTENTION_ALONE
            else {**self.of_attention(), **self.of_norms()},
        )
        constant = mask_constants(request.config)[request.dtype]
        half = self.float32_scores and request.dtype in ("bfloat16", "float16")
        if half and sees_nothing(request.config, request.batch) and abs(constant) < ABSORBING:
            found.append(
                f"mask_value={request.config.mask_value!r}: {self.attention} adds to float32 scores, where {constant:g} leaves digits of a row without any key that {request.dtype} drops (MSK-5)"
            )
        return found

    def of_attention(self) -> dict[tuple[str, Any], str]:
        """Return the options that the attention does not have."""
        return {
            ("mask_fill", "replace"): f"{self.attention} only adds to scores (MSK-3)",
            ("query_mask", "overwrite"): f"{self.attention} does not give its weights away (MSK-8)",
        }

    def of_norms(self) -> dict[tuple[str, Any], str]:
        """Return the options that the norm does not have."""
        return {
            ("norm_epsilon_placement", "outside"): f"{self.norm} adds epsilon to the variance (NRM-3)",
            ("norm_variance", "unbiased"): f"{self.norm} divides by D (NRM-4)",
        }
