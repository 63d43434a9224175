"""Attention weights of one text, as one or several backends computed them, each against the oracle.

L layers, H heads, T tokens; a weight is at (layer, head, query, key).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from concord.backends.interface import Run
from concord.conformance import family
from concord.conformance.campaign import Job, Report, Setup, conduct
from concord.conformance.estimate import Z
from concord.conformance.expectation import JudgedProblem
from concord.conformance.layout import tail
from concord.conformance.verdict import Verdict, number
from concord.spec.arrays import Array
from concord.spec.batch import Batch, completed
from concord.spec.config import EncoderConfig
from concord.spec.masks import real_tokens, visible_keys
from concord.spec.parameters import Weights
from concord.spec.tensors import taps
from concord.training.data.batching import padded
from concord.training.prediction import TextModel

LEAK = 1e-6
"""What a masked cell weighs at least to count as attended to."""


@dataclass(frozen=True, eq=False)
class ReadText:
    """One text as a model sees it.

    Attributes:
        title: what it is, in words.
        batch: its one sample.
        tokens: what each token is called, T.
        parts: to which of the texts of a pair each token belongs, 0 or 1, padding to either: T.
        part: of the model that there is (:data:`concord.spec.tensors.PARTS`).
    """

    title: str
    config: EncoderConfig
    weights: Weights
    batch: Batch
    tokens: tuple[str, ...]
    parts: tuple[int, ...]
    part: str = "model"

    @property
    def real(self) -> NDArray[np.bool_]:
        """Which tokens are not padding: (T,)."""
        real: NDArray[np.bool_] = real_tokens(self.config, self.batch.required("input_ids"))[0]
        return real

    @property
    def segments(self) -> list[int]:
        """To which text each token belongs; -1 of padding."""
        return [part if real else -1 for part, real in zip(self.parts, self.real.tolist(), strict=True)]

    @property
    def visible(self) -> NDArray[np.bool_]:
        """Which keys are visible, (T,): the same for all heads and queries (SPEC MSK-4, MSK-7)."""
        visible = visible_keys(self.config, self.real[None], self.config.num_heads)
        return np.asarray(visible[0, 0, 0])

    @property
    def names(self) -> list[str]:
        """The activations that hold the weights by which values are summed, one for each layer.

        Those of padded queries may have been overwritten (SPEC MSK-8).
        """
        last = "masked_weights" if self.config.query_mask == "overwrite" else "weights"
        return [
            name
            for name in taps(self.config, self.part)
            if name.startswith("layers.") and name.endswith(f".attention.{last}")
        ]


@dataclass(frozen=True, eq=False)
class BackendMaps:
    """The weights of one backend.

    Attributes:
        backend: as results call it, without its module.
        weights: (L, H, T, T).
        errors: their signed errors end to end, in tolerances, (L, H, T, T); NaN where nothing is determined.
    """

    backend: str
    weights: Array
    errors: Array


@dataclass(frozen=True, eq=False)
class Maps:
    """What was looked at, what came of the runs, and the weights of each that exposes them.

    Attributes:
        notes: what is not shown and why.
    """

    reading: ReadText
    report: Report
    sides: tuple[BackendMaps, ...]
    notes: tuple[str, ...] = ()

    def difference(self) -> Array:
        """Return by how much the first two backends differ, in tolerances of a difference, (L, H, T, T).

        Two right results differ by the root of 2 times what each errs.
        """
        found: Array = (self.sides[0].errors - self.sides[1].errors) / math.sqrt(2)
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and rows of what is said of each head in numbers.

        Of the first backend, over queries that are no padding: the mean entropy in bits, and the weight of
        masked keys; then the largest error of each backend in tolerances, and the largest difference of the
        first two.
        """
        real, visible = self.reading.real, self.reading.visible
        errors = {side.backend: side.errors for side in self.sides}
        if len(self.sides) > 1:
            errors["difference"] = self.difference()
        headings = ["layer", "head", "bits", "masked", *errors]
        if not self.sides:
            return headings, []
        weights = self.sides[0].weights.astype(np.float64)[..., real, :]
        with np.errstate(all="ignore"):
            bits = -np.sum(np.where(weights > 0, weights * np.log2(weights), 0.0), axis=-1).mean(-1)
        masked = weights[..., ~visible].sum(-1).mean(-1)
        largest = [np.fmax.reduce(abs(error), axis=(-2, -1)) for error in errors.values()]
        return headings, [
            [
                str(layer),
                str(head),
                f"{bits[layer, head]:.2f}",
                f"{masked[layer, head]:.2g}" if masked[layer, head] > LEAK else "0",
                *("–" if np.isnan(of[layer, head]) else number(float(of[layer, head])) for of in largest),
            ]
            for layer, head in np.ndindex(bits.shape)
        ]


