import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import causes, compare
from concord.conformance.compare.module_reference import ModuleReference
from concord.conformance.compare.stretch import loop_positions
from tests.toys.kinds import Of, conv, drawn, linear
from tests.toys.surroundings import sample_of

WIDTH, TOKENS = 6, 7


LAYERS = {
    "a": linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "c": conv(3, 4, 3, padding=1),
    "table": lambda: nn.Embedding(13, WIDTH),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "batch": lambda: nn.BatchNorm2d(4),
    "twelve": lambda: nn.BatchNorm2d(12),
    "depthwise": conv(3, 6, 3, groups=3),
    "wide": conv(3, 12, 3),
    "up": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
    "rms": lambda: nn.RMSNorm(WIDTH),
    "scale": lambda: nn.RMSNorm(WIDTH),
}
IMAGE, TEXT = drawn(2, 3, 5, 7), drawn(2, TOKENS, WIDTH)


def explained(right, wrong, x, arrays):
    # The candidate is the module itself, or only its arrays.
    reference, candidate = (Of(function, LAYERS) for function in (right, wrong))
    return compare(
        reference, ModuleReference(candidate, args=(x,)).arrays if arrays else candidate, (x,)
    ).explained()


# Modules whose code differs.


def attend(m, x, visible, fill=float("-inf")):
    scores = (m.a(x) @ x.transpose(1, 2)).masked_fill(~visible, fill)
    return torch.softmax(scores, -1) @ x


def causal(corner=0):
    return torch.ones(TOKENS, TOKENS).tril(corner).bool()


def recur(m, x, skipped=None):
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(TOKENS):
        h = torch.tanh(m.a(x[:, t + (t == skipped)]) + h * m.norm.weight)
        states.append(h)
    return torch.stack(states, 1)


def gated(m, x, function=torch.tanh, update=lambda z: z, early=False):
    h, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        reset, gate, new = F.linear(x[:, t], m.gru.weight_ih_l0, m.gru.bias_ih_l0).chunk(3, -1)
        by_h = F.linear(h, m.gru.weight_hh_l0, m.gru.bias_hh_l0).chunk(3, -1)
        z = update(torch.sigmoid(gate + by_h[1]))
        r = torch.sigmoid(reset + by_h[0])
        of_h = F.linear(r * h, *(w[2 * WIDTH :] for w in (m.gru.weight_hh_l0, m.gru.bias_hh_l0)))
        h = z * h + (1 - z) * function(new + (of_h if early else r * by_h[2]))
        states.append(h)
    return torch.stack(states, 1)


def mirrored(m, x):
    return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), m.c.weight, m.c.bias)


