"""What explains a divergence that no catalogue knows: slips, and where wrong numbers come from."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare
from concord.conformance.compare.module_reference import ModuleReference
from tests.toys.kinds import Of, drawn

WIDTH, TOKENS = 6, 7


LAYERS = {"a": lambda: nn.Linear(WIDTH, WIDTH), "norm": lambda: nn.LayerNorm(WIDTH)}
IMAGE, TEXT = drawn(2, 3, 5, 7), drawn(2, TOKENS, WIDTH)


def explained(right, wrong, x, arrays, **layers):
    """Return the verdict on a function beside another, at hand as a module or by its arrays."""
    one, other = (Of(function, layers).eval() for function in (right, wrong))
    return compare(one, ModuleReference(other, args=(x,)).arrays if arrays else other, (x,)).explained()


# Modules whose code differs.


def attend(m, x, seen, fill=float("-inf")):
    scores = (m.a(x) @ x.transpose(1, 2)).masked_fill(~seen, fill)
    return torch.softmax(scores, -1) @ x


def causal(corner=0):
    return torch.ones(TOKENS, TOKENS).tril(corner).bool()


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


QUICK = ("a mask by a factor", "a border", "a step skipped", "n - 1", "a number", "rows under a bias")


@pytest.mark.parametrize(
    "slip", [pytest.param(slip, marks=[pytest.mark.slow] * (slip not in QUICK)) for slip in SLIPS]
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
    "a stretch": (
        lambda m, x: torch.softmax(x[0] @ x[0].T, -1) @ x[0],
        lambda m, x: (powers := torch.exp(x[0] @ x[0].T)) / powers.sum(0) @ x[0],
        r"part: _softmax \(.*\) in the reference, exp \(.*\) to mm \(.*\) in the candidate"),
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
    verdict = explained(
        lambda m, x: m.a(x).sum((1, 2)), lambda m, x: -m.a(x).sum((1, 2)), TEXT, True, **LAYERS
    )
    assert "another order" not in str(verdict)