def of_texts(name: str, model: TextModel, a: str, b: str | None = None) -> ReadText:
    """Return a text, or a pair, as a model sees it.

    Args:
        name: of the model.

    Raises:
        SpecError: if a text has more tokens than the model has positions, or none.
    """
    found, config = model.encoder.encode(a, b), model.config
    whole = config.pooling == "flatten" and model.part == "model"
    tokens = config.max_positions - config.position_start if whole else len(found.tokens)
    more = tokens - len(found.tokens)
    second = found.texts.index(1) if 1 in found.texts else tokens
    batch = padded(config, [(found.ids, found.segment_ids)], tokens)
    return ReadText(
        f"{name}: {a}{'' if b is None else f' | {b}'}",
        config,
        model.weights,
        completed(config, batch, model.part),
        (*found.tokens, *[model.encoder.text.padding or "padding"] * more),
        tuple(int(place >= second) for place in range(tokens)),
        model.part,
    )


def look(
    reading: ReadText,
    names: Sequence[str],
    settings: Setup,
    dtype: str = "float32",
    progress: Callable[[str, str], None] = lambda backend, done: None,
) -> Maps:
    """Have backends compute what a model reads, judge every tensor of each, and keep the attention weights.

    Args:
        progress: as :func:`concord.conformance.campaign.conduct` takes it.
    """
    case = (reading.config, reading.weights, reading.batch)
    large = family.is_large(JudgedProblem(*case, reading.part, dtype=dtype, gradients=False))
    # A large case is not kept: end to end it is estimated once, for the errors of the weights.
    about = ("text", "text", dtype, reading.part, *case)
    job = _Looking(*about, end_to_end=not large, gradients=False, names=tuple(reading.names))
    report = conduct([job], names, settings, progress)
    sides, notes = [], []
    tails = [tail(result.backend) for result in report.results]
    for result, short in zip(report.results, tails, strict=True):
        kept = next((side for verdict, side in job.seen if verdict is result.verdict), None)
        if kept is not None:
            sides.append(replace(kept, backend=short if tails.count(short) == 1 else result.backend))
        else:
            why = "does not expose attention weights: they are inside a kernel of its library"
            notes.append(f"{result.backend} {result.detail or why}")
    return Maps(reading, report.explained(), tuple(sides), tuple(notes))


@dataclass(frozen=True)
class _Looking(Job):
    """A job that keeps the attention weights of what it judges."""

    names: tuple[str, ...] = ()
    seen: list[tuple[Verdict, BackendMaps]] = field(default_factory=list)

    def judge(self, run: Run, rules: str | None = None) -> Verdict:
        verdict = super().judge(run, rules)
        square = (1, self.config.num_heads, *2 * self.batch.required("input_ids").shape[1:])
        weights = [run.taps.get(name) for name in self.names]
        if verdict.case is not None and all(one is not None and one.shape == square for one in weights):
            expected = family.end_to_end(replace(verdict.case, gradients=False))
            found = np.stack([one[0] for one in weights if one is not None])
            errors = np.full(found.shape, np.nan, np.float32)
            for layer, name in enumerate(self.names):
                if name not in expected.undecided:
                    value, sigma = expected.values[name][0], expected.sigmas[name][0]
                    with np.errstate(all="ignore"):
                        z = (found[layer] - value) / (Z * sigma)
                    errors[layer] = np.where(np.isfinite(sigma), z, np.nan)
            self.seen.append((verdict, BackendMaps(run.backend, found, errors)))
        return verdict
