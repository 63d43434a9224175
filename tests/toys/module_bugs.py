"""Bugs of ports of BERT, Llama and ViT: edits of a module, the first wrong tensor, and its cause.

An edit changes a copy of the model in place. A cause names a bug if its words match the pattern, which is
empty if no name would be better than another.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModuleBug:
    """``first`` holds candidates for the first wrong tensor; ``cause`` is a pattern for a right cause."""

    name: str
    first: tuple[str, ...]
    cause: str
    edit: object


def bugs(*entries):
    return [
        ModuleBug(name, (first,) if isinstance(first, str) else first, cause, edit)
        for name, first, cause, edit in entries
    ]


# Edits.


def setting(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value)


def weight(path, change):
    def edit(model):
        parameter = model.get_parameter(path)
        with torch.no_grad():
            parameter.copy_(change(parameter.clone()))

    return edit


def copied(path, source):
    return lambda model: model.get_submodule(path).load_state_dict(model.get_submodule(source).state_dict())


def replaced(path, module):
    return lambda model: model.set_submodule(path, module)


def instead(path, forward):
    """Replace a module's forward by a function of module, forward and arguments."""

    def edit(model):
        module = model.get_submodule(path)
        cls = type(module)

        def changed(self, *args, **kwargs):
            return forward(self, lambda *a, **k: cls.forward(self, *a, **k), *args, **kwargs)

        module.__class__ = type(cls.__name__, (cls,), {"forward": changed})

    return edit


def takes(path, change):
    """Change a module's first argument."""
    return instead(path, lambda self, own, x, *args, **kwargs: own(change(x), *args, **kwargs))


def gives(path, change):
    """Change a module's result."""
    return instead(path, lambda self, own, *args, **kwargs: change(own(*args, **kwargs)))


def both(*edits):
    def edit(model):
        for change in edits:
            change(model)

    return edit


# Attention, step by step.


class Attended:
    """Steps of attention: q (B, H, T, K), k and v (B, G, T, K) with G groups, mask (B, 1, T, T)."""

    def mask(self, mask, scores):
        return mask

    def scores(self, q, k, scale):
        return q @ k.transpose(-1, -2) * scale

    def weights(self, scores):
        return F.softmax(scores, -1)

    def repeated(self, x, times):
        return x.repeat_interleave(times, 1)

    def joined(self, x):
        return x.transpose(1, 2)

    def __call__(self, module, q, k, v, mask, scaling, **_):
        times = q.shape[1] // k.shape[1]
        scores = self.scores(q, self.repeated(k, times), scaling)
        mask = self.mask(mask, scores)
        scores = scores if mask is None else scores + mask
        weights = self.weights(scores)
        return self.joined(weights @ self.repeated(v, times)), weights


def attention(path, **steps):
    def edit(model):
        from transformers import AttentionInterface

        kind = type("Steps", (Attended,), {name: staticmethod(step) for name, step in steps.items()})
        name = f"steps of {path}, {id(kind)}"
        AttentionInterface.register(name, kind())
        module = model.get_submodule(path)
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = name

    return edit


MIN = torch.finfo(torch.float32).min


def hidden_by(constant):
    return lambda mask, scores: torch.where(mask < -1, constant, mask)


def diagonal(offset):
    # A causal mask shifted to another diagonal, among keys that are not padding.
    def mask(mask, scores):
        later = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(offset)
        padding = (mask.amax(-2, keepdim=True) < -1).expand(scores.shape)
        return torch.where(padding | later, MIN, 0.0)

    return mask


def in_bfloat16(function):
    return lambda x: function(x.bfloat16()).to(x.dtype)


def in_8_bits(x):
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale).round() * scale


def unbiased(self, own, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight + self.bias


def uncentred(self, own, x):
    return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) + self.bias


def interleaved(heads):
    # Split heads the other way around: a permutation of the features of a projection.
    return lambda x: x.unflatten(-1, (-1, heads)).transpose(-1, -2).flatten(-2)


def shifted(by, axis):
    return lambda x: x.roll(by, axis)


# BERT.

LAYER = "encoder.layer.1"
SELF, OUT, IN, LAST = (
    f"{LAYER}.attention.self",
    f"{LAYER}.attention.output",
    f"{LAYER}.intermediate",
    f"{LAYER}.output",
)
ACT = f"{IN}.intermediate_act_fn"
NORM = "embeddings.LayerNorm"

