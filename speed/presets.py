"""Models and batches to measure, in common sizes."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from concord.backends.interface import Request
from concord.spec.batch import Batch, example_batch
from concord.spec.config import EncoderConfig, from_toml, variant, variants
from concord.spec.errors import located, unknown
from concord.spec.files import read_text
from concord.spec.training.recipe import Recipe
from concord.spec.training.trajectory import Training

# Without padding, or with the approximately log-normal lengths of real texts.
LENGTHS = ("full", "ragged")

# Ragged lengths: median as a share of T, and standard deviation of the logarithm. A sixteenth is cut at T.
MEDIAN, SIGMA = 0.4, 0.6

# Number of training steps to check, each on its own inputs. One step does not show whether moments are kept.
# Two steps on the same batch have nearly the same gradients, which hides the betas (decision 0029).
STEPS = 2

SEED = 0  # of weights and inputs

# AdamW with RoBERTa's hyperparameters (large, Liu et al. 2019, table 9), at the peak of its schedule and
# without dropout. Compared with gradients, epsilon is large enough for its placement to matter, and bfloat16
# can distinguish the second beta from 1 (decision 0029).
RECIPE = Recipe(
    algorithm="adam",
    learning_rate=4e-4,
    beta1=0.9,
    beta2=0.98,
    epsilon=1e-6,
    epsilon_placement="corrected",
    weight_decay=0.01,
    decay_form="times_rate",
    undecayed=("bias", "gamma", "beta"),
)


@dataclass(frozen=True)
class Preset:
    """A model and a batch of B samples with T tokens."""

    name: str
    source: str  # of the sizes
    config: EncoderConfig
    batch: int
    tokens: int
    ragged: tuple[int, ...] = ()  # lengths of the samples; empty for typical lengths


@dataclass(frozen=True)
class Workload:
    """A timed workload: inference or training, of full or ragged lengths."""

    preset: Preset
    kind: str = "inference"  # one of WORKLOAD_KINDS
    padding: str = "full"  # one of LENGTHS
    dtype: str = "float32"  # or tf32: float32 with products in TF32

    @property
    def settings(self) -> dict[str, str]:
        """Fields of a request: the dtype of tensors, and how float32 products are computed."""
        tf32 = self.dtype == "tf32"
        return {"dtype": "float32" if tf32 else self.dtype, "precision": "tf32" if tf32 else "strict"}

    @property
    def task(self) -> str:
        """The name without the precision."""
        return f"{self.preset.name} {self.kind} {self.padding}"

    @property
    def name(self) -> str:
        """The name in records."""
        return f"{self.task} {self.dtype}".removesuffix(" float32")

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The number of real tokens in each sample."""
        preset = self.preset
        return (
            list(preset.ragged) or ragged(preset.batch, preset.tokens)
            if self.padding == "ragged"
            else [preset.tokens] * preset.batch
        )

    @property
    def key(self) -> str:
        """A digest of everything that affects the results."""
        affecting = [
            self.preset.config.as_dict(),
            self.kind,
            self.lengths,
            self.preset.tokens,
            self.dtype,
            SEED,
            *([self.recipe.as_dict()] if self.recipe else []),
        ]
        return hashlib.sha256(json.dumps(affecting, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def recipe(self) -> Recipe | None:
        """The training recipe, or None for inference."""
        return RECIPE if self.kind == "training" else None

    @property
    def batches(self) -> list[Batch]:
        """The inputs: one batch, or one per training step."""
        lengths, count = self.lengths, STEPS if self.recipe else 1
        sizes = self.preset.config, len(lengths), self.preset.tokens
        return [example_batch(*sizes, SEED + step, lengths) for step in range(count)]

    def request(self, **settings: str) -> Request:
        """The request, without weights."""
        batches, options = self.batches, dict[str, Any](settings, **self.settings)
        if self.recipe:
            options["training"] = Training(self.recipe, [[batch] for batch in batches])
        return Request(self.preset.config, {}, batches[0], taps=False, gradients=bool(self.recipe), **options)


def ragged(batch: int, tokens: int) -> list[int]:
    """Evenly spaced quantiles of the log-normal distribution, cut at T."""
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / batch) for i in range(batch)]
    return [max(1, min(tokens, round(MEDIAN * tokens * math.exp(SIGMA * z)))) for z in quantiles]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Presets by name."""
    nndl, tf1 = variant("nndl-paddle-api", num_layers=1), variant("tf1-text-classifier")
    minilm = variant("bert", num_layers=6, d_model=384, num_heads=12, d_ff=1536)
    large = variant("bert", num_layers=24, d_model=1024, num_heads=16, d_ff=4096)
    entries = (
        Preset("nndl", "NNDL practice 8.4: one layer, batches of 32 x 52", nndl, 32, 52),
        Preset("tf1", "TF1 text classifier: batches of 128 x 100", tf1, 128, 100),
        Preset("minilm", "MiniLM, 6 layers of width 384", minilm, 8, 128),
        Preset("bert-base", "BERT base", variant("bert"), 8, 128),
        Preset("bert-base-64", "BERT base, at a size for GPUs", variant("bert"), 64, 128),
        Preset("bert-large", "BERT large, at a size for GPUs", large, 64, 512),
    )
    return {preset.name: preset for preset in entries}


# Fields of the workloads on GPUs by default. Training in float16 would need loss scaling.
DTYPES = ("float32", "tf32", "bfloat16", "float16")
GPU_WORKLOADS = tuple(
    (preset, kind, "full", dtype)
    for preset, kind, dtypes in (
        ("bert-base-64", "inference", DTYPES),
        ("bert-base-64", "training", DTYPES[:-1]),
        ("bert-large", "inference", DTYPES),
    )
    for dtype in dtypes
)

BATCH, TOKENS = 8, 128  # for a model that is not a preset


def own(name: str, source: str, config: EncoderConfig) -> Preset:
    """A model as a preset, with the usual batch."""
    room = config.max_tokens
    return Preset(name, source, config, BATCH, room if config.pooling == "flatten" else min(room, TOKENS))


def of_size(preset: Preset, batch: int | None, tokens: int | None) -> Preset:
    """Return a preset with a different batch, and refuse more tokens than positions."""
    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens}
    for axis, size in sizes.items():
        if size is not None:
            preset = replace(preset, name=f"{preset.name} {axis}={size}", **{axis: size})
    with located(preset.name):
        example_batch(preset.config, 1, preset.tokens)
    return preset


def named(name: str) -> Preset:
    """A preset, a variant, or a TOML file's model."""
    if name.endswith(".toml"):
        return own(Path(name).stem, name, from_toml(read_text(Path(name)), name))
    if name in variants():
        return own(name, "as published", variant(name))
    table = presets()
    if name not in table:
        raise unknown("preset", name, [*table, *variants()])
    return table[name]


def workload(preset: str, *fields: str) -> Workload:
    """A workload of a named preset."""
    return Workload(named(preset), *fields)
