"""Small modules of common kinds, and copies that sum in another order."""

import copy
import io
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

# Functions that make a module and its inputs, by name.
KINDS = {}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(rows, *shape, seed=0):
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


class Of(nn.Module):
    """A function with layers, in evaluation mode."""

    def __init__(self, function, layers):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        for name, make in layers.items():
            setattr(self, name, make())
        with torch.no_grad():  # a fresh initialization would hide biases and gains
            for weight in self.parameters():
                weight.add_(0.1 * torch.randn(weight.shape).to(weight.dtype))
        self.eval()

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def kind(*inputs, **layers):
    """Register a function with its layers; inputs given as shapes are drawn."""

    def register(function):
        arguments = tuple(drawn(*x, seed=i) if isinstance(x, tuple) else x for i, x in enumerate(inputs))
        KINDS[function.__name__] = lambda: (Of(function, layers), arguments)
        return function

    return register


def bits(*values):
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def linear(*sizes, **options):
    return lambda: nn.Linear(*sizes, **options)


def conv(*sizes, **options):
    return lambda: nn.Conv2d(*sizes, **options)


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(*shape))


class Reordered(TorchDispatchMode):
    """Computes products and sums in another order, norms and softmax in float64."""

    WIDE = (
        "convolution convolution_backward native_layer_norm native_group_norm native_batch_norm "
        "_native_batch_norm_legit_no_training _softmax _log_softmax mean cumsum var var_mean logsumexp "
        "index_add scatter_add exp tanh sigmoid gelu erf linalg_vector_norm _fft_r2c _fft_c2r _fft_c2c "
        "avg_pool2d _adaptive_avg_pool2d _embedding_bag _trilinear prod sin cos mish log1p div sqrt rsqrt pow"
    )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        floats = [x for x in tensors if x.is_floating_point() or x.is_complex()]
        if any(x.dtype != torch.float32 or x.layout != torch.strided for x in floats):
            return func(*args, **kwargs)
        if name in ("mm", "bmm"):
            return func(args[0].flip(-1), args[1].flip(-2))
        if name in ("addmm", "baddbmm"):
            return func(args[0], args[1].flip(-1), args[2].flip(-2), *args[3:], **kwargs)
        if name == "sum" and tensors[0].is_floating_point():
            result = func(args[0].flip(list(range(args[0].ndim))), *args[1:], **kwargs)
            return result.flip(list(range(result.ndim)))
        if name in self.WIDE.split():
            wide, back = torch.float64, torch.float32
            if kwargs.get("dtype") == back:
                kwargs = {**kwargs, "dtype": wide}
            result = func(*tree_map(lambda x: _in(x, back, wide), args), **kwargs)
            return tree_map(lambda x: _in(x, wide, back), result)
        return func(*args, **kwargs)


def _in(x, old, new):
    if isinstance(x, torch.Tensor) and x.is_complex():
        return x.to(new.to_complex())
    return x.to(new) if isinstance(x, torch.Tensor) and x.dtype == old else x


def reordered(model):
    class Otherwise(type(model)):
        def forward(self, *args, **kwargs):
            with Reordered():
                return super().forward(*args, **kwargs)

    twin = copy.deepcopy(model)
    twin.__class__ = Otherwise
    return twin


# Gates; one layer under two names.


@kind(
    (3, 11),
    (3, 7),
    inner=lambda: parametrizations.spectral_norm(nn.Linear(11, 22)).eval(),
    gains=lambda: nn.ParameterList(torch.randn(11) for _ in range(2)),
    shifts=lambda: nn.ParameterDict({"a": torch.randn(11)}),
    pair=lambda: nn.Bilinear(11, 7, 3),
)
def gates(m, x, y):
    for gain in m.gains:
        x = torch.sin(x * gain) + m.shifts["a"]
    a, b = m.inner(x).chunk(2, -1)
    functions = {"re": F.relu, "ge": F.gelu, "mish": F.mish, "hard": F.hardswish}
    return {name: m.pair(function(a) * b, y) for name, function in functions.items()}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 12), nn.Linear(12, 17, bias=False)
        self.head.weight = self.table.weight
        self.one = self.other = nn.Sequential(nn.Linear(12, 12), nn.Tanh())


