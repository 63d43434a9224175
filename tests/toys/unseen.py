"""Ports with mistakes that no family of hypotheses was written for, and what an engineer would want to be
told of them.
"""

import re
from dataclasses import dataclass

import numpy as np

from concord.spec.masks import mask_constant
from tests.toys import ports
from tests.toys.ports import Port

Array = np.ndarray


@dataclass(frozen=True)
class Unseen:
    """A mistake.

    Attributes:
        first: patterns (regular expressions) of the tensors that may rightly be named first.
        clauses: that it breaks, any of which is right.
        words: patterns of which every one has to be said, in a cause or in a description.
        steps: patterns of taps, and what becomes of them.
        home, scenario: the case that shows it.
    """

    first: str
    clauses: str
    words: tuple[str, ...]
    steps: dict
    home: str = "bert"
    scenario: str = "ragged"


def backward(run, y, source, pull):
    """Return the value of a tensor, whose gradient is made into that of another."""
    return run.a._record(y.value, (source, lambda g: pull(g).astype(g.dtype)))


def forward(run, y, source, value):
    """Return a value of which the gradient is that of the right one."""
    return run.a._record(np.asarray(value, y.value.dtype), (source, lambda g: g))


def edited(change):
    """Return the step that makes a tap's value into another; gradients flow as they should have."""
    return lambda run, name, y: forward(run, y, y, change(run, name, np.array(y.value)))


def pulled(change):
    """Return the step that makes the gradient of a tap into another."""
    return lambda run, name, y: backward(run, y, y, lambda g: change(run, name, np.array(g)))


def put(where, value):
    """Return the step that puts something, perhaps made of the tap, at a place of it."""

    def change(run, name, y):
        y[where] = value(y[where]) if callable(value) else value
        return y

    return edited(change)


def padding(run):
    return ~run.real()


def masked_by(visible):
    def change(run, name, y):
        fill = (
            run.a.replace
            if run.config.mask_fill == "replace"
            else lambda *given: run.a.add_where(*given, rounded=run.dtype)
        )
        return fill(
            run.beside(name, "scores"), visible(run)[:, None, None], mask_constant(run.config, run.dtype)
        )

    return change


def of_norm(made, tap="residual1"):
    """Return the step that makes a norm of what goes into it, gain and offset."""

    def change(run, name, y):
        x = run.taken[name.replace("norm1", tap)].value
        return made(run, x, run.weights[f"{name}.weight"].value, run.weights[f"{name}.bias"].value)

    return edited(change)


def centered(x):
    return x - x.mean(-1, keepdims=True)


