"""What rounding decides: right algorithms do not diverge at a tie, wrong ones do, and the rest is judged."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from concord.conformance.compare import compare
from concord.conformance.watching import listening

LEVEL = 0.1


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
        model, port = (Of(one, self.layers).eval() for one in (self.right, candidate))
        if not alone:
            return compare(model, port, {"x": x}, gradients=self.gradients)
        with torch.no_grad():
            return compare(model, {"output": port(x).numpy()}, {"x": x})


def linear(width, out, **options):
    return lambda: nn.Linear(width, out, **options)


def in_float64(function):
    return lambda m, x: function(m, x.double()).float()


# Levels.

GRID = torch.cat([torch.arange(-9, 10)[None] * LEVEL / 2, drawn(2, 19)])


def levels(x, near=torch.round, inverse=False, shift=0):
    return (near(x * (1 / LEVEL) if inverse else x / LEVEL) + shift) * LEVEL


def per_tensor(x, near=torch.round, inverse=False, shift=0, zero=torch.round):
    step = (x.max() - x.min()) / 255
    parts = [part * (1 / step) if inverse else part / step for part in (x, -x.min())]
    point = zero(parts[1])
    return (torch.clamp(near(parts[0]) + point + shift, 0, 255) - point) * step


def per_channel(x, near=torch.round, inverse=False):
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.clamp(near(x * (1 / step) if inverse else x / step), -128, 127) * step


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


def experts(m, x, count=2, largest=True, by_float64=False, normed=True):
    logits = m.a(x)
    weights = torch.softmax(logits.double() if by_float64 else logits, -1).float()
    weights, chosen = torch.topk(weights, count, -1, largest=largest)
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


class Experts(nn.ParameterList):
    def __init__(self):
        super().__init__(nn.Parameter(torch.randn(7, 5)) for _ in range(4))


def nearest_code(m, x, choose=torch.argmin):
    codes = m.code.weight
    return m.code(choose((x * x).sum(-1, keepdim=True) - 2 * x @ codes.T + (codes * codes).sum(-1), -1))


def codes_in_float64(m, x):
    apart = x.double()[:, None] - m.code.weight.double()
    return m.code((apart * apart).sum(-1).argmin(-1))


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


def log_bucket(m, x, near=torch.floor, logarithm=lambda x: torch.log(x / 2) / np.log(16) * 8, shift=0):
    return m.code(torch.clamp(near(logarithm(x.abs() + 1e-3)).long() + 8 + shift, 0, 31))


def between(m, x, share=1.0):
    y = (x.abs() / 0.3).clamp(max=38)
    low = torch.floor(y)
    upper = (y - low) * share
    return TABLE[low.long()] * (1 - upper) + TABLE[low.long() + 1] * upper


def between_by_ceiling(m, x):
    y = (x.abs() * (1 / 0.3)).clamp(max=38)
    high = torch.ceil(y).clamp(min=1)
    return TABLE[high.long()] * (1 - (high - y)) + TABLE[high.long() - 1] * (high - y)


def stretched(m, x, near=torch.floor, inverse=False, shift=0):
    count = 15
    place = torch.arange(count).float()
    place = place * (1 / (count / x.shape[-1])) if inverse else place * x.shape[-1] / count
    return x[:, (near(place) + shift).long().clamp(0, x.shape[-1] - 1)]


KINDS = {
    "levels": Kind(
        lambda m, x: levels(x),
        [lambda m, x: levels(x, inverse=True), in_float64(lambda m, x: levels(x))],
        [lambda m, x, near=near: levels(x, near) for near in (torch.floor, torch.ceil, torch.trunc)]
        + [lambda m, x: levels(x, shift=1)],
        GRID,
    ),
    "quantized by tensor": Kind(
        lambda m, x: per_tensor(x),
        [lambda m, x: per_tensor(x, inverse=True), in_float64(lambda m, x: per_tensor(x))],
        [lambda m, x: per_tensor(x, torch.floor), lambda m, x: per_tensor(x, shift=1)],
        torch.linspace(-2.5, 2.5, 41)[None],
    ),
    "quantized by channel": Kind(
        lambda m, x: per_channel(x),
        [lambda m, x: per_channel(x, inverse=True), in_float64(lambda m, x: per_channel(x))],
        [lambda m, x: per_channel(x, torch.floor), lambda m, x: per_channel(x, torch.trunc)],
        torch.cat([torch.linspace(-2.54, 2.54, 255)[None], drawn(2, 255)]),
    ),
    "fake quantization": Kind(
        lambda m, x: torch.fake_quantize_per_tensor_affine(x, LEVEL, 3, -128, 127),
        [lambda m, x: fake(x), lambda m, x: fake(x, inverse=False)],
        [lambda m, x: fake(x, torch.floor), lambda m, x: fake(x, torch.ceil)],
        GRID,
    ),
    "fake quantization by channel": Kind(
        fake_by_channel,
        [lambda m, x: fake(x), lambda m, x: fake(x, inverse=False)],
        [lambda m, x: fake(x, torch.floor), lambda m, x: fake(x, torch.ceil)],
        GRID,
        gradients=True,
    ),
    "sampled nearest": Kind(
        lambda m, x: sampled(x),
        [lambda m, x: sampled(x, "nearest", lambda y: y.double() / 2).float()],
        [lambda m, x: sampled(x, "bilinear"), lambda m, x: sampled(x.flip(-1))],
        drawn(1, 1, 8, 4),
    ),
    "sampled": Kind(
        lambda m, x: sampled(x, "bilinear"),
        [lambda m, x: sampled(x, "bilinear", lambda y: y.double() / 2).float()],
        [lambda m, x: sampled(x), lambda m, x: sampled(x.flip(-1), "bilinear")],
        drawn(1, 1, 8, 4),
    ),
    "whole numbers": Kind(
        lambda m, x: (x * 5).to(torch.int8).float() * 0.2,
        [lambda m, x: torch.trunc(x / 0.2) * 0.2],
        [lambda m, x: torch.floor(x * 5) * 0.2, lambda m, x: torch.round(x * 5) * 0.2],
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
        [
            lambda m, x: experts(m, x, count=1),
            lambda m, x: experts(m, x, largest=False),
            lambda m, x: experts(m, x, normed=False),
        ],
        tied(7, linear(7, 4, bias=False), "equal"),
        {"a": linear(7, 4, bias=False), "e": Experts},
    ),
    "codes": Kind(
        lambda m, x: m.code(((x[:, None] - m.code.weight) ** 2).sum(-1).argmin(-1)),
        [nearest_code, codes_in_float64, lambda m, x: m.code(torch.cdist(x, m.code.weight).argmin(-1))],
        [
            lambda m, x: nearest_code(m, x, torch.argmax),
            lambda m, x: nearest_code(m, x, lambda apart, axis: (apart.argmin(axis) + 1) % 5),
        ],
        between_codes(),
        {"code": lambda: nn.Embedding(5, 3)},
    ),
    "decoded": Kind(
        lambda m, x: m.code(m.a(x).argmax(-1)),
        [
            lambda m, x: m.code(F.linear(x.double(), m.a.weight.double()).argmax(-1)),
            lambda m, x: F.one_hot(m.a(x).softmax(-1).max(-1)[1], 9).float() @ m.code.weight,
        ],
        [lambda m, x: m.code(m.a(x).argmin(-1)), lambda m, x: m.code((m.a(x).argmax(-1) + 1) % 9)],
        tied(6, linear(6, 9, bias=False), "equal"),
        {"a": linear(6, 9, bias=False), "code": lambda: nn.Embedding(9, 5)},
    ),
    "buckets": Kind(
        lambda m, x: m.code(torch.bucketize(x * 2, EDGES)),
        [
            lambda m, x: m.code(torch.searchsorted(EDGES, x * 2)),
            lambda m, x: m.code((x[..., None] * 2 > EDGES).sum(-1)),
        ],
        [lambda m, x: m.code(torch.bucketize(x * 2, EDGES).clamp(min=1) - 1)],
        GRID,
        {"code": lambda: nn.Embedding(12, 4)},
    ),
    "logarithmic buckets": Kind(
        log_bucket,
        [
            lambda m, x: log_bucket(m, x, logarithm=lambda x: torch.log2(x / 2) * 2),
            lambda m, x: log_bucket(m, x, logarithm=lambda x: torch.log(x.double() / 2) / np.log(16) * 8),
        ],
        [lambda m, x: log_bucket(m, x, torch.round), lambda m, x: log_bucket(m, x, shift=1)],
        torch.arange(1, 40).float()[None] - 1e-3,
        {"code": lambda: nn.Embedding(32, 4)},
    ),
    "mask": Kind(
        lambda m, x: m.a(x) * (m.a(x) > 0),
        [lambda m, x: F.relu(m.a(x))],
        [lambda m, x: m.a(x) * (m.a(x) > 0.3), lambda m, x: m.a(x) * (m.a(x) < 0)],
        tied(6, linear(6, 6), "zero"),
        {"a": linear(6, 6)},
        gradients=True,
    ),
    "nearest": Kind(
        stretched,
        [lambda m, x: stretched(m, x, inverse=True), lambda m, x: F.interpolate(x[None], size=15)[0]],
        [lambda m, x: stretched(m, x, torch.round), lambda m, x: stretched(m, x, shift=1)],
        drawn(2, 9),
    ),
    "between": Kind(
        between,
        [between_by_ceiling, in_float64(between)],
        [lambda m, x: between(m, x, 0.5), lambda m, x: TABLE[(x.abs() / 0.3).clamp(max=38).floor().long()]],
        torch.arange(21)[None] * 0.15,
    ),
    "sorted": Kind(
        lambda m, x: torch.sort(m.a(x), -1)[0][:, -3:],
        [lambda m, x: torch.topk(m.a(x), 3)[0].flip(-1)],
        [
            lambda m, x: torch.sort(m.a(x), -1, descending=True)[0][:, -3:],
            lambda m, x: torch.topk(m.a(x), 3)[0],
        ],
        tied(6, linear(6, 9), "equal"),
        {"a": linear(6, 9)},
        gradients=True,
    ),
    "remainder": Kind(
        lambda m, x: torch.remainder(x * 3, LEVEL),
        [lambda m, x: x * 3 - torch.floor(x * 3 / LEVEL) * LEVEL],
        [lambda m, x: torch.remainder(x * 3, 0.11), lambda m, x: torch.fmod(x * 3, LEVEL)],
        GRID,
    ),
}


AT = pytest.mark.parametrize("at", ["tied", pytest.param("plain", marks=pytest.mark.slow)])
ALONE = pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@AT
@ALONE
def test_a_right_algorithm_does_not_diverge_where_rounding_decides(kind, at, alone):
    for candidate in (kind.right, *kind.others) if alone else kind.others:
        verdict = kind.verdict(candidate, getattr(kind, at), alone)
        assert verdict.status in ("agrees", "undetermined"), verdict
        assert verdict.worst < 0.6


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@AT
@ALONE
def test_a_wrong_one_never_agrees(kind, at, alone):
    for candidate in [] if alone and kind.gradients else kind.wrong:
        verdict = kind.verdict(candidate, getattr(kind, at), alone)
        assert verdict.status in ("diverges", "undetermined"), verdict


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
    kind = KINDS["levels"]
    row = kind.verdict(lambda m, x: levels(x, torch.floor), torch.arange(-9, 10, 2)[None] * LEVEL / 2).table[
        0
    ]
    assert row.status == "undetermined"
    assert row.note.startswith("rounding decides `round` (test_decisions.py:")
    far = kind.verdict(lambda m, x: levels(x, shift=50), torch.arange(-9, 10, 2)[None] * LEVEL / 2)
    assert far.status == "diverges"


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_an_input_at_a_tie_is_decided(shift):
    x = torch.arange(-7, 8)[None] + 0.5
    kind = Kind(lambda m, x: torch.round(x), [], [], x)
    candidate = (
        (lambda m, x: torch.round(x.double()).float()) if not shift else lambda m, x: torch.floor(x + 0.5)
    )
    assert kind.verdict(candidate, x, True).status == ("diverges" if shift else "agrees")


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
    model = Of(kind.right, {}).eval()
    x = drawn(3, 7)
    with listening(said.append):
        compare(model, {"output": levels(x, inverse=True).numpy()}, {"x": x})
    assert said
    assert not any("decisions" in line for line in said)
