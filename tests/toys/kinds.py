"""Small modules of the kinds that people have, and each computed in another order of summation."""

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

aten = torch.ops.aten

KINDS = {}
"""By name, what makes a module and the inputs that it is called with."""


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(rows, *shape, seed=0):
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(seed))


class Of(nn.Module):
    """A function with layers."""

    def __init__(self, function, layers):
        super().__init__()
        torch.manual_seed(1)
        self.function = function
        for name, make in layers.items():
            setattr(self, name, make())
        with torch.no_grad():  # far from an initialization, which hides biases and gains
            for one in self.parameters():
                one.add_(0.1 * torch.randn(one.shape).to(one.dtype))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def kind(*inputs, **layers):
    """Register a function with its layers; of inputs, shapes are drawn."""

    def register(function):
        given = tuple(drawn(*x, seed=i) if isinstance(x, tuple) else x for i, x in enumerate(inputs))
        KINDS[function.__name__] = lambda: (Of(function, layers).eval(), given)
        return function

    return register


def bits(*held):
    """Return everything that modules and inputs hold, bit for bit."""
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


def linear(*sizes, **options):
    return lambda: nn.Linear(*sizes, **options)


def parameter(*shape):
    return lambda: nn.Parameter(torch.randn(*shape))


def buffer(make):
    return lambda: nn.Buffer(make())