def short_softmax(run, name, y):
    shown = run.beside(name, "masked_scores").value.astype(np.float16).astype(np.float32)
    powers = np.exp(shown - shown.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def context_of(weights, values=lambda v: v):
    def change(run, name, y):
        w, v = run.beside(name, "weights").value, run.beside(name, "value").value
        return np.einsum("bhqs,bshk->bqhk", weights(w), values(v)).reshape(y.shape)

    return edited(change)


def tail_relu(run, name, y):
    x = run.beside(name, "inner").value
    return np.where(x > 1.5, x, y)


def flow(where, value):
    """Return the step that puts something at a place of a tap's gradient."""

    def change(run, name, g):
        g[where] = value(g[where]) if callable(value) else value
        return g

    return pulled(change)


ACTIVATION = r"layers.0.feed_forward.activation"
H0 = "layers.0.attention"

UNSEEN = {
    # Embeddings and positions.
    "one id wrong": Unseen(
        "embeddings.token",
        "EMB-1",
        ("id",),
        {
            "embeddings.token": edited(
                lambda run, name, y: np.where(
                    (run.batch.required("input_ids") == run.batch.required("input_ids")[0, 1])[..., None],
                    0.5 * y,
                    y,
                )
            )
        },
    ),
    # Attention.
    "bias in the first head alone": Unseen(
        f"{H0}.query",
        "ATT-1 WGT-2",
        ("head 1", "bias"),
        {
            "*.query": edited(
                lambda run, name, y: (
                    y - run.weights[f"{name}.bias"].value.reshape(2, 7) * (np.arange(2) == 1)[:, None]
                )
            )
        },
    ),
    "value one token late": Unseen(
        f"{H0}.value",
        "ATT-1 ATT-6",
        ("token",),
        {"*.value": edited(lambda run, name, y: np.roll(y, 1, 1))},
    ),
    "temperature": Unseen(
        f"{H0}.scores", "ATT-4", (r"1\.1\b",), {"*.scores": edited(lambda run, name, y: y * 1.1)}
    ),
    "one head without scale": Unseen(
        f"{H0}.scores",
        "ATT-4",
        ("head 1", r"2\.64|scale"),
        {"*.scores": put((slice(None), 1), lambda s: s * 7**0.5)},
    ),
    "mask of one other sample": Unseen(
        f"{H0}.masked_scores",
        "MSK-7 MSK-1",
        ("sample 2",),
        {"*.masked_scores": masked_by(lambda run: run.real()[[0, 1, 1, 3, 4]])},
    ),
    "empty rows are no numbers": Unseen(
        f"{H0}.weights",
        "MSK-5 ATT-5",
        ("visible key", "no number|NaN"),
        {
            "*.weights": edited(
                lambda run, name, y: np.where(run.real().any(1)[:, None, None, None], y, np.nan)
            )
        },
    ),
    "softmax of float16 scores": Unseen(
        f"{H0}.weights", "PRC-2", ("float16",), {"*.weights": edited(short_softmax)}, scenario="full"
    ),
    "padded queries zeroed": Unseen(
        f"{H0}.context",
        "MSK-4",
        ("padd", "zero"),
        {"*.context": edited(lambda run, name, y: np.where(padding(run)[..., None], 0, y))},
    ),
    "second head by the weights of the first": Unseen(
        f"{H0}.context", "ATT-6 ATT-7", ("head 1",), {"*.context": context_of(lambda w: w[:, [0, 0]])}
    ),
    "context misses the last key": Unseen(
        f"{H0}.context",
        "ATT-6",
        (),
        {"*.context": context_of(lambda w: w * (np.arange(w.shape[-1]) < w.shape[-1] - 1))},
        scenario="full",
    ),
    # Norms, residuals, feed-forward.
    "mean absolute deviation": Unseen(
        "layers.0.norm1",
        "NRM-2",
        (),
        {
            "layers.*.norm1": of_norm(
                lambda run, x, gain, offset: (
                    gain * centered(x) / abs(centered(x)).mean(-1, keepdims=True) + offset
                )
            )
        },
    ),
    "offset before gain": Unseen(
        "layers.0.norm1",
        "NRM-2",
        ("offset|column|bias",),
        {
            "layers.*.norm1": of_norm(
                lambda run, x, gain, offset: (
                    gain
                    * (centered(x) / np.sqrt(np.square(centered(x)).mean(-1, keepdims=True) + 1e-12) + offset)
                )
            )
        },
    ),
    "padded rows miss the residual": Unseen(
        "layers.0.residual2",
        "RES-1",
        ("padd", "residual"),
        {
            "layers.*.residual2": edited(
                lambda run, name, y: np.where(
                    padding(run)[..., None], run.beside(name, "feed_forward.outer").value, y
                )
            )
        },
    ),
    "activation saturates": Unseen(
        ACTIVATION,
        "FFN-2",
        (r"at most|satur|clamp|clipped",),
        {"*.activation": edited(lambda run, name, y: np.minimum(y, 0.8))},
    ),
    "tails of the activation": Unseen(ACTIVATION, "FFN-2", (), {"*.activation": edited(tail_relu)}),
    # Head and loss.
    "hard tanh": Unseen(
        "pooler.output",
        "HED-2",
        (),
        {"pooler.output": edited(lambda run, name, y: np.clip(run.taken["pooler.dense"].value, -1, 1))},
    ),
    "last class suppressed": Unseen(
        "logits", "HED-3", ("class 2|last class",), {"logits": put((slice(None), 2), lambda x: x - 7)}
    ),
    "classes are weighted": Unseen(
        "losses",
        "LOS-1",
        ("sample",),
        {"losses": edited(lambda run, name, y: np.where(run.batch.required("labels") == 1, 0.5 * y, y))},
    ),
    # The backward pass alone.
    "residual halved": Unseen(
        r"gradients.(taps.)?(layers.0.norm2|layers.1.norm1|layers.1.attention).*",
        "RES-1",
        ("residual1",),
        {
            "layers.*.residual1": lambda run, name, y: run.a._record(
                y.value,
                (run.taken["layers.0.norm2" if "1.res" in name else "embeddings.norm"], lambda g: g / 2),
                (run.beside(name, "attention.output"), lambda g: g),
            )
        },
    ),
    "last sample has no gradient": Unseen(
        r"gradients.(classifier.*|taps.logits)",
        "GRD-1 LOS-2 LOS-1",
        (),
        {"logits": flow(-1, 0.0)},
    ),
}
"""By what is done wrongly."""


def run_of(case, mistake):
    """Return what a port with a mistake gives: the reference in rounded arithmetic."""
    return ports.run_of(case, Port(steps=mistake.steps))


def said(mistake, text):
    """Return whether a text says what has to be said."""
    return all(re.search(words, text) for words in mistake.words)