SLIPS = {
    "a mask by a factor": (
        lambda m, x: attend(m, x, causal()),
        lambda m, x: attend(m, x, causal(), 0.0), TEXT, "multiplies scores by 0"),
    "a corner off by one": (
        lambda m, x: attend(m, x, causal()),
        lambda m, x: attend(m, x, causal(1)), TEXT, "leaves one more later key visible"),
    "a shift with an edge": (
        lambda m, x: m.a(x),
        lambda m, x: F.pad(m.a(x)[:, :-1], (0, 0, 1, 0)), TEXT, "shift by one along axis 1"),
    "a border": (
        lambda m, x: m.c(x), mirrored, IMAGE, "mirrored at its border"),
    "a step skipped": (recur, lambda m, x: recur(m, x, 2), TEXT, "index 3 in place of 2 in select"),
    "n - 1": (
        lambda m, x: m.a(x) / (x * x).mean(-1, keepdim=True),
        lambda m, x: m.a(x) / ((x * x).sum(-1, keepdim=True) / (WIDTH - 1)), TEXT, "n - 1 instead of n"),
    "parts exchanged": (
        lambda m, x: torch.sub(*torch.exp(m.a(x)).split(3, -1)),
        lambda m, x: torch.sub(*torch.exp(m.a(x)).split(3, -1)[::-1]), TEXT, "swapped"),
    "a number": (
        lambda m, x: m.a(x) ** 2 * 0.7, lambda m, x: m.a(x) ** 2 * 0.61, TEXT, "mul with 0.61 inst"),
    "a number beside an index": (
        lambda m, x: m.a(x).gather(-1, (x.abs().clamp(min=0.5) >= 0.5).long() - 1).square() * 0.7,
        lambda m, x: m.a(x).gather(-1, (x.abs().clamp(min=0.5) >= 0.5).long() - 1).square() * 0.61, TEXT,
        "mul with 0.61 inst"),
    "an epsilon outside": (
        lambda m, x: m.a(x) / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3),
        lambda m, x: m.a(x) / (torch.sqrt((x * x).mean(-1, keepdim=True)) + 1e-3), TEXT,
        "outside the square root"),
    "an entry of the catalogue": (
        lambda m, x: torch.softmax(m.a(x), -1),
        lambda m, x: torch.exp(m.a(x)) / (1 + torch.exp(m.a(x)).sum(-1, keepdim=True)), TEXT,
        r"counts one more key, with score 0 \(ATT-5\)"),
    "no mask, where a row saw one key": (
        lambda m, x: attend(m, x, causal(), -1e9),
        lambda m, x: attend(m, x, causal(TOKENS)), TEXT, "the mask is not applied"),
    "a factor": (
        lambda m, x: m.a(x).sin(), lambda m, x: m.a(x).sin() * 3, TEXT, "multiplied by 3"),
    "one of several terms": (
        lambda m, x: ((m.a(x) + x).cos() + x).sin() + x, lambda m, x: (m.a(x) + x).cos().sin() + x, TEXT,
        r"leaving out the second term \(test_mechanisms.py:\d+\)"),
    "a term for all rows": (
        lambda m, x: (x * x).sum(-1, keepdim=True) + (m.a.weight * m.a.weight).sum(1) - m.a(x),
        lambda m, x: (x * x).sum(-1, keepdim=True) - m.a(x), TEXT, "is explained by leaving out the"),
    "another tensor": (
        lambda m, x: m.norm(m.a(x)) + x.cos(), lambda m, x: m.norm(m.a(x)) + m.a(x), TEXT,
        "`a` in place of the result of cos"),
    "a function of one gate": (
        lambda m, x: m.gru(x[:, :4])[0], lambda m, x: gated(m, x[:, :4], function=F.relu), TEXT,
        "ReLU instead of tanh"),
    "rows under a bias": (
        lambda m, x: m.a(x),
        lambda m, x: F.linear(x, m.a.weight[[0, 5, 2, 3, 4, 1]], m.a.bias), TEXT,
        "axis 2 in a different order before the bias: 1 and 5 are swapped"),
    "a gate's branches": (
        lambda m, x: m.gru(x[:, :4])[0], lambda m, x: gated(m, x[:, :4], update=lambda z: 1 - z), TEXT,
        r"1 - sigmoid\(x\) in place"),
}  # fmt: skip


@pytest.mark.parametrize("slip", sample_of(SLIPS, lambda place, _: place % 2 == 0))
def test_a_slip_that_no_catalogue_knows_is_named(slip):
    right, wrong, x, words = SLIPS[slip]
    verdict = explained(right, wrong, x, True)
    assert re.search(words, verdict.cause.text)


def test_operations_of_later_iterations_have_the_positions_of_the_first():
    body, second = ["t", "mm", "add", "tanh"], ["t", "mm", "sigmoid", "mul"]
    assert loop_positions(["zeros", *body * 3, "stack"]) == [0, *[1, 2, 3, 4] * 3, 13]
    assert loop_positions([*body * 2, "stack", *second * 2]) == [*[0, 1, 2, 3] * 2, 8, *[9, 10, 11, 12] * 2]
    assert loop_positions(["add"] * 9 + body) == [*range(13)]


def normalized(m, x, **statistics):
    return F.batch_norm(m.c(x), weight=m.batch.weight, bias=m.batch.bias, **statistics)


def by_heads(m, x):
    return m.a(x).view(2, TOKENS, 2, 3, 1).permute(3, 0, 1, 2, 4).flatten(3)


def modulated(m, x, order=range(6)):
    parts = torch.cat([m.a(x), m.norm(x)], -1).chunk(6, -1)
    return sum(parts[place].sin() * n for n, place in enumerate(order, 2))