BERT = bugs(
    ("epsilon of embeddings", NORM, r"eps", setting(NORM, "eps", 1e-5)),
    ("gelu by tanh", ACT, r"tanh GELU instead of erf GELU", replaced(ACT, nn.GELU("tanh"))),
    ("no mask", f"{SELF}[0]", r"mask", attention(SELF, mask=lambda mask, scores: None)),
    (
        "mask one key too far",
        f"{SELF}[0]",
        r"mask",
        attention(SELF, mask=lambda mask, scores: mask.roll(1, -1)),
    ),
    ("mask of -10", f"{SELF}[0]", r"mask|-10", attention(SELF, mask=hidden_by(-10.0))),
    (
        "mask by a factor",
        f"{SELF}[0]",
        r"mask",
        attention(SELF, mask=lambda mask, scores: -scores * (mask < -1)),
    ),
    (
        "softmax over queries",
        f"{SELF}[0]",
        r"softmax",
        attention(SELF, weights=lambda s: F.softmax(s, -2)),
    ),
    (
        "heads joined untransposed",
        f"{SELF}[0]",
        r"order|heads|axis|axes",
        attention(SELF, joined=lambda x: x.contiguous().view(len(x), x.shape[2], x.shape[1], -1)),
    ),
    (
        "heads split the other way",
        f"{SELF}.query",
        r"heads|order",
        both(*(gives(f"{SELF}.{n}", interleaved(4)) for n in ("query", "key", "value"))),
    ),
    (
        "segment one",
        "embeddings.token_type_embeddings",
        r"one too high|segment",
        takes("embeddings.token_type_embeddings", lambda ids: ids + 1),
    ),
    (
        "no residual",
        f"{OUT}.LayerNorm",
        r"term|residual",
        instead(OUT, lambda s, own, x, residual: s.LayerNorm(s.dense(x))),
    ),
    ("norm without bias", f"{OUT}.LayerNorm", r"bias", weight(f"{OUT}.LayerNorm.bias", torch.zeros_like)),
    ("unbiased variance", f"{OUT}.LayerNorm", r"unbiased|n - 1", instead(f"{OUT}.LayerNorm", unbiased)),
    ("uncentred norm", f"{OUT}.LayerNorm", r"mean", instead(f"{OUT}.LayerNorm", uncentred)),
    ("a weight in 8 bits", f"{LAST}.dense", r"int8|8 bits", weight(f"{LAST}.dense.weight", in_8_bits)),
    ("pooled at the end", "pooler.dense", r"last|token|position", takes("pooler", shifted(1, 1))),
    (
        "no tanh",
        ("pooler.activation", "output[pooler_output]"),
        r"activation|tanh",
        replaced("pooler.activation", nn.Identity()),
    ),
)

# Llama.

BLOCK = "layers.1"
SELF, MLP, NORM = f"{BLOCK}.self_attn", f"{BLOCK}.mlp", f"{BLOCK}.post_attention_layernorm"
MADE = f"{SELF}.o_proj"


