"""The standard cases: what every backend is checked on, and the language-neutral files beside this module.

``python -m spec.cases`` writes the files; ``python -m spec.cases --check`` fails if they have drifted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spec.batch import Batch, example_batch
from spec.config import EncoderConfig, variant, variants
from spec.parameters import Weights, initialize

# Each axis has a size of its own, prime wherever the model allows it, so that a transposed axis cannot pass.
SIZES: dict[str, int] = {"vocab_size": 29, "d_model": 14, "num_heads": 2, "d_ff": 17, "num_classes": 3, "num_layers": 1}
BATCH, TOKENS, ROOM = 5, 11, 13


@dataclass(frozen=True)
class Scenario:
    """A kind of input that makes a class of errors visible.

    Attributes:
        exposes: what it is for, in words.
        profile: of the weights (:data:`spec.PROFILES`).
        padding: of the batch (:data:`spec.PADDINGS`).
        batch, tokens: sizes of the batch.
        options: configuration fields that it sets.
        only: the variants that it is for; all by default.
    """

    exposes: str
    profile: str = "generic"
    padding: str = "ragged"
    batch: int = BATCH
    tokens: int = TOKENS
    options: dict[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()


SCENARIOS: dict[str, Scenario] = {
    "ragged": Scenario(
        "rows that are full, of one token, half full, fully padded, and padded inside the text; two layers; gains and biases far from 1 and 0",
        options={"num_layers": 2},
    ),
    "peaked": Scenario("softmax rows that are all but one-hot, and scores beyond 10000", profile="peaked"),
    "tiny": Scenario("rows whose variance is near epsilon: its value and its place; flat softmax rows", profile="tiny"),
    "offset": Scenario("rows whose mean is far larger than their deviation: how the variance is computed", profile="offset"),
    "single": Scenario("a batch of one sample of one token: softmax over one key", padding="none", batch=1, tokens=1),
    "full": Scenario("no padding at all: masks must have no effect", padding="none"),
    "equal": Scenario("every row ends in the same padding: it must be masked all the same", padding="equal"),
    "looped": Scenario(
        "one head after the other, with the mask of the right sample",
        options={"head_computation": "looped", "mask_assignment": "per_sample"},
        only=("keras-attention",),
    ),
    "batched": Scenario("all heads at once, without the published mask bug", options={"mask_assignment": "per_sample"}, only=("keras-attention",)),
    "sigmoid": Scenario("one class: sigmoid cross-entropy, with an L2 term", options={"num_classes": 1, "l2_weight": 0.1}, only=("tf1-text-classifier",)),
    "ignored-label": Scenario("samples that the loss leaves out; a final norm", options={"ignore_label": 1, "final_norm": True}, only=("bert-pytorch",)),
    "notes": Scenario(
        "sinusoid halves, positions from 1, scaled embeddings, additive mask: the options of the notes",
        options={"position_layout": "halves", "position_start": 1, "embedding_scale": "sqrt_d_model", "mask_fill": "add", "num_segments": 2},
        only=("vanilla-encoder",),
    ),
}
"""Every scenario by name."""


@dataclass(frozen=True)
class Case:
    """A standard case: a configuration, its weights and its inputs."""

    variant: str
    scenario: str
    part: str
    config: EncoderConfig
    weights: Weights
    batch: Batch

    @property
    def name(self) -> str:
        """Its name in reports and files."""
        return f"{self.variant}-{self.scenario}" + ("" if self.part == "model" else f"-{self.part}")


def standard_cases(only: list[str] | None = None, part: str = "model", options: dict[str, Any] | None = None) -> list[Case]:
    """Return the standard cases.

    Args:
        only: names of variants; all by default.
        part: one of :data:`spec.PARTS`.
        options: configuration fields to replace in every case.
    """
    chosen = variants() if only is None else only
    return [
        build_case(name, scenario, part, options)
        for name in chosen
        for scenario, entry in SCENARIOS.items()
        if not entry.only or name in entry.only
    ]


def build_case(name: str, scenario: str, part: str = "model", options: dict[str, Any] | None = None) -> Case:
    """Return one standard case.

    Args:
        name: of the variant.
        scenario: one of :data:`SCENARIOS`.
    """
    entry = SCENARIOS[scenario]
    published = variant(name)
    room = entry.tokens if published.pooling == "flatten" else ROOM
    segments = {"num_segments": published.num_segments}
    config = published.replace(**{**SIZES, **segments, "max_positions": room, **entry.options, **(options or {})})
    weights = initialize(config, seed=0, profile=entry.profile, part=part)
    batch = example_batch(config, entry.batch, entry.tokens, seed=0, padding=entry.padding, part=part)
    return Case(name, scenario, part, config, weights, batch)