def pooled(m, x, counted=True, summed=True):
    visible = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [3]])).float()[..., None]
    x = torch.tanh(m.a(x))
    return (x * visible if summed else x).sum(1) / (visible.sum(1) if counted else TOKENS)


def turned(m, x, alternating):
    angles = torch.arange(TOKENS)[:, None] / torch.tensor([1.0, 7.0, 13.0])
    cos, sin = angles.cos(), angles.sin()
    query, key = (
        torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        for y in (m.a(x), m.norm(x))
        for a, b in [(y[..., ::2], y[..., 1::2]) if alternating else (y[..., :3], y[..., 3:])]
    )
    return torch.softmax(query @ key.transpose(1, 2), -1) @ x


def biased(m, x, slopes):
    distances = (torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]).float()
    return torch.softmax(m.a(x) @ m.a(x).mT + torch.tensor(slopes).view(-1, 1, 1, 1) * distances, -1) @ x


COLORS = torch.tensor([2.0, 3.0, 5.0]).view(3, 1, 1)


def distances():
    return torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]


def by_groups(m, x, crossed=True, own=False):
    y = m.wide(x).unflatten(1, (4, 3) if crossed else (3, 4))
    if not own and not crossed:
        return F.group_norm(m.wide(x), 3, m.twelve.weight, m.twelve.bias)
    axes = (1 if crossed else 2, 3, 4)
    y = (y - y.mean(axes, keepdim=True)) / (y.var(axes, correction=0, keepdim=True) + 1e-5).sqrt()
    return m.twelve.weight[:, None, None] * y.flatten(1, 2) + m.twelve.bias[:, None, None]


