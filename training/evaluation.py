"""The page of an evaluation: figures of each class, confusions, and the samples that a model gets wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from concord.conformance import record
from concord.conformance.layout import render
from concord.training.data import Sample
from concord.training.metrics import Predictions, probabilities

MOST = 300
"""Wrong predictions that a page shows, those of the largest probability first."""


def page(figures: Mapping[str, Any], found: Predictions, samples: Sequence[Sample]) -> str:
    """Return an evaluation as HTML.

    Args:
        figures: what ``concord predict --json`` writes.
        samples: those of ``found``, by their numbers, and maybe others.
    """
    by_number = {sample.number: sample for sample in samples}
    names, shares, chosen = figures["labels"], probabilities(found.logits), found.chosen
    wrong = np.flatnonzero(chosen != found.truth)
    surest = wrong[np.argsort(-np.nan_to_num(shares[wrong].max(axis=1), nan=2.0), kind="stable")]
    rows = [
        {
            "text": " | ".join(text for text in (sample.text_a, sample.text_b) if text is not None),
            "right": names[found.truth[i]],
            "said": names[chosen[i]] if chosen[i] >= 0 else "none: NaN",
            "shares": (shares[i, found.truth[i]], shares[i, chosen[i]] if chosen[i] >= 0 else np.nan),
        }
        for i in surest[:MOST].tolist()
        for sample in [by_number[int(found.numbers[i])]]
    ]
    counted, right = figures["counted"], figures["counted"] - len(wrong)
    return render(
        "evaluation.html",
        record.made({**figures, "exit_code": 0}, "evaluation", figures["checkpoint"]),
        Path(__file__).parent / "templates",
        tone="quiet",
        headline=f"{right:,} of {counted:,} samples are predicted right",
        compared=[
            f"The model of {figures['checkpoint']}, computed by {figures['backend']} in {figures['dtype']}."
        ],
        sections={
            "classes": "Classes",
            "confusion": "Confusions",
            "wrong": "Wrong predictions" if rows else "",
        },
        rows=rows,
        wrong=len(wrong),
    )
