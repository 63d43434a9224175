import re

import pytest
import torch
from torch import nn

from concord.conformance.compare import compare, module_explanation
from concord.conformance.compare.differences import differences
from concord.conformance.explain.search import Effort, Spent
from concord.spec.precision import round_to_bits
from tests.toys.kinds import Of, drawn, linear
from tests.toys.surroundings import sample_of

TEXT = drawn(2, 7, 6)


def model(change=lambda model: None):
    layers = {"a": linear(6, 6), "norm": lambda: nn.LayerNorm(6)}
    model = Of(lambda m, x: m.norm(m.a(x)), layers)
    change(model)
    return model


def exchanged(module):
    module.a.weight.data[[1, 4]] = module.a.weight.data[[4, 1]].clone()


def one_element(module):
    module.norm.weight.data[5] *= 1.0001


DIFFERENCES = {
    "element": (one_element, r"`norm.weight` differs in 1 element: \[5\] is \S+ instead of \S+"),
    "rows": (exchanged, "`a.weight` has rows 1 and 4 swapped"),
    "setting": (lambda module: setattr(module.norm, "eps", 3e-4), "`norm.eps` is 0.0003 instead of 1e-05"),
    "format": (
        lambda module: setattr(module.a.weight, "data", module.a.weight.half().float()),
        "rounded to float16",
    ),
    "transposed": (
        lambda module: setattr(module.a.weight, "data", module.a.weight.T),
        "`a.weight` is transposed",
    ),
    "scaled": (lambda module: module.a.bias.data.mul_(3), "`a.bias` is multiplied by 3"),
}


@pytest.mark.parametrize("kind", sample_of(DIFFERENCES, lambda place, _: place < 3))
def test_what_two_modules_differ_in_is_the_cause_where_it_explains_the_divergence(kind):
    change, words = DIFFERENCES[kind]
    verdict = compare(model(), model(change), (0.02 * TEXT,)).explained()  # so that an epsilon matters
    assert verdict.cause.confident
    assert re.search(f"is explained by differences between the modules: .*{words}", verdict.cause.text)


def test_rounding_to_tf32_is_told_from_float16_by_the_range():
    small, rounded = model(), model()
    small.a.weight.data *= 1e-5  # below the normal numbers of float16
    rounded.a.weight.data = torch.from_numpy(round_to_bits(small.a.weight.detach().numpy(), 11)).float()
    assert "`a.weight` is rounded to tf32" in [each.text for each in differences(small, rounded, str)]


def test_aliases_and_other_layouts_are_no_difference():
    tied, own, other = model(), model(), model()
    for module in (tied, own):
        module.b = module.a
    other.a = nn.Linear(6, 12)  # a fused layer, say
    other.b = own.a
    assert not [*differences(tied, own, str)]
    assert not [*differences(model(), other, str)]
    own.a.weight.data[0, 0] += 1
    (difference,) = differences(tied, own, str)
    assert len(difference.values) == 2  # swapped into both places
    own.b = model().a
    texts = [difference.text for difference in differences(tied, own, str)]
    assert any("(in the reference, the same tensor as `b.weight`)" in text for text in texts)
    tied.kind, own.kind = None, "inter"
    assert "`kind` is inter instead of None" in [
        difference.text for difference in differences(tied, own, str)
    ]


def test_the_search_has_one_budget_and_the_verdict_does_without_it(monkeypatch):
    monkeypatch.setattr("concord.conformance.compare.module_explanation.LONGEST", 0.0)
    verdict = compare(model(), model(exchanged), (TEXT,))
    assert verdict.status == "diverges"
    assert verdict.explained().cause is None
    with pytest.raises(Spent, match="s of CPU time is reached"):
        Effort(-1.0).check()


def test_the_search_uses_one_thread_because_it_counts_the_time_of_one(monkeypatch):
    threads, before = [], torch.get_num_threads()
    monkeypatch.setattr(
        module_explanation, "find_cause", lambda *arguments: threads.append(torch.get_num_threads())
    )
    try:
        torch.set_num_threads(2)
        compare(model(), model(exchanged), (TEXT,)).explained()
        assert (threads, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