LAYER_SLIPS = {
    "blocks of parts": (
        modulated, partial(modulated, order=[1, 0, 2, 4, 3, 5]), TEXT, "order 1, 0, 2, 4, 3, 5"),
    "a mean over padding": (
        pooled, partial(pooled, counted=False, summed=False), TEXT, "is explained by leaving out the mask"),
    "a count of padding": (
        pooled, partial(pooled, counted=False), TEXT, "is explained by leaving out the mask"),
    "pairs of halves": (
        partial(turned, alternating=False), partial(turned, alternating=True), TEXT,
        "interleaved parts instead of into contiguous blocks"),
    "pairs of neighbours": (
        partial(turned, alternating=True), partial(turned, alternating=False), TEXT,
        "contiguous blocks instead of into interleaved parts"),
    "a reset before the product": (
        lambda m, x: m.gru(x[:, :4])[0], lambda m, x: gated(m, x[:, :4], early=True), TEXT,
        r"is explained by mul \(.*\) before addmm \(.*\) instead of after it"),
    "a reset after the product": (
        lambda m, x: gated(m, x[:, :4], early=True), lambda m, x: m.gru(x[:, :4])[0], TEXT,
        r"is explained by addmm \(.*\) before mul \(.*\) instead of after it"),
    "slopes": (
        partial(biased, slopes=[2**-4, 2**-8, 2**-2]),
        partial(biased, slopes=[2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8]), TEXT,
        "the slopes of 3 heads instead of the slopes of 3 heads, of which 2"),
    "interleaved groups": (
        partial(by_groups, crossed=False), by_groups, IMAGE, "groups of interleaved channels"),
    "groups that are written out": (
        partial(by_groups, crossed=False, own=True), by_groups, IMAGE,
        "axis 1 ordered as 4 x 3 and transposed, instead of 3 x 4"),
    "a number that no code contains": (
        lambda m, x: m.a(x).sin(), lambda m, x: m.a(x).sin() * 0.999505, TEXT,
        "may be explained by values multiplied by 0.999505"),
    "few values moved": (
        lambda m, x: m.a(x) * x[:, :1, :1].exp(), lambda m, x: m.a(x) * x[:1, :1, :1].exp(), TEXT,
        "may be explained by .* first sample repeated"),
    "batch statistics": (
        lambda m, x: F.relu(m.batch(m.c(x))),
        lambda m, x: F.relu(normalized(m, x, running_mean=None, running_var=None, training=True)), IMAGE,
        "batch statistics instead"),
    "interpolation": (
        lambda m, x: F.interpolate(m.c(x), scale_factor=2, mode="bilinear"),
        lambda m, x: F.interpolate(m.c(x), scale_factor=2), IMAGE, "nearest interpolation in place"),
    "the first token": (
        lambda m, x: m.a(x.mean(1)), lambda m, x: m.a(x[:, 0]), TEXT, "the first element in place of a mean"),
    "a mean": (
        lambda m, x: m.a(x[:, -1]), lambda m, x: m.a(x.mean(1)), TEXT, "a mean in place of one element"),
    "halves": (
        lambda m, x: F.glu(m.a(x)),
        lambda m, x: m.a(x)[..., 3:] * torch.sigmoid(m.a(x)[..., :3]), TEXT, "the halves of glu swapped"),
    "interleaved parts": (
        lambda m, x: torch.sub(*torch.exp(m.a(x)).split(3, -1)),
        lambda m, x: torch.exp(m.a(x))[..., ::2] - torch.exp(m.a(x))[..., 1::2], TEXT, "interleaved parts"),
    "a fused weight": (
        lambda m, x: torch.stack(m.a(x).chunk(3, -1)).cos(), lambda m, x: by_heads(m, x).cos(), TEXT,
        "interleaved parts"),
    "a shift": (
        lambda m, x: m.c(x.roll((2, 1), (2, 3))), lambda m, x: m.c(x.roll((-2, -1), (2, 3))), IMAGE,
        r"shifts \[-2, -1\] in place of .* in roll"),
    "a cut": (
        lambda m, x: m.up(x),
        lambda m, x: F.conv_transpose2d(x, m.up.weight, m.up.bias, 2)[..., :-1, :-1], IMAGE,
        "an output that begins one position earlier"),
    "channels of blocks": (
        lambda m, x: F.pixel_shuffle(m.wide(x), 2),
        lambda m, x: F.pixel_shuffle(m.wide(x).unflatten(1, (4, 3)).transpose(1, 2).flatten(1, 2), 2), IMAGE,
        "channels that are split as 4 x 3 and transposed"),
    "channels of groups": (
        lambda m, x: m.depthwise(x),
        lambda m, x: F.conv2d(x, m.depthwise.weight[[0, 2, 4, 1, 3, 5]], m.depthwise.bias, groups=3), IMAGE,
        "channels that are split as 3 x 2 and transposed"),
    "a number of larger results": (
        lambda m, x: F.leaky_relu(m.a(x), 0.01) * 2, lambda m, x: F.leaky_relu(m.a(x), 0.3) * 2, TEXT,
        "leaky_relu with 0.3 instead of 0.01"),
    "a window": (
        lambda m, x: attend(m, x, causal() & ~causal(-3)), lambda m, x: attend(m, x, causal()), TEXT,
        "leaving out one of two conditions"),
    "a residual too early": (
        lambda m, x: m.a(x) * m.norm(x), lambda m, x: (y := m.a(x)) * m.norm(x + y), TEXT, "`0` plus `a`"),
    "another source": (
        lambda m, x: m.a(x) * m.norm(x), lambda m, x: (y := m.a(x)) * m.norm(y), TEXT, "`a` in place of `0`"),
    "colors": (
        lambda m, x: m.c(x - COLORS), lambda m, x: m.c(x.flip(1) - COLORS), IMAGE,
        "`0` with axis 1 in reverse order"),
    "three axes": (
        lambda m, x: m.wide(x).unflatten(1, (3, 2, 2)).cumsum(1),
        lambda m, x: m.wide(x).unflatten(1, (2, 3, 2)).transpose(1, 2).cumsum(1), IMAGE,
        "axis 1 ordered as 2 x 3 x 2 and transposed, instead of 3 x 2 x 2"),
    "three parts": (
        lambda m, x: torch.cat([m.a(x), x, m.norm(x)], 1).cumsum(1),
        lambda m, x: torch.cat([m.a(x), m.norm(x), x], 1).cumsum(1), TEXT, "joined in the order 0, 2, 1"),
    "sliced parts": (
        lambda m, x: (y := m.a(x))[..., :3] * y[..., 3:].sigmoid(),
        lambda m, x: (y := m.a(x))[..., 3:] * y[..., :3].sigmoid(), TEXT,
        "part 0 of axis 2 .* and part 3 of axis 2 .* used in place of each other"),
    "an offset": (
        lambda m, x: x + m.table(torch.arange(TOKENS) + 5), lambda m, x: x + m.table(torch.arange(TOKENS)),
        TEXT, "offset 0 in place of 5 in add"),
    "a distance": (
        lambda m, x: m.table(distances() + 6), lambda m, x: m.table(6 - distances()), TEXT,
        "the operands of sub swapped"),
    "antialiasing": (
        lambda m, x: F.interpolate(m.c(x), 3, mode="bilinear", antialias=True),
        lambda m, x: F.interpolate(m.c(x), 3, mode="bilinear"), IMAGE,
        "bilinear interpolation in place of _up"),
    "a norm left out": (
        lambda m, x: m.a(x + m.rms(x.sin())), lambda m, x: m.a(x + x.sin()), TEXT, "leaving out `rms`"),
    "a sibling's weight": (
        lambda m, x: m.a(m.rms(x)), lambda m, x: m.a(F.rms_norm(x, (WIDTH,), m.scale.weight)), TEXT,
        "the parameters of scale used in place of those of rms"),
    "zeros around": (mirrored, lambda m, x: m.c(x), IMAGE, "is explained by an input padded with zeros"),
    "a side": (
        lambda m, x: m.wide(F.pad(x, (0, 1, 0, 1))), lambda m, x: m.wide(F.pad(x, (1, 0, 1, 0))), IMAGE,
        "is explained by padding placed entirely before"),
    "a place in a table": (
        lambda m, x: m.a(x) * torch.linspace(1, 7, 101)[5],
        lambda m, x: m.a(x) * torch.linspace(1, 7, 101)[6], TEXT, "index 6 in place of 5"),
    "decibels": (lambda m, x: x.exp().log(), lambda m, x: x.exp().log10(), TEXT, "log10 in place of log"),
    "a maximum of all": (
        lambda m, x: x - m.a(x).amax((1, 2), True), lambda m, x: x - m.a(x).amax((0, 1, 2), True), TEXT,
        r"dim \[0, 1, 2\] in place of \[1, 2\] in amax"),
    "a constant": (
        lambda m, x: m.a(x).sin() - 2, lambda m, x: m.a(x).sin(), TEXT, "leaving out the constant"),
    "a norm of what was transposed": (
        lambda m, x: m.a(m.norm(x.transpose(0, 1))), lambda m, x: m.a(x.transpose(0, 1)), TEXT,
        "a norm is left out"),
    "a place looked up": (
        lambda m, x: m.a(x[[0, 1], [3, 5]]), lambda m, x: m.a(x[:, -1]), TEXT,
        "the last place of axis 1 in every lookup"),
    "a cut on the other side": (
        lambda m, x: x[:, :-2].cumsum(1), lambda m, x: x[:, 2:].cumsum(1), TEXT,
        "a slice of axis 1 that starts at 2 in place of 0"),
    "a mixture": (
        lambda m, x: m.a(x) * m.norm.weight + x.cos() * (1 - m.norm.weight),
        lambda m, x: m.a(x) * (1 - m.norm.weight) + x.cos() * m.norm.weight, TEXT, "x and 1 - x"),
    "two parameters": (
        lambda m, x: x * m.norm.weight + m.rms.weight, lambda m, x: x * m.rms.weight + m.norm.weight, TEXT,
        r"`\w+\.weight` and `\w+\.weight` used in place of each other"),
    "a view for a transposition": (
        lambda m, x: x.transpose(1, 2).cumsum(2), lambda m, x: x.reshape(2, WIDTH, TOKENS).cumsum(2), TEXT,
        "a reshape in place of a transposition"),
    "an average": (
        lambda m, x: m.a(x) * 0.99 + x * 0.01, lambda m, x: m.a(x) * 0.9 + x * 0.1, TEXT,
        "weights 0.1 and 0.9 instead of 0.01 and 0.99"),
    "a mean before steps in place": (
        lambda m, x: F.rms_norm(m.a(x), (WIDTH,), eps=1e-6),
        lambda m, x: F.layer_norm(m.a(x), (WIDTH,), eps=1e-6), TEXT, "without its mean"),
}  # fmt: skip


