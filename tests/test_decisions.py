"""What rounding decides: right algorithms do not diverge at a tie, wrong ones do, and the rest is judged."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from concord.conformance.compare import compare
from concord.conformance.progress import listening
from tests.toys.kinds import drawn, linear

LEVEL = 0.1


class Of(nn.Module):
    """A module of a function, with layers of the same weights."""

    def __init__(self, function, layers):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        for name, make in layers.items():
            setattr(self, name, make())

    def forward(self, x):
        return self.function(self, x)


@dataclass
class Kind:
    """A discrete computation, right algorithms beside it, and wrong ones."""

    right: object
    others: list
    wrong: list
    tied: torch.Tensor
    layers: dict = field(default_factory=dict)
    gradients: bool = False

    @property
    def plain(self):
        """Inputs like the tied ones, without a tie."""
        return drawn(*self.tied.shape, seed=5) * self.tied.std() + 0.01

    def verdict(self, candidate, x, alone=False):
        """Compare a candidate, as a module or by its outputs alone."""
        model, port = (Of(function, self.layers).eval() for function in (self.right, candidate))
        if not alone:
            return compare(model, port, {"x": x}, gradients=self.gradients)
        with torch.no_grad():
            return compare(model, {"output": port(x).numpy()}, {"x": x})


def in_float64(function):
    return lambda m, x: function(m, x.double()).float()


# Levels.

GRID = torch.cat([torch.arange(-9, 10)[None] * LEVEL / 2, drawn(2, 19)])


def levels(x, near=torch.round, inverse=False, shift=0):
    return (near(x * (1 / LEVEL) if inverse else x / LEVEL) + shift) * LEVEL


def quantized(x, near=torch.round, inverse=False, shift=0):
    """Step and zero point are those of the tensor."""
    step = (x.max() - x.min()) / 255
    place, point = (part * (1 / step) if inverse else part / step for part in (x, -x.min()))
    return (torch.clamp(near(place) + torch.round(point) + shift, 0, 255) - torch.round(point)) * step


def fake(x, near=torch.round, inverse=True):
    return (torch.clamp(near(x * (1 / LEVEL) if inverse else x / LEVEL) + 3, -128, 127) - 3) * LEVEL


def fake_by_channel(m, x):
    scale, point = torch.full((x.shape[0],), LEVEL), torch.full((x.shape[0],), 3, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, scale, point, 0, -128, 127)


def sampled(x, mode="nearest", halve=lambda y: y * 0.5):
    places = torch.linspace(-1, 1, 13)  # of four columns every third lies between two
    grid = halve(torch.stack(torch.meshgrid(places, places, indexing="xy"), -1)[None] * 2)
    return F.grid_sample(x.to(grid.dtype), grid, mode=mode, align_corners=False)


def straight_through(m, x, near=torch.round, inverse=False, slope=1.0):
    y = m.a(x)
    return (slope * y + (levels(y, near, inverse) - slope * y).detach()) ** 2


# Choices.


def experts(m, x, count=2, by_float64=False, normed=True):
    logits = m.a(x)
    weights, chosen = torch.softmax(logits.double() if by_float64 else logits, -1).float().topk(count, -1)
    weights = weights / weights.sum(-1, keepdim=True) if normed else weights
    y = torch.zeros(len(x), 5)
    for expert, weight in enumerate(m.e):
        token, place = torch.where(chosen == expert)
        y.index_add_(0, token, x[token] @ weight * weights[token, place, None])
    return y


def side_by_side(m, x):
    weights = torch.softmax(m.a(x), -1)
    chosen = torch.argsort(-weights, stable=True)[:, :2]
    weights = weights * F.one_hot(chosen, 4).sum(1)
    weights = weights / weights.sum(-1, keepdim=True)
    return sum(weights[:, place : place + 1] * (x @ weight) for place, weight in enumerate(m.e))


def nearest_code(m, x, choose=torch.argmin):
    codes = m.code.weight
    return m.code(choose((x * x).sum(-1, keepdim=True) - 2 * x @ codes.T + (codes * codes).sum(-1), -1))


def tied(width, make, how):
    """Return inputs of which the first rows lie at ties of a linear layer."""
    layer, x = Of(None, {"a": make}).a, drawn(9, width).double()
    weight = layer.weight.detach().double()
    bias = 0 if layer.bias is None else layer.bias.detach().double()
    for row in range(3):
        scores = weight @ x[row] + bias
        if how == "equal":
            first, second = scores.topk(3)[1][-2:] if width == 7 else scores.topk(2)[1]
            along, off = weight[first] - weight[second], scores[first] - scores[second]
        elif how == "zero":
            along, off = weight[row], scores[row]
        else:
            along, off = weight[row], scores[row] - (torch.floor(scores[row] / LEVEL) + 0.5) * LEVEL
        x[row] -= off / (along @ along) * along
    return x.float()


def between_codes():
    codes = Of(None, {"code": lambda: nn.Embedding(5, 3)}).code.weight.detach()
    return torch.cat([(codes[:1] + codes[1:2]) / 2, (codes[2:3] + codes[3:4]) / 2, drawn(7, 3) / 2])


# Tables, and functions that are continuous though their parts are discrete.

EDGES = torch.linspace(-1, 1, 11)
TABLE = drawn(41)


def between(m, x, share=1.0):
    y = (x.abs() / 0.3).clamp(max=38)
    low = torch.floor(y)
    upper = (y - low) * share
    return TABLE[low.long()] * (1 - upper) + TABLE[low.long() + 1] * upper


def between_by_ceiling(m, x):
    y = (x.abs() * (1 / 0.3)).clamp(max=38)
    high = torch.ceil(y).clamp(min=1)
    return TABLE[high.long()] * (1 - (high - y)) + TABLE[high.long() - 1] * (high - y)


def stretched(m, x, near=torch.floor):
    place = torch.arange(15).float() * x.shape[-1] / 15
    return x[:, near(place).long().clamp(0, x.shape[-1] - 1)]


KINDS = {
    "levels": Kind(
        lambda m, x: levels(x),
        [lambda m, x: levels(x, inverse=True), in_float64(lambda m, x: levels(x))],
        [lambda m, x: levels(x, torch.floor), lambda m, x: levels(x, shift=1)],
        GRID,
    ),
    "quantized": Kind(
        lambda m, x: quantized(x),
        [lambda m, x: quantized(x, inverse=True)],
        [lambda m, x: quantized(x, torch.floor), lambda m, x: quantized(x, shift=1)],
        torch.linspace(-2.5, 2.5, 41)[None],
    ),
    **{
        f"fake quantization by {of}": Kind(
            function,
            [lambda m, x: fake(x), lambda m, x: fake(x, inverse=False)],
            [lambda m, x: fake(x, torch.floor)],
            GRID,
            gradients=of == "channel",
        )
        for of, function in (
            ("tensor", lambda m, x: torch.fake_quantize_per_tensor_affine(x, LEVEL, 3, -128, 127)),
            ("channel", fake_by_channel),
        )
    },
    **{
        f"sampled {mode}": Kind(
            lambda m, x, mode=mode: sampled(x, mode),
            [lambda m, x, mode=mode: sampled(x, mode, lambda y: y.double() / 2).float()],
            [lambda m, x, other=other: sampled(x, other)],
            drawn(1, 1, 8, 4),
        )
        for mode, other in (("nearest", "bilinear"), ("bilinear", "nearest"))
    },
    "whole numbers": Kind(
        lambda m, x: (x * 5).to(torch.int8).float() * 0.2,
        [lambda m, x: torch.trunc(x / 0.2) * 0.2],
        [lambda m, x: torch.floor(x * 5) * 0.2],
        GRID,
    ),
    "straight through": Kind(
        straight_through,
        [lambda m, x: straight_through(m, x, inverse=True)],
        [lambda m, x: straight_through(m, x, torch.floor), lambda m, x: straight_through(m, x, slope=0.5)],
        tied(6, linear(6, 6), "level"),
        {"a": linear(6, 6)},
        gradients=True,
    ),
    "experts": Kind(
        experts,
        [lambda m, x: experts(m, x, by_float64=True), side_by_side],
        [lambda m, x: experts(m, x, count=1), lambda m, x: experts(m, x, normed=False)],
        tied(7, linear(7, 4, bias=False), "equal"),
        {
            "a": linear(7, 4, bias=False),
            "e": lambda: nn.ParameterList(torch.randn(7, 5) for _ in range(4)),
        },
    ),
    "codes": Kind(
        lambda m, x: m.code(((x[:, None] - m.code.weight) ** 2).sum(-1).argmin(-1)),
        [nearest_code, lambda m, x: m.code(torch.cdist(x, m.code.weight).argmin(-1))],
        [lambda m, x: nearest_code(m, x, lambda apart, axis: (apart.argmin(axis) + 1) % 5)],
        between_codes(),
        {"code": lambda: nn.Embedding(5, 3)},
    ),
    "buckets": Kind(
        lambda m, x: m.code(torch.bucketize(x * 2, EDGES)),
        [lambda m, x: m.code((x[..., None] * 2 > EDGES).sum(-1))],
        [lambda m, x: m.code(torch.bucketize(x * 2, EDGES).clamp(min=1) - 1)],
        GRID,
        {"code": lambda: nn.Embedding(12, 4)},
    ),
    "mask": Kind(
        lambda m, x: m.a(x) * (m.a(x) > 0),
        [lambda m, x: F.relu(m.a(x))],
        [lambda m, x: m.a(x) * (m.a(x) > 0.3)],
        tied(6, linear(6, 6), "zero"),
        {"a": linear(6, 6)},
        gradients=True,
    ),
    "nearest": Kind(
        stretched,
        [lambda m, x: F.interpolate(x[None], size=15)[0]],
        [lambda m, x: stretched(m, x, torch.round)],
        drawn(2, 9),
    ),
    "between": Kind(
        between,
        [between_by_ceiling, in_float64(between)],
        [lambda m, x: between(m, x, 0.5)],
        torch.arange(21)[None] * 0.15,
    ),
    "sorted": Kind(
        lambda m, x: torch.sort(m.a(x), -1)[0][:, -3:],
        [lambda m, x: torch.topk(m.a(x), 3)[0].flip(-1)],
        [lambda m, x: torch.topk(m.a(x), 3)[0]],
        tied(6, linear(6, 9), "equal"),
        {"a": linear(6, 9)},
        gradients=True,
    ),
    "remainder": Kind(
        lambda m, x: torch.remainder(x * 3, LEVEL),
        [lambda m, x: x * 3 - torch.floor(x * 3 / LEVEL) * LEVEL],
        [lambda m, x: torch.fmod(x * 3, LEVEL)],
        GRID,
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("at", ["tied", pytest.param("plain", marks=pytest.mark.slow)])
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_where_rounding_decides_a_right_one_does_not_diverge_and_a_wrong_one_never_agrees(kind, at, alone):
    x = getattr(kind, at)
    for candidate in (kind.right, *kind.others) if alone else kind.others:
        verdict = kind.verdict(candidate, x, alone)
        assert verdict.status in ("agrees", "undetermined"), verdict
        assert verdict.worst < 0.6
    for candidate in [] if alone and kind.gradients else kind.wrong:
        assert kind.verdict(candidate, x, alone).status in ("diverges", "undetermined")


@pytest.mark.slow
def test_gradients_flow_past_a_tie_of_experts():
    kind = replace(KINDS["experts"], gradients=True)
    assert [kind.verdict(one, kind.tied).status for one in kind.others] == ["agrees"] * len(kind.others)
    assert {kind.verdict(one, kind.tied).status for one in kind.wrong} == {"diverges"}


def test_a_tie_does_not_blind_other_elements():
    kind = KINDS["levels"]
    verdict = kind.verdict(kind.others[0], GRID, True)
    row = verdict.table[0]
    assert verdict.status == row.status == "agrees"
    wrong = levels(GRID)
    wrong[1, 3] += LEVEL  # no tie
    assert kind.verdict(lambda m, x: wrong, GRID, True).first_divergence.deciding.beyond == 1


def test_where_rounding_decides_every_element_nothing_agrees():
    kind, ties = KINDS["levels"], torch.arange(-9, 10, 2)[None] * LEVEL / 2
    row = kind.verdict(lambda m, x: levels(x, torch.floor), ties).table[0]
    assert row.status == "undetermined"
    assert row.note.startswith("rounding decides `round` (test_decisions.py:")
    assert kind.verdict(lambda m, x: levels(x, shift=50), ties).status == "diverges"


def test_an_input_at_a_tie_is_decided():
    x = torch.arange(-7, 8)[None] + 0.5
    kind = Kind(lambda m, x: torch.round(x), [], [], x)
    assert kind.verdict(in_float64(kind.right), x, True).status == "agrees"
    assert kind.verdict(lambda m, x: torch.floor(x + 0.5), x, True).status == "diverges"


def test_what_python_decides_by_a_number_is_undetermined_from_there_on():
    def branched(m, x, inverse=False):
        level = m.a(x).sum() * 0 + 0.25
        many = (level * 10 if inverse else level / LEVEL).item() > 2.5
        return m.b(x) * (2 if many else 3)

    kind = Kind(branched, [], [], drawn(5, 7), {"a": linear(7, 3), "b": linear(7, 2)})
    table = kind.verdict(lambda m, x: branched(m, x, True), drawn(5, 7), True).table
    assert table[-1].status == "undetermined"
    assert table[-1].note.startswith("rounding decides `item` (test_decisions.py:")


def test_where_rounding_decides_a_shape_what_follows_is_judged_end_to_end():
    def picked(m, x, factor=1.0):
        return m.b(m.a(x)[x[:, 0] / LEVEL > 2.5] * factor)

    x = drawn(5, 7)
    x[3, 0] = LEVEL * 2.5
    kind = Kind(picked, [], [], x, {"a": linear(7, 3), "b": linear(3, 2)})
    verdict = kind.verdict(lambda m, x: picked(m, x, 1.1), x)
    assert verdict.status == "undetermined"
    assert verdict.table[-1].note.startswith("so is b before it: rounding decides `gt` (test_decisions.py:")


def test_where_nothing_is_open_no_branch_is_computed():
    kind, said = KINDS["levels"], []
    with listening(said.append):
        kind.verdict(kind.others[0], drawn(3, 7), True)
    assert said
    assert not any("decisions" in line for line in said)
