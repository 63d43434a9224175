"""Names of a candidate's tensors: as patterns say, or by what they hold."""

import pytest

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.modules import Fused, activations, encoder, texts


def test_names_are_mapped_by_patterns():
    inputs = texts()
    arrays = activations(encoder(Fused), inputs)
    foreign = {
        f"blocks/{i}/{own}": arrays[f"layers.{i}.{theirs}"]
        for i in range(2)
        for own, theirs in (("ln_1", "norm1"), ("attn", "attention.output"))
    }
    names = {"blocks/{i}/ln_1": "layers.{i}.norm1", "blocks/{i}/attn": "layers.{i}.attention.output"}
    verdict = compare(encoder(), foreign, inputs, names=names, declared=["output"])
    assert verdict.passed
    assert sum(row.status == "agrees" for row in verdict.table) == 4


def test_names_are_proposed_by_what_tensors_hold():
    """Heads that the candidate splits off are joined, and a bug keeps no tensor from its name."""
    inputs, query = texts(), "layers.0.attention.query"
    arrays = activations(encoder(), inputs)
    split = arrays[query].reshape(3, 7, 2, 6).transpose(0, 2, 1, 3)
    foreign = {"last": arrays["layers.1"] + 0.01, "q": split}
    made = prepare(encoder(), foreign, inputs)
    assert made.proposed == {"last": "layers.1", "q": f"{query} : 0 2 1 3"}
    with pytest.raises(SpecError, match=r"such as last = layers\.1, q = "):
        made.verdict()
    assert compare(encoder(), foreign, inputs, names=made.proposed).first == "layers.1"
    with pytest.raises(SpecError, match=r"'q' has shape .* of which '0 1' makes no \(3, 7, 12\)"):
        prepare(encoder(), foreign, inputs, names={"q": f"{query} : 0 1"})