class Reordered(TorchDispatchMode):
    """Products and sums run in another order, norms and softmax in float64."""

    WIDE = (
        "convolution convolution_backward native_layer_norm native_group_norm native_batch_norm "
        "_native_batch_norm_legit_no_training _softmax _log_softmax mean cumsum var var_mean logsumexp "
        "index_add scatter_add exp tanh sigmoid gelu erf linalg_vector_norm _fft_r2c _fft_c2r _fft_c2c "
        "grid_sampler_2d upsample_bilinear2d upsample_bicubic2d avg_pool2d _adaptive_avg_pool2d "
        "_embedding_bag _trilinear prod sin cos mish log1p div sqrt rsqrt pow"
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
            made = func(args[0].flip(list(range(args[0].ndim))), *args[1:], **kwargs)
            return made.flip(list(range(made.ndim)))
        if name in self.WIDE.split():
            wide, back = torch.float64, torch.float32
            if kwargs.get("dtype") == back:
                kwargs = {**kwargs, "dtype": wide}
            made = func(*tree_map(lambda x: _in(x, back, wide), args), **kwargs)
            return tree_map(lambda x: _in(x, wide, back), made)
        return func(*args, **kwargs)


def _in(x, old, new):
    if isinstance(x, torch.Tensor) and x.is_complex():
        return x.to(new.to_complex())
    return x.to(new) if isinstance(x, torch.Tensor) and x.dtype == old else x


def reordered(model):
    """Return a copy that computes in another order."""

    class Otherwise(type(model)):
        def forward(self, *args, **kwargs):
            with Reordered():
                return super().forward(*args, **kwargs)

    made = copy.deepcopy(model)
    made.__class__ = Otherwise
    return made


# Perceptrons, gates, mixtures.


@kind((3, 12), inner=linear(12, 22), outer=linear(11, 5))
def glu_variants(m, x):
    a, b = m.inner(x).chunk(2, -1)
    return {
        n: m.outer(f(a) * b)
        for n, f in {"re": F.relu, "ge": F.gelu, "mish": F.mish, "hard": F.hardswish}.items()
    }


@kind((5, 12), gate=linear(12, 7), experts=lambda: nn.ModuleList(nn.Linear(12, 12) for _ in range(7)))
def mixture_of_experts(m, x):
    weights, chosen = m.gate(x).softmax(-1).topk(2, -1)
    y = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        rows, place = torch.where(chosen == number)
        y.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return y


@kind((5, 12), layers=lambda: nn.ModuleList([nn.Linear(12, 12)] * 2))
def one_layer_twice(m, x):
    for layer in m.layers:
        x = torch.tanh(layer(x))
    return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(17, 12), nn.Linear(12, 17, bias=False)
        self.head.weight = self.table.weight


@kind(whole(17, 3, 7), tied=Tied, inner=linear(12, 12))
def tied_embeddings(m, ids):
    return m.tied.head(torch.tanh(m.inner(m.tied.table(ids))))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.other = self.one


@kind((5, 12), both=Both, head=linear(12, 5))
def siamese_under_two_names(m, x):
    return m.head((m.both.one(x) - m.both.other(x.flip(0))).abs())


@kind((5, 11), (5, 7), pair=lambda: nn.Bilinear(11, 7, 3))
def bilinear(m, x, y):
    return m.pair(x, y)


@kind((5, 12), inner=lambda: parametrizations.spectral_norm(nn.Linear(12, 7)).eval())
def spectral_norm(m, x):
    return m.inner(x)


@kind(
    (5, 12),
    gains=lambda: nn.ParameterList(torch.randn(12) for _ in range(3)),
    shifts=lambda: nn.ParameterDict({"a": torch.randn(12)}),
    head=linear(12, 3),
)
def parameter_lists(m, x):
    for gain in m.gains:
        x = torch.sin(x * gain) + m.shifts["a"]
    return m.head(x)


# Convolutions.


def block(*sizes, **options):
    return lambda: nn.Sequential(nn.Conv2d(*sizes, **options), nn.BatchNorm2d(sizes[1]), nn.ReLU())


@kind(
    (2, 3, 8, 12),
    down=block(3, 7, 3, padding=1),
    mid=block(7, 7, 3, padding=1),
    up=lambda: nn.ConvTranspose2d(7, 7, 2, 2),
    last=lambda: nn.Conv2d(14, 2, 1),
)
def u_net(m, x):
    skip = m.down(x)
    return m.last(torch.cat([skip, m.up(m.mid(F.max_pool2d(skip, 2)))], 1))


@kind(
    (2, 6, 11, 13), deep=lambda: nn.Conv2d(6, 12, 3, groups=6, padding=1), point=lambda: nn.Conv2d(12, 5, 1)
)
def depthwise_separable(m, x):
    return m.point(F.relu6(m.deep(x)))


@kind((2, 3, 7, 5, 6), conv=lambda: nn.Conv3d(3, 5, 3, stride=2, padding=1))
def convolution_3d(m, x):
    return F.adaptive_avg_pool3d(F.elu(m.conv(x)), 1).flatten(1)


@kind((2, 3, 7, 11), conv=lambda: nn.Conv2d(3, 12, 3, padding=1))
def pixel_shuffle(m, x):
    return F.pixel_unshuffle(F.pixel_shuffle(m.conv(x), 2)[..., :10], 2)


@kind((2, 3, 7, 11), conv=lambda: nn.Conv2d(3, 3, 3))
def padding_modes(m, x):
    modes = ("reflect", "replicate", "circular", "constant")
    return {mode: m.conv(F.pad(x, (1, 2, 2, 1), mode)) for mode in modes}


@kind((2, 3, 11, 13), conv=lambda: nn.Conv2d(3, 3, 1))
def pooling(m, x):
    x = m.conv(x)
    return (
        F.max_pool2d(x, 3, 2),
        F.avg_pool2d(x, 3, 2, 1),
        F.adaptive_max_pool2d(x, 5),
        F.adaptive_avg_pool2d(x, (5, 7)),
        F.lp_pool2d(x.abs(), 2, 3),
        x.amax((2, 3)),
        F.avg_pool1d(x.flatten(2), 5),
        F.max_pool1d(x.flatten(2), 5),
    )


@kind((2, 3, 11, 13), conv=lambda: nn.Conv2d(3, 3, 1))
def max_unpool(m, x):
    y, places = F.max_pool2d(m.conv(x)[..., :12], 2, return_indices=True)
    return F.max_unpool2d(y, places, 2)


@kind((2, 3, 7, 11), conv=lambda: nn.Conv2d(3, 3, 1))
def interpolation(m, x):
    x = m.conv(x)
    made = {mode: F.interpolate(x, scale_factor=1.7, mode=mode) for mode in ("nearest", "bilinear", "area")}
    return made | {"aligned": F.interpolate(x, (13, 5), mode="bilinear", align_corners=True)}


@kind((2, 3, 9, 11), offset=lambda: nn.Conv2d(3, 2, 3, padding=1), conv=lambda: nn.Conv2d(3, 3, 1))
def deformable_indexing(m, x):
    h, w = x.shape[2:]
    shift = m.offset(x).permute(0, 2, 3, 1)
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, w), torch.linspace(-1, 1, h), indexing="xy"), -1)
    return F.grid_sample(m.conv(x), grid + 0.1 * torch.tanh(shift), padding_mode="border", align_corners=True)


