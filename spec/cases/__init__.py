"""The standard cases that check every backend.

``python -m concord.spec.cases`` writes their files; ``--check`` fails if they drifted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, variant, variants
from concord.spec.parameters import Weights, initialize

# Each axis has its own size, prime where the model allows it, so that a transposed axis cannot pass.
SIZES: dict[str, int] = {
    "vocab_size": 29,
    "d_model": 14,
    "num_heads": 2,
    "d_ff": 17,
    "num_classes": 3,
    "num_layers": 1,
}
BATCH, TOKENS, ROOM = 5, 11, 13
TABLE = "embeddings.token.weight"

# Longer than kernels' blocks of 64, 128 and 256 keys, and not a multiple of any (decision 0015).
LONG = 263
# A table with ids beyond 16 bits, and ids at the limits of 7, 8, 11, 15 and 16 bits, at integer limits of
# half precisions, and in the first and last row. One variant uses row 1 as padding.
VOCABULARY = 70_001
LANDMARKS = (
    0,
    2,
    127,
    128,
    129,
    255,
    256,
    257,
    2049,
    32767,
    32768,
    32769,
    65504,
    65535,
    65536,
    65537,
    65792,
    69_999,
    70_000,
)
# Number of ids that occur only at the end of a long text. They make the last block of keys unique, and
# increase the running maximum.
LATE = 3
# A value between the lengths of a batch's pooled vectors: some are divided by it, and some by their length.
SHORT = 3.0


@dataclass(frozen=True)
class Scenario:
    """A kind of input that exposes a class of errors."""

    exposes: str  # in words
    profile: str = "generic"  # of the weights (parameters.PROFILES)
    padding: str = "ragged"  # of the batch (batch.PADDINGS)
    batch: int = BATCH
    tokens: int = TOKENS
    seed: int = 0  # of weights and inputs
    ids: tuple[int, ...] = ()  # the only ids in the texts; every other row of the token table is zero
    once: bool = False  # one precision suffices: a check in several precisions uses only the last one
    options: dict[str, Any] = field(default_factory=dict)  # configuration fields to set
    only: tuple[str, ...] = ()  # variants with this scenario; by default all without an entry in OWN


# Cases run one after another in one process. Neighbours differ either in masks and lengths or in every size,
# and the first sizes recur at the end. This detects leftovers of an earlier call (SPEC INP-6).
SCENARIOS: dict[str, Scenario] = {
    "ragged": Scenario(
        "rows that are full, of one token, half full, fully padded, and padded inside the text; two "
        "layers; gains and biases far from 1 and 0",
        options={"num_layers": 2},
    ),
    "peaked": Scenario("softmax rows that are nearly one-hot, and scores beyond 10000", profile="peaked"),
    "tiny": Scenario(
        "rows whose variance is near epsilon, which test its value and placement; flat softmax rows",
        profile="tiny",
    ),
    "offset": Scenario(
        "rows whose mean is far larger than their standard deviation, which test how the variance is "
        "computed",
        profile="offset",
    ),
    "single": Scenario(
        "a batch of one sample of one token: softmax over one key",
        padding="none",
        batch=1,
        tokens=1,
        once=True,
    ),
    "extreme": Scenario(
        "activations in both tails, saturated logits, a first token that is padding in one sample, seven "
        "heads",
        profile="extreme",
        padding="left",
        seed=1,
        once=True,
        options={"num_heads": 7},
    ),
    "long": Scenario(
        "one sample of 263 tokens, which fills all positions and exceeds the block sizes of kernels; ids "
        "beyond 8 and 16 bits, each used many times; the first token is padding; two layers of one head",
        padding="left",
        batch=1,
        tokens=LONG,
        seed=73,
        ids=LANDMARKS,
        once=True,
        options={
            "vocab_size": VOCABULARY,
            "d_model": 3,
            "num_heads": 1,
            "d_ff": 5,
            "num_classes": 2,
            "num_layers": 2,
        },
    ),
    "full": Scenario("no padding at all: masks must have no effect", padding="none"),
    "equal": Scenario(
        "every row ends in the same padding: it must still be masked; other inputs and labels than in the "
        "cases of the same size, which a backend may have kept",
        padding="equal",
        seed=2,
    ),
    "looped": Scenario(
        "one head after the other, with the mask of the correct sample",
        options={"head_computation": "looped", "mask_assignment": "per_sample"},
        once=True,
        only=("keras-attention",),
    ),
    "batched": Scenario(
        "all heads at once, without the published mask bug",
        options={"mask_assignment": "per_sample"},
        once=True,
        only=("keras-attention",),
    ),
    "sigmoid": Scenario(
        "one class: sigmoid cross-entropy of saturated logits, with an L2 term",
        profile="extreme",
        seed=10,
        options={"num_classes": 1, "l2_weight": 0.1},
        once=True,
        only=("tf1-text-classifier",),
    ),
    "ignored-label": Scenario(
        "samples that the loss leaves out; a final norm",
        options={"ignore_label": 1, "final_norm": True},
        once=True,
        only=("bert-pytorch",),
    ),
    "short": Scenario(
        "pooled vectors shorter and longer than the minimum length by which a vector is divided",
        options={"length_epsilon": SHORT},
        once=True,
        only=("sentence-bert",),
    ),
    "notes": Scenario(
        "sinusoid halves, positions from 1, scaled embeddings and an additive mask",
        options={
            "position_layout": "halves",
            "position_start": 1,
            "embedding_scale": "sqrt_d_model",
            "mask_fill": "add",
            "num_segments": 2,
        },
        once=True,
        only=("vanilla-encoder",),
    ),
}

# These variants share their layers with a variant that is tested in full. They need only the scenarios that
# test their own embeddings and heads.
OWN: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("roberta", "distilbert", "sentence-bert"), ("ragged", "single", "extreme")
)


def scenarios_of(name: str) -> list[str]:
    """Scenarios of a variant, in running order."""
    return [
        scenario
        for scenario, entry in SCENARIOS.items()
        if name in entry.only or (not entry.only and scenario in OWN.get(name, (scenario,)))
    ]


@dataclass(frozen=True)
class Case:
    """A standard case: a configuration with weights and inputs."""

    variant: str
    scenario: str
    part: str
    config: EncoderConfig
    weights: Weights
    batch: Batch

    @property
    def name(self) -> str:
        """Name in reports and files."""
        return f"{self.variant}-{self.scenario}" + ("" if self.part == "model" else f"-{self.part}")


def standard_cases(
    only: list[str] | None = None, part: str = "model", options: dict[str, Any] | None = None
) -> list[Case]:
    """Standard cases."""
    names = variants() if only is None else only
    return [build_case(name, scenario, part, options) for name in names for scenario in scenarios_of(name)]


def build_case(name: str, scenario: str, part: str = "model", options: dict[str, Any] | None = None) -> Case:
    """Return one standard case."""
    entry = SCENARIOS[scenario]
    published = variant(name)
    room = (
        entry.tokens if published.pooling == "flatten" else max(ROOM, entry.tokens + published.position_start)
    )
    segments = {"num_segments": published.num_segments}
    config = published.replace(
        **{**SIZES, **segments, "max_positions": room, **entry.options, **(options or {})}
    )
    weights: Weights = initialize(config, entry.seed, entry.profile, part)
    batch = example_batch(config, entry.batch, entry.tokens, entry.seed, entry.padding, part)
    if batch.labels is not None:  # the same in every example of this size
        batch = dataclasses.replace(batch, labels=np.roll(batch.labels, entry.seed))
    if entry.ids and batch.input_ids is not None:
        weights, batch = _with_ids(config, weights, batch, [row for row in entry.ids if row != config.pad_id])
    return Case(name, scenario, part, config, weights, batch)


def _with_ids(config: EncoderConfig, weights: Weights, batch: Batch, ids: list[int]) -> tuple[Weights, Batch]:
    input_ids = batch.required("input_ids")
    # The other ids repeat, so that each of their rows' gradients sums many terms.
    words = np.asarray(ids)[np.arange(input_ids.size) % (len(ids) - LATE)].reshape(input_ids.shape)
    words[:, -LATE:] = ids[-LATE:]
    rows = {}
    if TABLE in weights:
        used = np.isin(np.arange(config.vocab_size), [*ids, config.pad_id])[:, None]
        rows[TABLE] = np.where(used, weights[TABLE], 0.0)
    return {**weights, **rows}, dataclasses.replace(
        batch, input_ids=np.where(input_ids == config.pad_id, input_ids, words)
    )