@kind(whole(17, 3, 7), tied=Tied, layers=lambda: nn.ModuleList([nn.Linear(12, 12)] * 2))
def shared_weights(m, ids):
    x = m.tied.table(ids)
    for layer in m.layers:
        x = torch.tanh(layer(x))
    return m.tied.head(m.tied.one(x) - m.tied.other(x.flip(0)))


# Images.


@kind(
    (2, 3, 8, 12),
    down=lambda: nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU()),
    mid=conv(7, 7, 3, groups=7, padding=1),
    up=lambda: nn.ConvTranspose2d(7, 7, 2, 2),
    last=conv(14, 2, 1),
)
def u_net(m, x):
    skip = m.down(x)
    return m.last(torch.cat([skip, m.up(F.relu6(m.mid(F.max_pool2d(skip, 2))))], 1))


@kind(
    (2, 3, 7, 10),
    conv=conv(3, 12, 3, padding=1),
    deep=lambda: nn.Conv3d(3, 5, 3, stride=2, padding=1),
    patches=linear(27, 27),
)
def convolutions(m, x):
    modes = ("reflect", "replicate", "circular", "constant")
    outputs = {mode: m.conv(F.pad(x, (1, 2, 2, 1), mode)) for mode in modes}
    outputs["shuffled"] = F.pixel_unshuffle(F.pixel_shuffle(m.conv(x), 2)[..., :10], 2)
    outputs["deep"] = F.adaptive_avg_pool3d(F.elu(m.deep(x.unflatten(3, (2, 5)))), 1).flatten(1)
    patches = m.patches(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2)
    return outputs | {"folded": F.fold(patches, (7, 10), 3, padding=1)}


@kind((2, 3, 11, 13), conv=conv(3, 3, 1))
def pooling(m, x):
    x = m.conv(x)
    y, places = F.max_pool2d(x[..., :12], 2, return_indices=True)
    return (
        F.max_unpool2d(y, places, 2),
        F.max_pool2d(x, 3, 2),
        F.avg_pool2d(x, 3, 2, 1),
        F.adaptive_max_pool2d(x, 5),
        F.adaptive_avg_pool2d(x, (5, 7)),
        F.lp_pool2d(x.abs(), 2, 3),
        x.amax((2, 3)),
        F.avg_pool1d(x.flatten(2), 5),
        F.max_pool1d(x.flatten(2), 5),
    )


@kind((1, 2, 23, 41), offset=conv(2, 2, 3, padding=1), conv=conv(2, 2, 1))
def sampling(m, x):
    # The places are computed, so they have rounding errors.
    y, shift = m.conv(x), m.offset(x).permute(0, 2, 3, 1)
    axes = torch.linspace(-1, 1, 41), torch.linspace(-1, 1, 23)
    grid = torch.stack(torch.meshgrid(*axes, indexing="xy"), -1) + 0.1 * torch.tanh(shift)
    outputs = {
        f"{mode}{i}": F.interpolate(y, (31, 61), mode=mode, **how)
        for mode in ("bilinear", "bicubic")
        for i, how in enumerate(({}, {"align_corners": True}, {"antialias": True}))
    }
    return outputs | {
        # At the places in the middle, the outer coefficients are 0, but for rounding.
        "tiny": F.interpolate(y[..., :21, :39].reshape(1, -1, 3, 3), (5, 5), mode="bicubic"),
        "nearest": F.interpolate(y, scale_factor=1.7),
        "area": F.interpolate(y, scale_factor=1.7, mode="area"),
        "deformed": F.grid_sample(y, grid, padding_mode="border", align_corners=True),
    }


