"""What explains a divergence that no catalogue knows: differences of two modules, slips, numbers."""

import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare
from concord.conformance.compare.differences import differences
from concord.conformance.compare.module_reference import ModuleReference
from concord.conformance.explain.search import Effort, Spent
from concord.conformance.verdict import Judgement, Row, Verdict, verdict_lines

WIDTH, TOKENS = 6, 7


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quick(names, *first):
    """Return names, of which all but the first of each kind are slow."""
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Of(nn.Module):
    """A module of a function, with layers whose weights are drawn, and settings."""

    def __init__(self, function, settings=(), **layers):
        super().__init__()
        torch.manual_seed(1)
        self.function, self.eps, self.scale = function, 1e-5, 0.5
        for name, layer in layers.items():
            setattr(self, name, layer())
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.3, 0.5)

    def forward(self, x):
        return self.function(self, x)


LAYERS = {"a": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.LayerNorm(WIDTH)}
IMAGE, TEXT = drawn(2, 3, 5, 7), drawn(2, TOKENS, WIDTH)


def explained(right, wrong, x, arrays, **layers):
    """Return the verdict on a function beside another, at hand as a module or by its arrays."""
    one, other = (Of(function, **layers).eval() for function in (right, wrong))
    return compare(one, ModuleReference(other, args=(x,)).arrays if arrays else other, (x,)).explained()


# Two modules.


def model(change=lambda made: None):
    made = Of(lambda m, x: m.norm(m.scale * m.a(x)) / (m.eps + 1), **LAYERS).eval()
    change(made)
    return made


def exchanged(made):
    made.a.weight.data[[1, 4]] = made.a.weight.data[[4, 1]].clone()


def one_element(made):
    made.norm.weight.data[5] *= 1.0001


DIFFERENCES = {
    "epsilon": (lambda made: setattr(made.norm, "eps", 3e-4), "`norm.eps` is 0.0003 instead of 1e-05"),
    "element": (one_element, r"`norm.weight` differs in 1 element: \[5\] is \S+ instead of \S+"),
    "rows": (exchanged, "`a.weight` has rows 1 and 4 in each other's place"),
    "setting": (lambda made: setattr(made, "scale", 0.25), "`scale` is 0.25 instead of 0.5"),
    "format": (
        lambda made: setattr(made.a.weight, "data", made.a.weight.half().float()),
        "rounded to float16",
    ),
    "transposed": (lambda made: setattr(made.a.weight, "data", made.a.weight.T), "`a.weight` is transposed"),
    "scaled": (lambda made: made.a.bias.data.mul_(3), "`a.bias` is multiplied by 3"),
}


@pytest.mark.parametrize("difference", quick(DIFFERENCES, "epsilon", "element", "rows"))
def test_what_two_modules_differ_in_is_the_cause_where_it_explains_the_divergence(difference):
    change, words = DIFFERENCES[difference]
    inputs = 0.02 * TEXT  # small enough for an epsilon
    verdict = compare(model(), model(change), (inputs,)).explained()
    assert verdict.cause.confident
    assert re.search(f"is explained by what the modules differ in: .*{words}", verdict.cause.text)


def test_aliases_and_other_layouts_are_no_difference():
    tied, own, other = model(), model(), model()
    for made in (tied, own):
        made.b = made.a
    other.a = nn.Linear(WIDTH, 2 * WIDTH)  # such as a fused one
    other.b = own.a
    assert not [*differences(tied, own, str)]
    assert not [*differences(model(), other, str)]
    own.a.weight.data[0, 0] += 1
    (found,) = differences(tied, own, str)
    assert len(found.values) == 2  # put into both places
    own.b = model().a
    texts = [found.text for found in differences(tied, own, str)]
    assert any("(in the reference it is `b.weight`)" in text for text in texts)


# Modules whose code differs.


def attend(m, x, seen, fill=float("-inf")):
    scores = (m.a(x) @ x.transpose(1, 2)).masked_fill(~seen, fill)
    return torch.softmax(scores, -1) @ x


def causal(corner=0, window=TOKENS):
    return torch.ones(TOKENS, TOKENS).tril(corner).triu(1 - window).bool()