@kind((2, 3, 8, 12), patches=linear(27, 27))
def unfold_and_fold(m, x):
    y = m.patches(F.unfold(x, 3, padding=1).transpose(1, 2)).transpose(1, 2)
    return F.fold(y, (8, 12), 3, padding=1)


@kind(
    (2, 5, 11, 13),
    norms=lambda: nn.ModuleList(
        [nn.InstanceNorm2d(5, affine=True), nn.GroupNorm(5, 5), nn.LocalResponseNorm(3)]
    ),
    conv=lambda: nn.Conv2d(5, 5, 3, bias=False),
)
def norms(m, x):
    x = m.conv(x)
    return {str(i): norm(x) for i, norm in enumerate(m.norms)} | {"unit": F.normalize(x, dim=1)}


# Recurrence.


@kind((3, 7, 5), rnn=lambda: nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True))
def lstm_bidirectional(m, x):
    return m.rnn(x)


@kind((3, 7, 5), torch.tensor([7, 5, 2]), rnn=lambda: nn.GRU(5, 6, batch_first=True, bidirectional=True))
def gru_packed(m, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]


@kind((3, 7, 5), key=linear(5, 6), value=linear(5, 4), query=linear(5, 6))
def linear_attention(m, x):
    k, v, q = F.elu(m.key(x)) + 1, m.value(x), F.elu(m.query(x)) + 1
    memory = torch.cumsum(torch.einsum("btk,btv->btkv", k, v), 1)
    return torch.einsum("btk,btkv->btv", q, memory) / (q * k.cumsum(1)).sum(-1, keepdim=True)


# Attention.


@kind((7, 2, 12), (5, 2, 12), layer=lambda: nn.Transformer(12, 3, 1, 1, 17))
def transformer(m, x, y):
    return m.layer(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))


@kind((2, 7, 12), qk=linear(12, 24))
def rotary(m, x):
    angles = torch.arange(7)[:, None] * 1e4 ** (-torch.arange(0, 12, 2) / 12)
    turn = torch.polar(torch.ones(7, 6), angles)
    q, k = (
        torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (6, 2))) * turn).flatten(-2)
        for y in m.qk(x).chunk(2, -1)
    )
    return torch.softmax(q @ k.transpose(1, 2) / 12, -1) @ x


# Tables, graphs, sets.


@kind(
    whole(17, 11),
    torch.tensor([0, 3, 3, 8]),
    bags=lambda: nn.ModuleList(nn.EmbeddingBag(17, 6, mode=mode) for mode in ("mean", "sum", "max")),
)
def embedding_bags(m, ids, offsets):
    return torch.cat([bag(ids, offsets) for bag in m.bags], -1)


@kind((7, 5), whole(7, 2, 13), score=linear(10, 1), inner=linear(5, 5))
def graph_attention(m, x, edges):
    source, target = edges
    e = F.leaky_relu(m.score(torch.cat([x[source], x[target]], -1)))[:, 0]
    top = torch.full((7,), -1e9).scatter_reduce(0, target, e, "amax")
    e = torch.exp(e - top[target])
    total = torch.zeros(7).scatter_add(0, target, e)
    return torch.zeros(7, 5).index_add(0, target, m.inner(x)[source] * (e / total[target])[:, None])


@kind((7, 5), inner=linear(5, 5))
def sparse_message_passing(m, x):
    places, values = torch.tensor([[0, 2, 5, 5], [1, 3, 0, 6]]), torch.tensor([0.5, 1.3, -2.1, 0.7])
    return torch.sparse.mm(torch.sparse_coo_tensor(places, values, (7, 7)), m.inner(x))


# Densities, fields, sequences.


