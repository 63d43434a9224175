import numpy as np
import pytest
import torch
import torch.nn.functional as F

from concord.conformance.compare import compare
from concord.conformance.compare.module_reference import spread
from tests.toys.kinds import Of, drawn, linear

TOKENS, WIDTH, HEADS = 7, 6, 2

# Other contents of a row that sees no key. By default it weights all keys equally.
HELD = {"other": 1.39, "nothing": float("nan")}


def attention(blind):
    """A module of (B, T, D) and a mask (B, T) to (B, T, D)."""

    def forward(m, x, attention_mask):
        q, k, v = m.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        near = torch.ones(TOKENS, TOKENS).tril(1).triu(-1).bool()
        visible = (near & attention_mask[:, None].bool())[:, None]  # (B, 1, T, T)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        y = torch.softmax(scores.masked_fill(~visible, -1e9), -1) @ v
        if blind == "zero":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        elif blind in HELD:
            y = y.masked_fill(~visible.any(-1, keepdim=True), HELD[blind])
        return m.out(y.transpose(1, 2).reshape(x.shape))

    return Of(forward, {"qkv": linear(WIDTH, 3 * WIDTH), "out": linear(WIDTH, WIDTH)})


def given(real=True):
    # Two samples. The rows that see no key are either real tokens or padding.
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 3:] = 0
    return {"x": drawn(2, TOKENS, WIDTH, seed=5), "attention_mask": mask.flip(1) if not real else mask}


def explained(right, other, inputs, **options):
    return compare(attention(right), attention(other), inputs, **options).explained()


@pytest.mark.parametrize(
    ("right", "other", "real", "rows"),
    [("zero", "uniform", True, "4 to 6"), ("uniform", "zero", False, "0 to 2")],
)
def test_rows_are_named_and_may_be_declared_in_either_direction(right, other, real, rows):
    inputs, declared = given(real), [f"blind_rows_{other}"]
    verdict = explained(right, other, inputs)
    assert [verdict.undeclared] == declared
    text = str(verdict)
    assert f"only rows that see no key are wrong (3 rows): {rows} in sample 1; the" in text
    assert f"reference has {right} weights" in text
    assert f"the candidate {other} weights" in text
    assert f"declared={declared}" in text
    assert explained(right, other, inputs, declared=declared).passed
    wrong = attention(other)
    wrong.qkv.weight.data[0, 0] += 0.01  # the declaration excuses nothing else
    assert compare(attention(right), wrong, inputs, declared=declared).status == "diverges"


@pytest.mark.parametrize(
    ("other", "words"), [("other", "neither zero nor uniform"), ("nothing", "not finite")]
)
def test_garbage_is_told_and_only_padding_declares_it(other, words):
    verdict = explained("zero", other, given())
    assert verdict.undeclared == "uncomputed_padding"
    assert words in str(verdict)
    assert "only padding rows are wrong: 4 to 6 in sample 1" in str(verdict)
    assert explained("zero", other, given(), declared=[verdict.undeclared]).passed


def test_padding_is_found_along_whichever_axis_tokens_stand():
    rows = np.array([[False, False, True], [False, True, True]])
    for shape in ((2, 3), (2, 3, 5), (2, 7, 3, 5), (6, 5)):
        mask = spread(rows, shape)
        assert mask.shape == shape
        assert mask.mean() == rows.mean()
    assert spread(rows, (2, 7, 5, 3)) is None
    assert spread(rows, (3, 5)) is None
