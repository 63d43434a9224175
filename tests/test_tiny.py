"""Concord in one sitting: two ways in, a bug and its cause, a right run, and a ported checkpoint."""

import copy

import numpy as np
import torch
from torch import nn

from concord import backends, compare, conformance, porting, spec
from tests.toys.checkpoints import CONFIG, WEIGHTS

INPUTS = {"input": torch.linspace(-2, 2, 5 * 7).reshape(5, 7)}


def classifier(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 11), activation, nn.Linear(11, 3)).eval()


def test_a_right_port_agrees_though_its_bits_differ():
    model = classifier(nn.GELU())
    wide = copy.deepcopy(model).double()
    port = {"output": wide(INPUTS["input"].double()).detach().float().numpy()}
    verdict = compare(model, port, INPUTS)
    assert verdict.status == "agrees"
    assert verdict.worst < 1


def test_a_wrong_port_is_found_at_its_tensor_and_its_bug_named():
    verdict = compare(classifier(nn.GELU()), classifier(nn.GELU(approximate="tanh")), INPUTS)
    assert (verdict.status, verdict.first) == ("diverges", "1")
    assert verdict.worst > 10
    assert "tanh" in verdict.explained().cause.text


def test_a_member_of_the_family_is_judged_and_its_bug_named():
    config = spec.variant("bert", vocab_size=23, d_model=14, num_heads=2, d_ff=17, num_layers=1)
    weights, batch = spec.initialize(config), spec.example_batch(config, 3, 7)
    with backends.open("tests.toys.numpy_backend:NumpyBackend") as worker:
        right = worker.run(config, weights, batch)
        wrong = worker.run(config.replace(activation="gelu_tanh"), weights, batch)
    assert conformance.judge(config, weights, batch, right).passed
    verdict = conformance.judge(config, weights, batch, wrong)
    assert verdict.first == "layers.0.feed_forward.activation"
    assert verdict.explained().cause.hypothesis == "activation"


def test_a_checkpoint_comes_back_from_another_format_as_it_was(tmp_path):
    porting.write(porting.from_weights(CONFIG, WEIGHTS), tmp_path / "bert", "hugging-face")
    porting.write(porting.read(tmp_path / "bert"), tmp_path / "flax", "hugging-face-flax")
    weights = porting.read(tmp_path / "flax").weights()
    assert all(np.array_equal(weights[name], array) for name, array in WEIGHTS.items())
