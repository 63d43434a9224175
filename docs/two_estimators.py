"""Compares the family's sigma with that of any model: ``python docs/two_estimators.py``.

The family's comes from the NumPy reference under Monte Carlo arithmetic, the other from the PyTorch backend
under a dispatch mode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from concord import spec
from concord.backends.taps import attach
from concord.backends.torch.backend import Adapter
from concord.backends.torch.model import TextClassifier
from concord.conformance.compare.aten_arithmetic import ExactMode, Perturbed, Rounded, computed, plainly
from concord.conformance.compare.module_reference import numbers
from concord.conformance.judging.estimate import SAMPLES, estimate
from concord.conformance.judging.family import expect
from concord.spec.cases import build_case

VARIANTS = ("bert-pytorch", "vanilla-encoder", "nndl-paddle", "roberta", "distilbert")
MEDIANS = (0.55, 0.8)
"""Bounds of a variant's median ratio of the two sigmas."""

EACH = (0.4, 1.05)
"""Bounds of an activation's median ratio."""

PAGE = """# Sigma by two estimators

A tolerance is a multiple of sigma, the standard deviation of correct results. Two estimators derive it.
They share only the code that averages errors, not the code that computes or perturbs:

- the family's estimator: the NumPy reference under Monte Carlo arithmetic, and rounded in four admissible
  ways;
- the estimator for [any model](any-model.md): the model in `backends/torch` under a dispatch mode, and
  rounded once.

Both computed the activations of five variants in float32, for the standard case `ragged`. The table shows
the second sigma divided by the first, element by element. It gives the median over all elements, and the
smallest and largest median of an activation.

| variant | activations | median | smallest of an activation | largest of an activation |
| --- | ---: | ---: | ---: | ---: |
{rows}

The two agree within a factor of about two. The family's sigma is larger, because it covers every
admissible algorithm of the [specification](../../spec/SPEC.md). The ratio is 1 where only rows
of a table are rounded.

The test suite requires medians of variants from {medians}, and medians of activations from {each}.
`python docs/two_estimators.py` writes this page.

## What to do next

Judge [any model](any-model.md), or see [why not a fixed tolerance](criteria.md).
"""


def ratios(variant: str) -> dict[str, np.ndarray]:
    """Any model's sigma divided by the family's, per element of each activation."""
    case = build_case(variant, "ragged")
    model = TextClassifier(case.config).eval()
    Adapter().load(model, case.config, case.weights, "model")
    names = {"input_ids", "segment_ids"} & set(spec.inputs(case.config))
    inputs = {name: torch.from_numpy(case.batch.required(name)) for name in sorted(names)}
    parameters = {name: computed(parameter) for name, parameter in model.named_parameters()}

    def compute(arithmetic, observer):
        def tap(name, tensor):
            array = numbers(tensor)
            observer(name, array[None] if arithmetic.samples else array.copy())
            return tensor

        attach(model.named_modules(), tap)
        with torch.no_grad(), plainly(), arithmetic:
            torch.func.functional_call(model, parameters, (), inputs)

    runs = [Rounded(), *map(Perturbed, range(SAMPLES))]
    _, sigmas = estimate(compute, "float32", truth=ExactMode(), arithmetics=runs)
    family = expect(case.config, case.weights, case.batch).sigmas
    return {name: sigma / family[name] for name, sigma in sigmas.items()}


def figures(by_activation: dict[str, np.ndarray]) -> tuple[float, list[float]]:
    """The median ratio, and the sorted medians of the activations."""
    values = np.concatenate([ratio.reshape(-1) for ratio in by_activation.values()])
    return float(np.median(values)), sorted(float(np.median(ratio)) for ratio in by_activation.values())


if __name__ == "__main__":
    rows = []
    for variant in VARIANTS:
        median, each = figures(ratios(variant))
        rows.append(f"| {variant} | {len(each)} | {median:.2f} | {each[0]:.2f} | {each[-1]:.2f} |")
    bounds = {name: "{} to {}".format(*bound) for name, bound in (("medians", MEDIANS), ("each", EACH))}
    page = Path(__file__).parent / "guides/two-estimators.md"
    page.write_text(PAGE.format(rows="\n".join(rows), **bounds))