@kind(
    (2, 5, 11, 13),
    norms=lambda: nn.ModuleList(
        [nn.InstanceNorm2d(5, affine=True), nn.GroupNorm(5, 5), nn.LocalResponseNorm(3)]
    ),
    batch=lambda: nn.BatchNorm2d(5, track_running_stats=False),
    conv=conv(5, 5, 3, bias=False),
)
def norms(m, x):
    x = m.conv(x)
    return [*(norm(x) for norm in m.norms), m.batch(x), F.normalize(x, dim=1)]


# Sequences.


@kind(
    (3, 7, 5),
    torch.tensor([7, 5, 2]),
    lstm=lambda: nn.LSTM(5, 6, batch_first=True, bidirectional=True),
    gru=lambda: nn.GRU(5, 6, batch_first=True, bidirectional=True),
)
def recurrence(m, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return m.lstm(x), nn.utils.rnn.pad_packed_sequence(m.gru(packed)[0], batch_first=True)[0]


@kind((3, 7, 5), key=linear(5, 6), value=linear(5, 4), query=linear(5, 6))
def linear_attention(m, x):
    k, v, q = F.elu(m.key(x)) + 1, m.value(x), F.elu(m.query(x)) + 1
    memory = torch.cumsum(torch.einsum("btk,btv->btkv", k, v), 1)
    return torch.einsum("btk,btkv->btv", q, memory) / (q * k.cumsum(1)).sum(-1, keepdim=True)


@kind((2, 7, 12), qk=linear(12, 24))
def rotary(m, x):
    angles = torch.arange(7)[:, None] * 1e4 ** (-torch.arange(0, 12, 2) / 12)
    turn = torch.polar(torch.ones(7, 6), angles)
    q, k = (
        torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (6, 2))) * turn).flatten(-2)
        for y in m.qk(x).chunk(2, -1)
    )
    return torch.softmax(q @ k.transpose(1, 2) / 12, -1) @ x


@kind((9, 2, 5), torch.tensor([[1, 2, 1], [3, 1, 2]]), emit=linear(5, 4), move=parameter(4, 4))
def likelihoods(m, x, targets):
    emitted = m.emit(x)
    alpha = emitted[0]
    for step in emitted[1:]:
        alpha = torch.logsumexp(alpha[:, :, None] + m.move, 1) + step
    lengths = torch.tensor([9, 8]), torch.tensor([3, 2])
    return {
        "field": torch.logsumexp(alpha, 1),
        "ctc": F.ctc_loss(emitted.log_softmax(-1), targets, *lengths, reduction="none"),
        "entropy": F.cross_entropy(emitted[:3].flatten(0, 1), targets.T.flatten(), label_smoothing=0.1),
    }


# Tables, graphs, fields.


@kind(
    whole(17, 11),
    torch.tensor([0, 3, 3, 8]),
    bags=lambda: nn.ModuleList(nn.EmbeddingBag(17, 6, mode=mode) for mode in ("mean", "sum", "max")),
)
def embedding_bags(m, ids, offsets):
    return torch.cat([bag(ids, offsets) for bag in m.bags], -1)


@kind((7, 5), whole(7, 2, 13), score=linear(10, 1), inner=linear(5, 5))
def graphs(m, x, edges):
    source, target = edges
    e = F.leaky_relu(m.score(torch.cat([x[source], x[target]], -1)))[:, 0]
    top = torch.full((7,), -1e9).scatter_reduce(0, target, e, "amax")
    e = torch.exp(e - top[target])
    total = torch.zeros(7).scatter_add(0, target, e)
    y = m.inner(x)
    attended = torch.zeros(7, 5).index_add(0, target, y[source] * (e / total[target])[:, None])
    places, values = torch.tensor([[0, 2, 5, 5], [1, 3, 0, 6]]), torch.tensor([0.5, 1.3, -2.1, 0.7])
    return attended, torch.sparse.mm(torch.sparse_coo_tensor(places, values, (7, 7)), y)