def recur(m, x, skipped=None, lost=False):
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(TOKENS):
        u = x[:, t + (t == skipped)]
        h = torch.tanh(
            m.a(u) + F.linear(torch.zeros_like(h) if lost and t == 3 else h, m.norm.weight * torch.eye(WIDTH))
        )
        states.append(h)
    return torch.stack(states, 1)


def convolved(m, x, mode="constant", **kwargs):
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode), m.c.weight, m.c.bias, **kwargs)


CONV = {"c": lambda: nn.Conv2d(3, 4, 3, padding=1)}

SLIPS = {
    "a mask by a factor": (
        lambda m, x: attend(m, x, causal()),
        lambda m, x: attend(m, x, causal(), 0.0), TEXT, "multiplies scores by 0"),
    "a corner off by one": (
        lambda m, x: attend(m, x, causal()),
        lambda m, x: attend(m, x, causal(1)), TEXT, "one (ear|la)\\w+ \\w+ more"),
    "a window off by one": (
        lambda m, x: attend(m, x, causal(0, 3)),
        lambda m, x: attend(m, x, causal(0, 4)), TEXT, "one \\w+ \\w+ more"),
    "a shift by one pixel": (
        lambda m, x: m.c(x),
        lambda m, x: torch.roll(m.c(x), 1, -1), IMAGE, "order of axis 3|shift by one"),
    "a shift with an edge": (
        lambda m, x: m.a(x),
        lambda m, x: F.pad(m.a(x)[:, :-1], (0, 0, 1, 0)), TEXT, "shift by one along axis 1"),
    "a border": (
        lambda m, x: m.c(x), lambda m, x: convolved(m, x, "reflect"), IMAGE, "mirrored at its border"),
    "a step skipped": (recur, lambda m, x: recur(m, x, 2), TEXT, "step that is skipped, place 3 of axis 1"),
    "a state lost": (recur, lambda m, x: recur(m, x, lost=True), TEXT, "state that is not carried on"),
    "n - 1": (
        lambda m, x: m.a(x) / (x * x).mean(-1, keepdim=True),
        lambda m, x: m.a(x) / ((x * x).sum(-1, keepdim=True) / (WIDTH - 1)), TEXT, "n - 1 in place of n"),
    "parts exchanged": (
        lambda m, x: torch.sub(*torch.exp(m.a(x)).split(3, -1)),
        lambda m, x: torch.sub(*torch.exp(m.a(x)).split(3, -1)[::-1]), TEXT, "exchanged"),
    "a number": (
        lambda m, x: m.a(x) ** 2 * 0.7, lambda m, x: m.a(x) ** 2 * 0.61, TEXT, "mul with 0.61 inst"),
    "an epsilon outside": (
        lambda m, x: m.a(x) / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3),
        lambda m, x: m.a(x) / (torch.sqrt((x * x).mean(-1, keepdim=True)) + 1e-3), TEXT, "added to the root"),
    "rows under a bias": (
        lambda m, x: m.a(x),
        lambda m, x: F.linear(x, m.a.weight[[0, 5, 2, 3, 4, 1]], m.a.bias), TEXT,
        "order of axis 2 under a bias: 1 and 5 have changed places"),
}  # fmt: skip


@pytest.mark.parametrize(
    "slip",
    quick(
        SLIPS, "a mask by a factor", "a border", "a step skipped", "n - 1", "a number", "rows under a bias"
    ),
)
def test_a_slip_that_no_catalogue_knows_is_named(slip):
    right, wrong, x, words = SLIPS[slip]
    verdict = explained(right, wrong, x, True, **LAYERS, **CONV)
    assert re.search(words, verdict.cause.text)


