import copy
import gc
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from concord.backends.wire import WorkerFailure
from concord.conformance.compare import assert_same, compare, prepare
from concord.conformance.compare.module_reference import ModuleReference, is_output
from concord.conformance.judging.estimate import Sigma
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, drawn, linear, reordered

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns about some of these modules

FLOAT8 = torch.float8_e4m3fn
ZEROS = {"output": np.zeros((3, 5), np.float32)}


# Refusals, and whom they blame.


def layer(function):
    return Of(function, {"a": linear(7, 5)})


def weight(**changes):
    model = layer(lambda m, x: m.a(x))
    model.a.weight = nn.Parameter(model.a.weight.to(**changes), requires_grad=False)
    return model


REFUSED = {
    "whole numbers": (
        lambda: layer(lambda m, x: m.a(x).argmax(-1)),
        "returns a tensor of torch.int64 but must",
    ),
    "nothing": (lambda: layer(lambda m, x: None), "returns a value of type NoneType but must"),
    "float8": (lambda: layer(lambda m, x: m.a(x).to(FLOAT8)), "output is of torch.float8_e4m3fn"),
    "float8 weights": (lambda: weight(dtype=FLOAT8), "a.weight of the reference is in torch.float8"),
    "nested": (
        lambda: layer(lambda m, x: torch.nested.as_nested_tensor([m.a(x)[:2], m.a(x)[2:]])),
        "is a nested tensor but",
    ),
    "meta": (lambda: weight(device="meta"), "a.weight of the reference is on the meta device"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5)).eval(), "0.weight of the reference is lazy"),
    "scripted": (lambda: torch.jit.trace(nn.Linear(7, 5).eval(), drawn(3, 7)), "is scripted or traced"),
    "8 bits": (
        lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(7, 5)).eval(), {nn.Linear}),
        "0 of the reference is an 8-bit Linear",
    ),
    "NumPy": (
        lambda: layer(lambda m, x: m.a(torch.from_numpy(np.sin(x.numpy())))),
        r"passed to NumPy, .* \(test_module_reference\.py:\d+\)$",
    ),
    "Python": (
        lambda: layer(lambda m, x: m.a(x).detach().apply_(math.sin)),
        r"passed to Python, .* \(test_module_reference\.py:\d+\)$",
    ),
    "raises": (
        lambda: layer(lambda m, x: m.a(x[:, ["\x1b[31m" + 9000 * "n"]])),
        r"the reference cannot be run .{,700} \(test_module_reference\.py:\d+\)$",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_refused_in_one_line(name):
    make, message = REFUSED[name]
    with pytest.raises(SpecError, match=message) as caught:
        compare(make(), ZEROS, drawn(3, 7))
    (line,) = caught.value.problems
    assert line.isprintable()


class Pair(torch.autograd.Function):
    """Returns two results, one perhaps without gradient, as cuDNN's kernels do."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx, first, second):
        return 2 * first if second is None else 2 * first + 3 * second


@dataclass
class Result:
    hidden: torch.Tensor
    rest: object


def results(m, x):
    # Every type of tensor, in containers of every type.
    y = m.a(x)
    rest = [{1: y, "1": y * 3, (1, 2): None}, torch.complex(y, y * 2), y.to_sparse()]
    return Result(m.pair(m.a(x))[0], rest)


def test_whatever_holds_the_results_they_are_judged():
    model = Of(results, {"a": linear(7, 5), "pair": lambda: Of(lambda _, x: Pair.apply(x), {})})
    x = drawn(3, 7)
    assert_same(model, reordered(model), x, gradients=True)
    wrong = copy.deepcopy(model)
    for parameter in wrong.parameters():
        parameter.data *= 1.001
    arrays = ModuleReference(wrong, args=(x,)).arrays
    outputs = {name: array for name, array in arrays.items() if is_output(name)}
    table = compare(model, outputs, x).table
    assert [row.status for row in table if row.tensor in outputs] == ["diverges"] * 5


def distribution(factor):
    # The shape of a cache: an object that holds a list of objects, and here also itself.
    def function(m, x):
        y = m.a(x)
        cache = SimpleNamespace(layers=[torch.distributions.Normal(y, factor * y.exp())], length=3)
        cache.itself = cache
        return {"y": y, "cache": cache}

    return layer(function)


def test_tensors_of_returned_objects_are_judged_but_need_not_be_returned():
    x = drawn(3, 7)
    assert compare(distribution(1), reordered(distribution(1)), x).passed
    assert compare(distribution(1), distribution(1.01), x).first == "returned[cache.layers.0.scale]"
    verdict = compare(distribution(1), {"output": distribution(1)(x)["y"]}, x)
    assert verdict.passed
    assert "returned[cache.layers.0.loc]" in str(verdict)


def test_a_returned_numpy_array_is_an_output():
    models = [layer(lambda m, x, by=by: (m.a(x), by * m.a(x).detach().numpy())) for by in (1, 2)]
    with pytest.raises(SpecError, match="a tensor is passed to NumPy"):
        compare(*models, drawn(3, 7))


def test_what_torch_export_gives_is_a_reference_and_a_candidate():
    model = nn.Sequential(nn.Linear(7, 5), nn.GELU()).eval()
    exported = torch.export.export(model, (drawn(3, 7),)).module()
    assert compare(exported, reordered(model), drawn(3, 7)).passed
    assert compare(model, exported, drawn(3, 7)).passed


# Shapes and names.


def positions(wide):
    def function(m, x):
        return m.a(x + m.place(torch.arange(5).expand(len(x) if wide else 1, 5)))

    return Of(function, {"place": lambda: nn.Embedding(5, 7), "a": linear(7, 3)})


def test_an_activation_of_another_shape_is_left_out_and_said():
    right, other, x = positions(True), positions(False), drawn(2, 5, 7)
    verdict = compare(right, other, x, gradients=True)
    assert verdict.passed
    assert "left out: 'place' has shape (1, 5, 7) but must be (2, 5, 7)" in str(verdict)
    other.a.bias.data += 0.1
    assert compare(right, other, x).first == "a"


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(WorkerFailure, match=r"'output' has shape \(3, 4\) but must be \(3, 5\)"):
        compare(layer(lambda m, x: m.a(x)), layer(lambda m, x: m.a(x)[:, 1:]), drawn(3, 7))


def test_names_are_legible_and_short_in_a_verdict():
    key = "\x1b[31m" + 9000 * "n"

    def of(factor):
        model = layer(lambda m, x: {key: getattr(m, "\x1b[2J")(m.a(x)) * factor, "k" * 9000: x * factor})
        model.add_module("\x1b[2J", nn.Identity())
        return model

    text = str(compare(of(1.0), of(1.1), drawn(3, 7)))
    assert all(line.isprintable() and len(line) < 1100 for line in text.splitlines())
    assert not any(len(word) > 200 for word in text.split())


# Inputs.


class Scaled(nn.Module):
    config = SimpleNamespace(image_size=5, vocab_size=7, vision_config=SimpleNamespace(num_channels=2))

    def forward(self, pixel_values, input_values=None, input_ids=None):
        return 2.5 * pixel_values


def test_standard_inputs_follow_what_a_module_takes_and_states():
    inputs = prepare(Scaled().eval()).reference.inputs
    shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    assert shapes == {"input_ids": (3, 11), "pixel_values": (3, 2, 5, 5), "input_values": (3, 5003)}


# Devices.


class Leaving(Exception):
    """A tensor left its device."""


def test_no_tensor_leaves_its_device_within_a_run(monkeypatch):
    # A GPU would wait at each transfer, and a large model may not fit into host memory.
    running, compute = [], ModuleReference.compute

    def watched(*arguments, **named):
        running.append(True)
        compute(*arguments, **named)
        running.clear()

    def refusing(leave):
        def refuse(tensor, *arguments, **named):
            if running and tensor.numel() > 1:
                raise Leaving(tuple(tensor.shape))
            return leave(tensor, *arguments, **named)

        return refuse

    for name in ("numpy", "cpu", "tolist", "item", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, refusing(getattr(torch.Tensor, name)))
    monkeypatch.setattr(ModuleReference, "compute", watched)
    encoder = nn.TransformerEncoderLayer(13, 1, 31, batch_first=True, norm_first=True).eval()
    comparison = prepare(encoder, encoder, drawn(3, 7, 13), gradients=True)
    comparison.allow_same_bits = False
    assert comparison.verdict().passed


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_overflow_excuses_neither_its_row_nor_most_of_a_tensor():
    # In a low-precision run an overflowed element has an infinite error.

    def cubed(size, sign):
        return Of(lambda m, x: sign * (size * m.a(x)) ** 3, {"a": linear(13, 7)}).half()

    def status(size):
        comparison = prepare(cubed(size, 1), cubed(size, 1), x)
        comparison.allow_same_bits = False
        return comparison.verdict().status

    x = drawn(3, 13).half()
    values = cubed(60, 1)(x)
    assert 0 < values.isinf().sum() < values.numel() / 2
    assert values.isinf().any(-1).all()
    assert status(60) == "agrees"
    wrong = compare(cubed(60, 1), cubed(60, -1), x)
    assert wrong.first == "output"
    assert wrong.first_divergence.deciding.beyond > values.numel() / 4
    assert status(600) == "undetermined"


def test_a_weight_is_widened_where_it_is_used_and_put_back():
    class Halving(nn.Linear):
        def forward(self, x):
            self.weight.data.mul_(0.5)
            self.weight.data[0].add_(1)
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Halving(7, 5).eval(), drawn(3, 7)
    before = model.weight.detach().clone()
    right = before.double() * 0.5
    right[0] += 1
    right = (x.double() @ right.T + model.bias.double()).detach().numpy()
    value = prepare(model, None, x).reference.compute_exactly(lambda _: None)["output"]
    assert abs(value - right).max() < 2**-40
    assert torch.equal(model.weight, before)


def test_a_comparison_with_gradients_leaves_nothing_in_memory():
    def sigmas():
        gc.collect()
        return [entry for entry in gc.get_objects() if type(entry) is Sigma]

    before = len(sigmas())
    model = layer(lambda m, x: m.a(x).relu())
    assert compare(model, reordered(model), drawn(3, 7), gradients=True).passed
    assert len(sigmas()) == before  # the graph of a backward pass refers to them by its hooks


def test_a_module_may_differentiate_with_respect_to_its_own_weights():
    # Such as a layer that learns while it is tested.
    def adapted(m, x):
        with torch.enable_grad():
            loss = m.a(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, m.a.weight, create_graph=True)
        return torch.nn.functional.linear(x, m.a.weight - gradient, m.a.bias)

    model = layer(adapted)
    assert_same(model, reordered(model), drawn(3, 7))


@pytest.mark.parametrize("factor", [2, 3.1])
def test_a_module_that_tells_exact_arithmetic_apart_is_refused(factor):
    # Otherwise a right candidate would be blamed for the branch that only the exact run takes.
    model = layer(lambda m, x: m.a(x) * (2 if type(m.a(x)) is torch.Tensor else 3))
    port = layer(lambda m, x: factor * m.a(x))
    if factor == 2:
        with pytest.raises(SpecError, match="output of the reference itself differs"):
            compare(model, reordered(port), drawn(3, 7))
    else:
        assert compare(model, port, drawn(3, 7)).first == "output"