@kind((7, 3), mlp=linear(36, 12), head=linear(12, 4))
def radiance_field(m, x):
    angles = (x[..., None] * 2.0 ** torch.arange(6) * math.pi).flatten(-2)
    rgb, density = m.head(F.relu(m.mlp(torch.cat([angles.sin(), angles.cos()], -1)))).split([3, 1], -1)
    alpha = 1 - torch.exp(-F.softplus(density[:, 0]) * 0.1)
    through = torch.cumprod(torch.cat([torch.ones(1), 1 - alpha[:-1] + 1e-10]), 0)
    return (through[:, None] * alpha[:, None] * torch.sigmoid(rgb)).sum(0)


# Signals, complex numbers, orders.


@kind(
    (2, 307),
    (2, 7),
    window=lambda: nn.Buffer(torch.hann_window(32)),
    mel=linear(17, 5),
    filters=parameter(7),
)
def signals(m, x, y):
    power = torch.stft(x, 32, 16, window=m.window, return_complex=True).abs() ** 2
    convolved = torch.fft.irfft(torch.fft.rfft(y, 14) * torch.fft.rfft(m.filters, 14), 14)[:, :7]
    return torch.log(m.mel(power.transpose(1, 2)).abs() + 1e-5), convolved


@kind((2, 7, 5), weight=lambda: nn.Parameter(torch.randn(5, 5, dtype=torch.complex64)), head=linear(5, 3))
def complex_numbers(m, x):
    z = torch.complex(x, x.flip(1)) @ m.weight
    return m.head(z.abs() + z.angle())


@kind((3, 11), head=linear(11, 11))
def quantiles_and_sorts(m, x):
    y = m.head(x)
    return (
        y.sort(-1).values,
        y.median(-1).values,
        y.quantile(torch.tensor([0.1, 0.5, 0.77]), -1),
        y.kthvalue(3).values,
        y.topk(4).values,
        y.cummax(-1).values,
        y.logcumsumexp(-1),
        y.diff(dim=-1),
    )


# Derivatives, and custom operations.


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].abs() < 2)


@torch.library.custom_op("tests::scaled_swish", mutates_args=())
def scaled_swish(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * torch.sigmoid(by * x)


@kind((5, 7), inner=linear(7, 7), weight=parameter(7, 7))
def derivatives(m, x):
    def energy(y):
        return torch.tanh(m.weight @ y).square().sum()

    def force(y):
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            return -torch.autograd.grad(energy(m.inner(y).T), y, create_graph=True)[0]

    y = m.inner(x)
    return {
        "mapped": torch.func.vmap(torch.func.grad(energy))(x),
        "force": force(x),
        "checkpointed": checkpoint(lambda z: F.gelu(m.inner(z)), x, use_reentrant=False),
        "function": Clipped.apply(y) * 2.5,
        "operator": scaled_swish(y.detach(), 1.3) + y,
    }


# In-place changes, and two precisions.


@kind((5, 12), inner=linear(12, 12), outer=linear(12, 3))
def slices_set(m, x):
    y = m.inner(x)
    y = y.clone()
    y[:, 1:3] = 0.5
    y[y > 1.7] = 0.25
    y[:, 5] += y[:, 6]
    y[torch.tensor([0, 3]), 4] *= 2
    y.narrow(1, 8, 2).copy_(x[:, :2])
    y[..., 10:].masked_fill_(x[:, 10:] < 0, -1.5)
    y.index_fill_(1, torch.tensor([7]), 0.125)
    y.t()[11].sub_(0.75).mul_(1.5)
    return m.outer(y)


@kind((5, 12), inner=linear(12, 12))
def mixed_precision(m, x):
    y = (m.inner(x).bfloat16() @ torch.eye(12, dtype=torch.bfloat16)).float()
    with torch.autocast("cpu", torch.bfloat16):
        automatic = m.inner(x).float().sigmoid()
    return torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * y, automatic