@pytest.mark.parametrize("slip", LAYER_SLIPS)
def test_a_layer_that_is_configured_or_converted_wrongly_is_named(slip):
    right, wrong, x, words = LAYER_SLIPS[slip]
    verdict = explained(right, wrong, x, True)
    assert re.search(words, verdict.cause.text), verdict


def test_a_bug_is_written_where_its_operation_writes():
    # Steps that exchange two parts of a padded tensor left it unwritten, as if padded with zeros.
    def wrapped(m, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), m.c.weight, m.c.bias)

    assert explained(wrapped, lambda m, x: m.c(x), IMAGE, True).cause is None


def routed(m, x, count=3):
    weights = m.a(x).softmax(-1).topk(count).values
    return torch.zeros_like(x).add_(weights.sum(-1, keepdim=True) * x)


OPENED = {
    "goes on": (
        lambda m, x: m.a(x) * 2, lambda m, x: F.layer_norm(m.a(x) * 2, (WIDTH,), eps=1e-3),
        r"has the correct values after mul \(.*\), and continues with native_layer_norm \("),
    "ends early": (
        lambda m, x: torch.cumsum(m.a(x) * 3, 1) + x[:, :1].cos() * 7,
        lambda m, x: torch.cumsum(m.a(x) * 3, 1),
        r"the candidate ends with cumsum \(.*\); in the reference \w+ \(.*\) follows"),
    "a stretch": (
        lambda m, x: torch.softmax(x[0] @ x[0].T, -1) @ x[0],
        lambda m, x: (powers := torch.exp(x[0] @ x[0].T)) / powers.sum(0) @ x[0],
        r"the reference computes _softmax \(.*\), and the candidate exp \(.*\) to mm \(.*\)"),
    "a value used twice": (
        lambda m, x: ((y := m.a(x).sigmoid()).cumsum(1) + y * m.norm.weight) * x.cos(),
        lambda m, x: m.a(x).sigmoid().cumsum(1) * x.cos(),
        r"the reference computes mul \(.*\), and the candidate mul \("),
    "a correct mean": (
        lambda m, x: m.a(F.layer_norm(x, (WIDTH,))), lambda m, x: m.a(F.layer_norm(x, (WIDTH,), eps=1.0)),
        r"the reference computes native_layer_norm \("),
    "a sum in place": (
        routed, partial(routed, count=2), r"the reference computes topk \("),
    "a constant": (
        lambda m, x: (torch.ones_like(x).cumsum(1) * m.a(x)).exp(), lambda m, x: (m.a(x) * 2).exp(),
        r"the reference computes cumsum \("),
}  # fmt: skip


