import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, linear

X = torch.linspace(-1, 1, 35).reshape(7, 5)

DRAWING = {
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "normal": lambda x: torch.normal(x, 0.5),
}


def drawing(function, bias=0.0):
    layers = {"inner": linear(5, 11), "norm": lambda: nn.LayerNorm(11), "outer": linear(11, 3)}
    model = Of(lambda m, x: m.outer(function(m.norm(m.inner(x)))), layers)
    with torch.no_grad():
        model.outer.bias += bias
    return model


@pytest.mark.parametrize("kind", DRAWING)
def test_a_reference_that_draws_is_refused_and_judged_by_a_seed(kind):
    right, other, wrong = (drawing(DRAWING[kind], bias) for bias in (0, 0, 0.1))
    with pytest.raises(SpecError, match=r"reference draws random numbers.* \(test_draws\.py:\d+\)"):
        compare(right, wrong, {"x": X})
    state = torch.get_rng_state()
    comparison = prepare(right, other, {"x": X}, seed=5)
    comparison.allow_same_bits = False  # the arithmetics draw the same numbers as the runs
    assert comparison.verdict().passed
    assert compare(right, wrong, {"x": X}, seed=5).first == "outer"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_in_training_is_judged_by_a_seed_with_its_gradients():
    model = nn.Sequential(nn.Linear(5, 11), nn.Dropout(0.3), nn.Linear(11, 3))
    comparison = prepare(model, model, X, gradients=True, seed=3)
    comparison.allow_same_bits = False
    assert comparison.verdict().passed


def counted():
    calls = []
    return lambda x: calls.append(x) or x + 0.01 * len(calls)


def own_generator():
    generator = torch.Generator().manual_seed(7)
    return lambda x: x + torch.randn(x.shape, generator=generator)


def drawn_by_numpy(x):
    return x + torch.from_numpy(np.random.rand(*x.shape)).float()


def drawn_by_python(x):
    return x * random.random()


def sown_anew(x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (counted(), r"a different result .* first at outer"),
        (own_generator(), r"draws random numbers.* randn"),
        (drawn_by_numpy, r"a different result .* first at outer"),
        (drawn_by_python, r"a different result .* first at outer"),
    ],
)
def test_a_reference_that_gives_something_else_each_time_is_refused(function, words):
    with pytest.raises(SpecError, match=words):
        compare(drawing(function), drawing(function, 0.1), {"x": X})


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (drawn_by_numpy, {"seed": 5}),
        (drawn_by_python, {"seed": 5}),
        (sown_anew, {}),
        (lambda x: F.dropout(x, p=0.0), {}),
    ],
)
def test_a_seed_reaches_other_generators_and_what_draws_the_same_each_time_needs_none(function, options):
    assert compare(drawing(function), drawing(function), {"x": X}, **options).passed
    assert compare(drawing(function), drawing(function, 0.1), {"x": X}, **options).first == "outer"


def test_a_candidate_that_gives_something_else_each_time_does_not_agree():
    # Even if the noise is within the tolerance.
    right, noisy = drawing(lambda x: x), drawing(DRAWING["dropout"])
    assert compare(right, noisy, {"x": X}).status == "diverges"
    comparison = prepare(right, noisy, {"x": X})
    comparison.tensors = prepare(right, right, {"x": X}).tensors
    verdict = comparison.verdict()
    assert verdict.status == "undetermined"
    assert "the candidate gives a different result each time, first at " in str(verdict)


def test_a_function_that_draws_does_not_agree():
    model = drawing(lambda x: x)

    def run(x, size):
        with torch.no_grad():
            return {"output": model(torch.from_numpy(x)).numpy() + size * np.random.rand()}

    assert compare(model, lambda x: run(x, 1e-9), {"x": X}).passed  # too little noise to show
    assert compare(model, lambda x: run(x, 1), {"x": X}).status == "diverges"
