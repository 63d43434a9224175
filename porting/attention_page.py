"""A page of a text's attention weights from several backends, with judgements.

L layers, H heads, T tokens; weights are indexed (layer, head, query, key).
"""

from __future__ import annotations

import base64
import math
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Run
from concord.conformance.judging import family
from concord.conformance.judging.estimate import Z
from concord.conformance.judging.expectation import JudgedProblem
from concord.conformance.judging.verdict import Verdict, number
from concord.conformance.run import record
from concord.conformance.run.campaign import Job, Report, Setup, conduct
from concord.conformance.run.page import render
from concord.conformance.run.report import tail
from concord.conformance.run.results_page import headline
from concord.conformance.wording import counted, joined
from concord.porting.prediction import TextModel
from concord.porting.texts import Text, batch_of
from concord.spec.arrays import Array
from concord.spec.batch import completed
from concord.spec.masks import real_tokens, visible_keys
from concord.spec.tensors import taps

# A masked key with at least this weight counts as attended to.
LEAK = 1e-6

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one backend."""

    backend: str
    weights: Array  # (L, H, T, T)
    errors: Array  # signed end-to-end errors of the weights, in tolerances; NaN where undetermined


@dataclass(frozen=True, eq=False)
class Attention:
    """A model's attention in a text or a pair."""

    title: str
    tokens: list[str]
    segments: list[int]  # the text of each token, 0 or 1; -1 for padding
    visible: NDArray[np.bool_]  # (T,), the same keys for all heads and queries (SPEC MSK-4, MSK-7)
    report: Report
    maps: list[AttentionMap]  # of backends that expose their weights

    def largest(self) -> dict[str, Array]:
        """Largest error (L, H) of each backend, and of the difference between the first two."""
        errors = {attention_map.backend: attention_map.errors for attention_map in self.maps}
        if len(self.maps) > 1:
            # The tolerance of a difference is sqrt(2) times that of each result.
            errors["difference"] = (self.maps[0].errors - self.maps[1].errors) / math.sqrt(2)
        return {name: np.fmax.reduce(abs(error), axis=(-2, -1)) for name, error in errors.items()}


@dataclass(frozen=True)
class _Looking(Job):
    names: tuple[str, ...] = ()
    seen: dict[int, AttentionMap] = field(default_factory=dict)

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        verdict = super().judge(run, rules)
        square = (1, self.config.num_heads, *2 * self.batch.required("input_ids").shape[1:])
        weights = [run.taps[name] for name in self.names if name in run.taps]
        if verdict.case is None or len(weights) < len(self.names) or {w.shape for w in weights} != {square}:
            return verdict
        expected = family.end_to_end(replace(verdict.case, gradients=False))
        actual = np.concatenate(weights)
        errors = np.full(actual.shape, np.nan, np.float32)
        for layer, name in enumerate(self.names):
            if name not in expected.undecided:
                value, sigma = expected.values[name][0], expected.sigmas[name][0]
                with np.errstate(all="ignore"):
                    z = (actual[layer] - value) / (Z * sigma)
                errors[layer] = np.where(np.isfinite(sigma), z, np.nan)
        self.seen[id(verdict)] = AttentionMap(run.backend, actual, errors)
        return verdict


def look(
    model: TextModel,
    text: Text,
    names: Sequence[str],
    settings: Setup,
    dtype: str = "float32",
    progress: Callable[[str, str], None] = lambda backend, done: None,
) -> Attention:
    """Run and judge backends on a text, keeping attention weights."""
    config, part = model.config, model.part
    (encoded,) = model.encoder.encode([text])
    batch = completed(config, batch_of(config, [encoded]), part)
    ids = batch.required("input_ids")
    real = real_tokens(config, ids)[0]
    second = encoded.places.index(1) if 1 in encoded.places else len(real)
    # Weights of padded queries may have been overwritten (SPEC MSK-8).
    last = "masked_weights" if config.query_mask == "overwrite" else "weights"
    tensors = [
        name for name in taps(config, part) if name.startswith("layers.") and name.endswith(f".{last}")
    ]
    case = (config, model.weights, batch)
    large = family.is_large(JudgedProblem(*case, part, dtype=dtype, gradients=False))
    # A large case's expectation is not cached: end-to-end judgement would derive it again.
    problem = ("text", "text", dtype, part, *case)
    job = _Looking(*problem, end_to_end=not large, gradients=False, names=tuple(tensors))
    report = conduct([job], names, settings, progress)
    maps = [job.seen[id(entry.verdict)] for entry in report.results if id(entry.verdict) in job.seen]
    tails = [tail(entry.backend) for entry in maps]
    return Attention(
        f"{model.name}: {text.text_a}{'' if text.text_b is None else f' | {text.text_b}'}",
        [*encoded.tokens, *["padding"] * (len(real) - len(encoded.ids))],
        [int(place >= second) if is_real else -1 for place, is_real in enumerate(real.tolist())],
        np.asarray(visible_keys(config, real[None], config.num_heads)[0, 0, 0]),
        report.explained(),
        [
            replace(entry, backend=short) if tails.count(short) == 1 else entry
            for entry, short in zip(maps, tails, strict=True)
        ],
    )


def attention_page(attention: Attention) -> str:
    """Render attention maps as one HTML file."""
    maps, largest = attention.maps, attention.largest()
    layers, heads = maps[0].weights.shape[:2] if maps else (0, 0)
    worst = [*largest.values()][-1] if maps else np.zeros((0, 0))
    # The page opens at the worst head of the first layer that exceeds a tolerance.
    beyond = np.flatnonzero((worst > 1).any(-1)).tolist() if maps else []
    contents = {
        "tokens": attention.tokens,
        "segments": attention.segments,
        "visible": [int(entry) for entry in attention.visible],
        "layers": layers,
        "heads": heads,
        "sides": [entry.backend for entry in maps],
        "leak": LEAK,
        "start": (beyond[0], int(np.nanargmax(worst[beyond[0]]))) if beyond else (0, 0),
    }
    subject = f"Attention of {joined([entry.backend for entry in maps]) or 'no backend'}"
    size = f"{counted(layers, 'layer')} of {counted(heads, 'head')} over {len(attention.tokens)} tokens"
    numbers = {
        f"{layer}.{head}": [number(float(error[layer, head])) for error in largest.values()]
        for layer, head in np.ndindex(layers, heads)
    }
    return render(
        "attention.html",
        record.make_record(attention.report, "attention", attention.title),
        TEMPLATES,
        script=(TEMPLATES / "attention.js").read_text(encoding="utf-8") if maps else "",
        headline=headline(attention.report.results, "reference"),
        compared=[f"{subject}: {size}."],
        letters=string.ascii_lowercase[: max(attention.segments, default=0) + 1],
        about=contents,
        coded=_coded(maps),
        headings=[*largest],
        numbers=numbers,
        attention=attention,
    )


def _coded(maps: Sequence[AttentionMap]) -> list[tuple[list[str], list[str]]]:
    coded = []
    for place, attention_map in enumerate(maps):
        weights = _halves(attention_map.weights)
        # Backends agree in most bits, so XOR with the first mostly yields zeros, which compress well.
        weights = weights ^ _halves(maps[0].weights) if place else weights
        coded.append(([*map(_packed, weights)], [*map(_packed, _halves(attention_map.errors))]))
    return coded


def _halves(values: Array) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # the largest errors become infinity
        return values.astype("<f2").view("<u2")


def _packed(codes: NDArray[Any]) -> str:
    return base64.b64encode(zlib.compress(codes.tobytes())).decode()