OPENED = {
    "goes on": (
        lambda m, x: m.a(x) * 2, lambda m, x: F.layer_norm(m.a(x) * 2, (WIDTH,), eps=1e-3),
        r"has the right numbers after mul \(.*\), and goes on with native_layer_norm \("),
    "ends early": (
        lambda m, x: torch.cumsum(m.a(x) * 3, 1) + x[:, :1].cos() * 7,
        lambda m, x: torch.cumsum(m.a(x) * 3, 1),
        r"the candidate ends with cumsum \(.*\); in the reference \w+ \(.*\) follows"),
    "nothing to compute": (
        lambda m, x: m.a(x), lambda m, x: m.a(x).flip(1).sinh(),
        r"nothing is computed there in the reference, flip \(.*\) in the candidate"),
    "another product without effect": (
        lambda m, x: torch.bmm(x, x.transpose(1, 2)).sinh() @ m.a(x),
        lambda m, x: torch.stack([y @ y.T for y in x]).sinh().sinh() @ m.a(x),
        r"part: bmm \(.*\) in the reference, sinh \(.*\) to"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPENED)
def test_wrong_numbers_are_followed_back_to_right_ones(kind):
    right, wrong, words = OPENED[kind]
    said = str(explained(right, wrong, TEXT / 3, False, **LAYERS))
    assert re.search(words, said)


def test_positions_that_are_wrong_and_few_elements_are_no_other_order():
    class Table(nn.Module):
        def __init__(self, by):
            super().__init__()
            torch.manual_seed(2)
            self.table, self.by = nn.Embedding(13, WIDTH), by

        def forward(self, x):
            return x + self.table(torch.arange(TOKENS) + self.by)

    arrays = ModuleReference(Table(3).eval(), args=(TEXT,)).arrays
    assert "another order" not in str(compare(Table(0).eval(), arrays, (TEXT,)))
    right, wrong = (Of(lambda m, x, f=f: m.a(x).sum((1, 2)) * f) for f in (1.0, -1.0))
    for made in (right, wrong):
        made.a = nn.Linear(WIDTH, WIDTH)
        made.a.load_state_dict(right.a.state_dict())
    found = compare(right.eval(), ModuleReference(wrong.eval(), args=(TEXT,)).arrays, (TEXT,))
    assert "another order" not in str(found)


# What is said, and how long it may take.


def test_the_search_has_one_budget_and_the_verdict_does_without_it(monkeypatch):
    monkeypatch.setattr("concord.conformance.compare.explanation.LONGEST", 0.0)
    verdict = compare(model(), model(exchanged), (TEXT,))
    assert verdict.status == "diverges"
    assert verdict.explained().cause is None
    with pytest.raises(Spent, match="s of the processor are spent"):
        Effort(-1.0).check()


@pytest.mark.parametrize(
    ("given", "words", "never"),
    [
        (
            {"z": 4.6e44, "actual": 0.5, "expected": 0.0, "sigma": 1e-38},
            "where the exact value is 0",
            "tolerances",
        ),
        ({"z": np.inf, "actual": np.nan, "expected": 0.5, "sigma": 1e-7}, "the run nan, oracle 0.5", "inf"),
        (
            {"z": 7.0, "rms": 9.0, "actual": 0.5, "expected": 0.4, "sigma": 0.1},
            "none alone lies beyond",
            "0 of",
        ),
    ],
)
def test_numbers_are_told_where_a_ratio_says_nothing(given, words, never):
    judged = Judgement("diverges", element=(0, 3), beyond=int(given["z"] > 16), size=17, **given)
    said = "\n".join(verdict_lines(Verdict([Row("a", "", "diverges", judged, None, "", 17)])))
    assert words in said.splitlines()[1]
    assert never not in said.splitlines()[1].replace("tolerance ±", "")
    assert "--forward-only" not in said


def test_what_else_is_wrong_by_itself_is_said():
    right, wrong = (nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).eval() for _ in range(2))
    wrong.load_state_dict(right.state_dict())
    for place in (0, 2):
        wrong[place].weight.data += 0.1
    said = str(compare(right, wrong, drawn(3, 5)))
    assert "wrong too, judged alone: `2`" in said
    assert "computed by \n" not in said


def test_differences_lie_where_the_stretch_runs():
    (found,) = differences(model(), model(exchanged), str)
    assert found.within({"a"})
    assert found.within({""})
    assert not found.within({"norm"})
    assert dataclasses.replace(found, values={}).within({"a"}) is False