@kind((7, 3), mlp=linear(36, 12), head=linear(12, 4))
def radiance_field(m, x):
    angles = (x[..., None] * 2.0 ** torch.arange(6) * math.pi).flatten(-2)
    rgb, density = m.head(F.relu(m.mlp(torch.cat([angles.sin(), angles.cos()], -1)))).split([3, 1], -1)
    alpha = 1 - torch.exp(-F.softplus(density[:, 0]) * 0.1)
    through = torch.cumprod(torch.cat([torch.ones(1), 1 - alpha[:-1] + 1e-10]), 0)
    return (through[:, None] * alpha[:, None] * torch.sigmoid(rgb)).sum(0)


@kind((2, 7, 5), emit=linear(5, 4), move=parameter(4, 4))
def crf_forward(m, x):
    emitted = m.emit(x)
    alpha = emitted[:, 0]
    for t in range(1, 7):
        alpha = torch.logsumexp(alpha[:, :, None] + m.move, 1) + emitted[:, t]
    return torch.logsumexp(alpha, 1)


@kind((9, 2, 5), torch.tensor([[1, 2, 1], [3, 1, 2]]), emit=linear(5, 4))
def ctc(m, x, targets):
    logs = m.emit(x).log_softmax(-1)
    return F.ctc_loss(logs, targets, torch.tensor([9, 8]), torch.tensor([3, 2]), reduction="none")


@kind((2, 307), window=buffer(lambda: torch.hann_window(32)), mel=linear(17, 5))
def spectrogram(m, x):
    power = torch.stft(x, 32, 16, window=m.window, return_complex=True).abs() ** 2
    return torch.log(m.mel(power.transpose(1, 2)).abs() + 1e-5)


@kind((2, 7), filters=parameter(7))
def long_convolution(m, x):
    return torch.fft.irfft(torch.fft.rfft(x, 14) * torch.fft.rfft(m.filters, 14), 14)[:, :7]


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


@kind((5, 6), weight=parameter(6, 6))
def mapped_and_differentiated(m, x):
    def energy(y):
        return torch.tanh(m.weight @ y).square().sum()

    return torch.func.vmap(torch.func.grad(energy))(x)


@kind((5, 6), inner=linear(6, 6))
def forces_by_autograd(m, x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return -torch.autograd.grad(torch.tanh(m.inner(y)).square().sum(), y, create_graph=True)[0]


@kind((5, 12), inner=linear(12, 12))
def checkpointed(m, x):
    return checkpoint(lambda y: F.gelu(m.inner(y)), x, use_reentrant=False)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].abs() < 2)


@kind((5, 12), inner=linear(12, 12))
def custom_function(m, x):
    return Clipped.apply(m.inner(x)) * 2.5


@torch.library.custom_op("tests::scaled_swish", mutates_args=())
def scaled_swish(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * torch.sigmoid(by * x)


@kind((5, 12), inner=linear(12, 12))
def custom_operator(m, x):
    return scaled_swish(m.inner(x).detach(), 1.3) + m.inner(x)


# What changes in place, and state.


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
def input_changed(m, x):
    x -= x.mean(0)
    x[:, 0] = x[:, 1].exp()
    return m.inner(x.div_(x.std(0) + 1e-3))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        self.steps += 1
        self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return (x - self.mean) / self.steps


@kind((5, 12), count=Counting, inner=linear(12, 3))
def running_statistics(m, x):
    return m.inner(m.count(x))


@kind((5, 12), norm=lambda: nn.BatchNorm1d(12, track_running_stats=False), inner=linear(12, 3))
def batch_statistics(m, x):
    return m.inner(m.norm(x))


@kind((5, 12), inner=linear(12, 12))
def shapes_by_item(m, x):
    count = int((x[:, 0] > 0).sum().item())
    return m.inner(x)[:count] * float(x.abs().max().item() > 1)


@kind((3, 11), whole(3, 3, 11), log=parameter(3))
def loss_as_output(m, x, y):
    return F.cross_entropy(torch.stack([x * s for s in m.log], 1), y, label_smoothing=0.1)


@kind((5, 12), inner=linear(12, 12))
def mixed_precision(m, x):
    y = (m.inner(x).bfloat16() @ torch.eye(12, dtype=torch.bfloat16)).float()
    return torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * y


@kind((5, 12), inner=linear(12, 12))
def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.inner(x).float().sigmoid()
