"""Reports of runs that never were."""

import dataclasses

import numpy as np

from concord.conformance.campaign import Report, Setup
from concord.conformance.estimate import R, Z
from concord.conformance.explain import Cause, Diagnosis
from concord.conformance.explain.breakdown import break_down
from concord.conformance.explain.conclusions import conclude
from concord.conformance.verdict import Z_BINS, Judgement, Result, Row, Verdict

TENSORS = [
    ("embeddings.sum", "EMB-6"),
    *(
        (f"layers.{layer}.attention.{name}", "ATT-2")
        for layer in range(2)
        for name in ("query", "scores", "weights")
    ),
    ("pooling", "HED-1"),
    ("logits", "HED-3"),
    ("loss", "LOS-2"),
    ("gradients.classifier.weight", "GRD-1"),
]


AXES = ("batch", "classes")


def judgement(ratio, size=6, **fields):
    """Return a judgement of so many tolerances.

    One element has the largest error, the others a tenth of it.
    """
    counts = [0] * (len(Z_BINS) + 1)
    for z in [ratio * Z, *[ratio * Z / 10] * (size - 1)]:
        counts[sum(edge <= z for edge in Z_BINS)] += 1
    values = {
        "element": (0, 1),
        "actual": 0.5 + ratio,
        "expected": 0.5,
        "sigma": 1 / Z,
        "beyond": int(ratio > 1),
        "histogram": tuple(counts),
    }
    return Judgement(
        "diverges" if ratio > 1 else "agrees", ratio * Z, ratio * R / 2, size=size, **{**values, **fields}
    )


def row(name, clause, local, end_to_end=None, note=""):
    """Return a row; one without judgements could not be compared."""
    judged = [None if ratio is None else judgement(ratio) for ratio in (local, end_to_end)]
    way = 0 if judged[0] else 1
    deciding = judged[way]
    if deciding and deciding.status == "diverges":
        judged[way] = deciding = dataclasses.replace(deciding, breakdown=breakdown(deciding.ratio))
    return Row(name, clause, deciding.status if deciding else "diverges", *judged, note, 6, AXES)


def breakdown(ratio):
    """Return where the error of a tensor of two rows and three columns lies: all in one element."""
    scores = np.full((2, 3), Z / 10)
    scores[0, 1] = ratio * Z
    value, sigma = np.full((2, 3), 0.5), np.full((2, 3), 1 / Z)
    return break_down(value + scores / Z, value, sigma, scores, AXES)


def verdict(ratio=0.1, wrong=None, error=500.0, cause=None, tensors=TENSORS):
    """Return a verdict, in which perhaps the tensor at one place is wrong, and all that follow inherit it."""
    table = []
    for place, (name, clause) in enumerate(tensors):
        inherited = error / 2 if wrong is not None and place >= wrong else ratio
        table.append(row(name, clause, error if place == wrong else ratio, inherited))
    first = tensors[wrong or 0]
    return Verdict(table, Diagnosis(first[0], (first[1],), cause) if cause else None)


def result(backend="torch", status=None, judged=None, **fields):
    """Return a result: of a status without a verdict, or of a verdict."""
    judged = judged or (verdict() if status is None else None)
    values = {"group": "bert", "case": "bert-ragged", "dtype": "float32", "seconds": 0.25, **fields}
    return Result(backend, status=status or (judged.status if judged else ""), verdict=judged, **values)


CAUSE = Cause("scale", "The scores are too large by a factor of 1.001.", True)


def mixed():
    """Return a report of everything that can become of a run."""
    undetermined = Verdict(
        [
            Row(
                name,
                clause,
                "undetermined",
                None,
                Judgement("undetermined", size=6, note="out of range"),
                "out of range",
                6,
                AXES,
            )
            for name, clause in TENSORS
        ]
    )
    unlike = verdict()
    unlike.table[3] = Row(
        "layers.0.attention.weights",
        "ATT-2",
        "diverges",
        note="has shape (2, 3) but must be (3, 2)",
        size=6,
        axes=AXES,
    )
    unlike.table[5] = Row(
        "layers.1.attention.scores", "ATT-2", "not exposed", note="declared by the backend", size=6, axes=AXES
    )
    results = [
        result("torch", case="bert-full"),
        result("torch"),
        result("torch", dtype="float64"),
        result("my.plugin:Backend", judged=verdict(wrong=5, cause=CAUSE)),
        result("my.plugin:Backend", judged=verdict(wrong=5, error=1e9), dtype="float64"),
        result("my.plugin:Backend", case="bert-full", judged=verdict(wrong=1, error=float("inf"))),
        result("jax", judged=unlike),
        result("jax", "unsupported", detail="no such precision", dtype="float64"),
        result("tf", "crashed", detail="killed by SIGSEGV", stderr="first words\nlast words"),
        result("tf", "crashed", detail="killed by SIGSEGV", dtype="float64"),
        result("paddle", "absent", detail="No module named 'paddle'"),
        result("half", judged=undetermined, dtype="float16"),
    ]
    environments = {
        "torch": {
            "version": "2.0",
            "devices": ["cpu"],
            "threads": 2,
            "precision_switches": {"matmul": "highest", "tf32": False},
            "import_seconds": 1.5,
            "peak_memory_bytes": 2**28,
        },
        "my.plugin:Backend": {
            "version": "1.0",
            "deviations": [{"name": "softmax_floor", "value": -64.0, "reason": "the kernel clips"}],
        },
    }
    notes = {"not compared, 3 x lr": "belongs to the optimizer"}
    results, conclusions = conclude(results)
    return Report(results, environments, Setup(), 12.0, notes, conclusions)


def agreeing(names=("torch", "tf", "paddle", "jax"), cases=2, tensors=TENSORS):
    """Return a report in which everything agrees."""
    verdicts = [verdict(0.05 + 0.01 * case, tensors=tensors) for case in range(cases)]
    results = [
        result(name, judged=judged, case=f"case-{case}", dtype=dtype)
        for name in names
        for case, judged in enumerate(verdicts)
        for dtype in ("float64", "float32")
    ]
    return Report(results, {name: {"version": "1.0"} for name in names}, Setup(), 3.0)


def large(wrong=None, cases=44):
    """Return a report as large as that of a whole check, if it is of all cases: 352 runs of 60 tensors."""
    taps = [(f"layers.{place // 16}.attention.masked_scores{place}", "ATT-2") for place in range(40)]
    tensors = [
        *taps,
        *((f"gradients.layers.{place}.feed_forward.inner.weight", "GRD-1") for place in range(20)),
    ]
    report = agreeing(cases=cases, tensors=tensors)
    if wrong is not None:
        judged = verdict(wrong=wrong, tensors=tensors)
        report.results = [
            result(r.backend, judged=judged, case=r.case, dtype=r.dtype) for r in report.results
        ]
    return report