def rotated(path, rotate):
    # q and k are (B, H, T, K).
    def forward(self, own, hidden_states, position_embeddings=None, attention_mask=None, **_):
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        q, k, v = (
            layer(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin, 0), rotate(k, cos, sin, 1)
        x, weights = Attended()(self, q, k, v, attention_mask, self.scaling)
        return self.o_proj(x.flatten(2)), weights

    return instead(path, forward)


def half(x):
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def right(x, cos, sin, which):
    return x * cos + half(x) * sin


def opposite(x, cos, sin, which):
    return x * cos - half(x) * sin


def neighbours(x, cos, sin, which):
    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


def only(*turned):
    return lambda x, cos, sin, which: right(x, cos, sin, which) if which in turned else x


def centred(self, own, x):
    return F.layer_norm(x, x.shape[-1:], self.weight, None, self.variance_epsilon)


def plus_one(self, own, x):
    return own(x) + F.rms_norm(x, x.shape[-1:], None, self.variance_epsilon)


def by_size(self, own, x):
    # Divide by the norm of a row instead of its root mean square.
    return own(x) / math.sqrt(x.shape[-1])


def thetas(theta):
    return lambda model: model.rotary_emb.inv_freq.copy_(
        theta ** -(torch.arange(0, 6, 2, dtype=torch.float32) / 6)
    )


def ungated(self, own, x):
    return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def exchanged_gate(self, own, x):
    return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def normed_residual(self, own, hidden_states, **kwargs):
    x = self.input_layernorm(hidden_states)
    x = x + self.self_attn(hidden_states=x, **kwargs)[0]
    return x + self.mlp(self.post_attention_layernorm(x))


ROTARY = ("rotary_emb[0]", "rotary_emb[1]")

LLAMA = bugs(
    ("epsilon 10 times", NORM, r"eps", setting(NORM, "variance_epsilon", 1e-5)),
    ("layer norm", NORM, r"mean|cent|norm", instead(NORM, centred)),
    ("weight plus one", NORM, r"weight", instead(NORM, plus_one)),
    ("norm by length", NORM, r"", instead(NORM, by_size)),
    ("gelu for silu", f"{MLP}.act_fn", r"erf GELU instead of SiLU", replaced(f"{MLP}.act_fn", nn.GELU())),
    ("no activation", (f"{MLP}.act_fn", f"{MLP}.down_proj"), r"activation", instead(MLP, ungated)),
    (
        "gate and up exchanged",
        f"{MLP}.act_fn",
        r"parameters of|up_proj|gate",
        instead(MLP, exchanged_gate),
    ),
    (
        "gate's weights of up",
        f"{MLP}.gate_proj",
        r"parameters of .*up_proj|weight",
        copied(f"{MLP}.gate_proj", f"{MLP}.up_proj"),
    ),
    ("theta of 5e5", ROTARY, r"inv_freq|theta|frequenc", thetas(5e5)),
    (
        "positions from one",
        ROTARY,
        r"position|too far",
        instead("rotary_emb", lambda s, own, x, position_ids: own(x, position_ids + 1)),
    ),
    ("cosine and sine exchanged", ROTARY, r"cos|sin|other", gives("rotary_emb", lambda pair: pair[::-1])),
    ("rotation of neighbours", MADE, r"neighbours", rotated(SELF, neighbours)),
    ("rotation the other way", MADE, r"sign|order|rotat", rotated(SELF, opposite)),
    ("only queries rotated", MADE, r"rotat", rotated(SELF, only(0))),
    (
        "key heads in another order",
        MADE,
        r"head|order|repeat",
        attention(SELF, repeated=lambda x, times: x.repeat(1, times, 1, 1)),
    ),
    ("one more key seen", MADE, r"mask|causal|too far", attention(SELF, mask=diagonal(1))),
    ("all keys seen", MADE, r"mask", attention(SELF, mask=lambda mask, scores: torch.zeros_like(mask))),
    ("no scale", MADE, r"scal", setting(SELF, "scaling", 1.0)),
    (
        "softmax in bfloat16",
        MADE,
        r"bfloat16",
        attention(SELF, weights=in_bfloat16(lambda s: F.softmax(s, -1))),
    ),
    ("output transposed", MADE, r"transposed", weight(f"{SELF}.o_proj.weight", torch.t)),
    (
        "residual behind the norm",
        NORM,
        r"residual|term|in place of `layers\.0`",
        instead(BLOCK, normed_residual),
    ),
    (
        "one element of a weight",
        f"{MLP}.up_proj",
        r"weight",
        weight(
            f"{MLP}.up_proj.weight",
            lambda w: w.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(0.5)),
        ),
    ),
    ("last norm left out", ("norm", "output"), r"norm", replaced("norm", nn.Identity())),
)

# ViT.

SELF, MLP, BEFORE, AFTER = (
    "layers.1.attention",
    "layers.1.mlp",
    "layers.1.layernorm_before",
    "layers.1.layernorm_after",
)
PATCHES = "embeddings.patch_embeddings"
EMBEDDED = ("embeddings.dropout", "layers.0.layernorm_before")
MADE = f"{SELF}.o_proj"


def moved_class(x):
    return x.roll(-1, 1)


def without_positions(self, own, *args, **kwargs):
    return own(*args, **kwargs) - self.position_embeddings


def pooled_by_mean(x):
    return x[:, 1:].mean(1, keepdim=True)


VIT = bugs(
    (
        "patches by columns",
        PATCHES,
        r"order",
        gives(PATCHES, lambda x: x.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)),
    ),
    (
        "channels reversed",
        f"{PATCHES}.projection",
        r"channel|order|axis",
        takes(f"{PATCHES}.projection", lambda x: x.flip(1)),
    ),
    (
        "kernel transposed",
        f"{PATCHES}.projection",
        r"transposed|weight",
        weight(f"{PATCHES}.projection.weight", lambda w: w.transpose(2, 3)),
    ),
    (
        "one pixel off",
        f"{PATCHES}.projection",
        r"pixel|shift",
        takes(f"{PATCHES}.projection", shifted(1, -1)),
    ),
    ("class token at the end", EMBEDDED, r"order", gives("embeddings", moved_class)),
    (
        "positions one on",
        EMBEDDED,
        r"position|order|weight",
        weight("embeddings.position_embeddings", shifted(1, 1)),
    ),
    ("no positions", EMBEDDED, r"term|position", instead("embeddings", without_positions)),
    (
        "class token of zeros",
        EMBEDDED,
        r"cls_token|class",
        weight("embeddings.cls_token", torch.zeros_like),
    ),
    ("norms exchanged", BEFORE, r"parameters of|weight", copied(BEFORE, AFTER)),
    ("pooled by the mean", "pooler.dense", r"mean|token|position", takes("pooler", pooled_by_mean)),
)

BUGS = {"bert": BERT, "llama": LLAMA, "vit": VIT}

# Edits that only change the order of rounding.
CONTROLS = {
    "bert": attention("encoder.layer.1.attention.self"),
    "llama": both(rotated("layers.0.self_attn", right), attention("layers.1.self_attn")),
    "vit": attention("layers.1.attention"),
}