@pytest.mark.parametrize("kind", OPENED)
def test_wrong_numbers_are_followed_back_to_right_ones(kind):
    right, wrong, words = OPENED[kind]
    text = str(explained(right, wrong, TEXT / 3, False))
    assert re.search(words, text)


def mixed(m, x, scores=lambda y: y, weights=lambda y: y):
    return weights(torch.softmax(scores(torch.tanh(m.a(x)) + x * x), -1)) @ m.a.weight[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": lambda y: 0.9 * y}, "the result of add, times 0.9 "),
        ({"weights": lambda y: y + 0.01}, "the result of _softmax, plus 0.01 "),
        ({"scores": lambda y: y.roll(1, 1)}, "shifted by 1 along axis 1"),
        ({"weights": lambda y: y[:1].expand_as(y)}, "with its first sample repeated for all samples"),
    ],
)
def test_a_result_within_a_stretch_that_is_changed_by_a_number_or_moved_is_named(change, words):
    verdict = explained(mixed, partial(mixed, **change), TEXT, arrays=False)
    assert words in verdict.cause.text, verdict


def test_positions_that_are_wrong_and_few_elements_are_no_other_order():
    def looked_up(m, x, by=0):
        return x + m.table(torch.arange(TOKENS) + by)

    assert "a different order" not in str(explained(looked_up, partial(looked_up, by=3), TEXT, True))
    negated = explained(lambda m, x: m.a(x).sum((1, 2)), lambda m, x: -m.a(x).sum((1, 2)), TEXT, True)
    assert "a different order" not in str(negated)


