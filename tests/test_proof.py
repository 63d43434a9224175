from collections import Counter

import pytest
from torch import nn

from concord.conformance.compare import prepare
from concord.conformance.compare.proof import batched, prove, summary
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear, parameter
from tests.toys.modules import Attention, Fused, encoder, texts


def of_one_layer(attention=Attention):
    model = encoder(attention)
    model.layers = model.layers[:1]
    return model


def test_a_proof_says_which_bugs_a_comparison_would_have_found():
    proof = prove(prepare(of_one_layer(), of_one_layer(Fused), texts()))
    (masked,) = (of for bug, of in proof.items() if bug.name == "mask_missing")
    assert masked["found"] == masked["tried"] > 0
    came = sum(proof.values(), Counter())
    assert came["found"] >= 0.9 * (came["tried"] - came["silent"])


def test_a_bug_within_rounding_is_not_counted():
    layers = {"norm": lambda: nn.LayerNorm(7, eps=1e-12), "a": linear(7, 7)}
    model = Of(lambda m, x: m.norm(x) + 3e-7 * m.a(x), layers)
    port = {"output": model(drawn(3, 7)).detach() * (1 + 2**-23)}
    words = summary(prove(prepare(model, port, drawn(3, 7))))
    assert "epsilon 1e-07 in place of 1e-12" in words["no effect beyond rounding with these inputs"]
    assert "leaving out the bias" in words["not found"]  # it would be, if `a` were returned


def pooled(m, input_ids, attention_mask):
    # Adds a share of the mean of all samples.
    total = (m.token(input_ids) * attention_mask[..., None]).sum(1)
    return total + 1e-3 * total.mean(0)


TOKEN = {"token": lambda: nn.Embedding(31, 5)}


def test_a_model_that_looks_at_other_samples_is_found():
    right, wrong = (
        [verdict for _, verdict in batched(prepare(model, None, texts()).reference)]
        for model in (of_one_layer(), Of(pooled, TOKEN))
    )
    assert [verdict.status for verdict in right] == ["agrees"] * 3
    assert {verdict.first for verdict in wrong} == {"output"}


@pytest.mark.parametrize("share", [0, 1e-3])
def test_without_a_mask_the_first_axis_holds_samples(share):
    model = Of(lambda m, x: m.a(x) + share * m.a(x).mean(0), {"a": linear(7, 5)})
    verdicts = dict(batched(prepare(model, None, drawn(3, 7)).reference))
    assert [*verdicts] == [f"sample {sample}" for sample in range(3)]
    assert all(verdict.passed == (not share) for verdict in verdicts.values())
    several = Of(lambda m, x, y: m.a(x) + y.mean(), {"a": linear(7, 5)})
    with pytest.raises(SpecError, match="first axis of all inputs"):
        [*batched(prepare(several, None, (drawn(3, 7), drawn(5))).reference)]


def flat(m, input_ids, attention_mask):
    # Of its outputs, only the parameter has the same shape for one sample and for a batch.
    x = m.token(input_ids) * attention_mask[..., None]
    return {"scale": m.scale * 1.0, "flat": x.reshape(-1, 5)}


@pytest.mark.parametrize("declared", [[], ["output[flat]"]])
def test_what_has_another_shape_in_its_batch_is_not_judged_alone(declared):
    model = Of(flat, {**TOKEN, "scale": parameter(5)})
    for _, verdict in batched(prepare(model, None, texts(), declared=declared).reference):
        assert verdict.passed == bool(declared)  # then that is known, and the looked-up rows are judged
        words = "'output[flat]' has a different shape alone than in its batch"
        assert (f"output[flat] not judged: {words}" in str(verdict)) == (not declared)
        assert verdict.unchecked.endswith(f"left out: {words}")