@pytest.mark.parametrize("arrays", [False, True])
def test_activations_that_are_used_in_place_of_each_other_are_named(arrays):
    verdict = explained(
        lambda m, x: F.silu(m.a(x)) * m.norm(x), lambda m, x: m.a(x) * F.silu(m.norm(x)), TEXT, arrays
    )
    assert re.search("`(a` and `norm|norm` and `a)` used in place of each other", str(verdict)), verdict


def halves(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def pairs(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def twice(x):
    return torch.cat([x, x], -1)


def turn(m, x, rotate=halves, spread=twice, order=range(WIDTH), base=1e4, factor=1.0, width=WIDTH):
    frequencies = torch.tensor([factor * base ** (-2 * i / width) for i in range(WIDTH // 2)])
    angles = spread(torch.arange(TOKENS).float()[:, None] * frequencies)
    query, key = (y[..., [*order]] for y in (m.a(x), m.norm(x)))
    query, key = (y * angles.cos() + rotate(y) * angles.sin() for y in (query, key))
    return torch.softmax(query @ key.transpose(1, 2), -1) @ x


OF_PAIRS = {"rotate": pairs, "spread": partial(torch.repeat_interleave, repeats=2, dim=-1)}


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ({}, OF_PAIRS, "rotary positions that pair neighbours instead of halves"),
        (OF_PAIRS, {}, "rotary positions that pair halves instead of neighbours"),
        ({}, {"rotate": pairs}, "pair neighbours instead of halves"),
        ({}, {"order": [0, 3, 1, 4, 2, 5]}, "in the order of the other rotary layout"),
        (OF_PAIRS, {**OF_PAIRS, "order": [0, 2, 4, 1, 3, 5]}, "in the order of the other rotary layout"),
        ({}, {"base": 5e5}, "frequencies of base 500000 instead of 10000"),
        ({"factor": 0.25}, {"factor": 1.0}, "frequencies multiplied by 4"),
        ({"base": 3e3}, {"base": 3e3, "width": WIDTH - 2}, "frequencies spread over 2 steps instead of 3"),
    ],
)
def test_rotary_positions_of_another_layout_or_base_are_named(right, wrong, words):
    verdict = explained(partial(turn, **right), partial(turn, **wrong), TEXT, arrays=True)
    assert words in verdict.cause.text, verdict


def turn_in_place(m, x, base=1e4, sign=1):
    frequencies = torch.tensor([base ** (-2 * i / WIDTH) for i in range(WIDTH // 2)])
    angles = torch.arange(TOKENS).float()[:, None] * frequencies
    query, key = m.a(x), m.norm(x)
    for y in (query, key):
        first, second = y.clone().chunk(2, -1)
        y[..., : WIDTH // 2] = first * angles.cos() - sign * second * angles.sin()
        y[..., WIDTH // 2 :] = second * angles.cos() + first * angles.sin()
    return torch.softmax(query @ key.transpose(1, 2), -1) @ x


@pytest.mark.parametrize(
    ("wrong", "words", "arrays"),
    [({"base": 5e5}, "frequencies of base 500000 instead of 10000", True), ({"sign": -1}, "sub", False)],
)
def test_steps_in_place_of_a_part_of_a_tensor_are_searched(wrong, words, arrays):
    verdict = explained(turn_in_place, partial(turn_in_place, **wrong), TEXT, arrays)
    assert words in verdict.cause.text, verdict


def deep(m, x):
    for _ in range(9):
        x = m.norm(torch.tanh(m.a(x)) * x.cos() + x)
    return x


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m, x: 0 * x, "the value 0 throughout"),
        (lambda m, x: torch.full_like(x, 0.5), "the value 0.5 throughout"),
        (lambda m, x: x / 0 * 0, "the value nan throughout"),
        (lambda m, x: x, "the values of `0`"),
    ],
)
def test_a_constant_and_a_copy_of_another_tensor_are_read_off_before_any_search(monkeypatch, wrong, words):
    monkeypatch.setattr(causes, "sites", lambda *arguments: pytest.fail("it searches among bugs"))
    port = {"output": wrong(None, TEXT).numpy()}
    assert words in compare(Of(deep, LAYERS), port, (TEXT,)).explained().cause.text
