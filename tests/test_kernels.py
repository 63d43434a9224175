"""Kernels with larger errors than their operations, also on an NVIDIA H200 (folder `h200`)."""

import copy
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn
from torch.nn import functional as F

from concord.conformance.compare import compare, module_explanation, prepare
from concord.conformance.compare.kernels import CUDNN_RECURRENT, CUDNN_WINOGRAD_9X9, FAST_CONVOLUTION, KERNELS
from concord.spec.precision import round_to_bits
from tests.toys.kinds import Of, conv, drawn, linear

H200 = Path(__file__).parent / "h200"
FAST = f"computed by {KERNELS[FAST_CONVOLUTION].text}"


# Fast convolutions with stride 1: x (N, C, H, W), weights (O, C, 3, 3).


def winograd(x, weight):
    # Tiles of 4 by 4 outputs, by the Toom-Cook construction for 3 taps.
    points = (0, 1, -1, 2, -2)

    def powers(count):
        return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1]])

    size = np.array([*(np.prod([a - b for b in points if b != a]) for a in points), 1.0])[:, None]
    inputs = np.linalg.inv(powers(6)).T * size
    a, g, b = (torch.tensor(x).float() for x in (powers(4), powers(3) / size, inputs))
    tiles = F.pad(x, (1, 1 + -x.shape[-1] % 4) * 2).unfold(2, 6, 4).unfold(3, 6, 4)
    products = torch.einsum("ncijab,ocab->noijab", b @ tiles @ b.T, g @ weight @ g.T)
    y = a.T @ products @ a
    plane = y.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(2, 3)
    return plane[:, :, : x.shape[2], : x.shape[3]]


def network(function, taps=3):
    def convolution(inputs, outputs):
        layers = {
            "weight": lambda: nn.Parameter(torch.randn(outputs, inputs, taps, taps) / 7),
            "bias": lambda: nn.Parameter(torch.randn(outputs, 1, 1)),
        }
        return Of(lambda m, x: function(x, m.weight) + m.bias, layers)

    return nn.Sequential(convolution(5, 11), nn.ReLU(), convolution(11, 7)).eval()


def direct(x, weight):
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2)


def image():
    # Half of each image is black. There a convolution is exactly its bias.
    x = drawn(2, 5, 11, 11)
    x[:, :, :, :5] = 0
    return {"input": x}


def test_a_fast_convolution_is_right_and_is_said():
    verdict = compare(network(direct), network(winograd), image(), gradients=True)
    assert verdict.status == "agrees", str(verdict)
    assert verdict.worst < 0.9
    assert verdict.row("0").note == FAST  # a convolution as written has no error where the image is black
    assert FAST in str(verdict)


def tf32(x, weight):
    return direct(*(torch.from_numpy(round_to_bits(t.detach().numpy(), 11)) for t in (x, weight)))


def constant(x, weight):
    # A constant of the transform that is right to four digits only.
    return winograd(x * (1 + 5e-5), weight)


@pytest.mark.parametrize("wrong", [tf32, constant])
def test_an_error_beyond_what_fast_convolutions_make_is_found(wrong):
    verdict = compare(network(direct), network(wrong), image())
    assert verdict.first == "0"
    assert not verdict.cause or verdict.cause.hypothesis not in KERNELS


# Named kernels.


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_a_gradient_by_winograd_9x9_is_named_and_may_be_declared(factor):
    right, inputs = network(direct, 5), {"input": drawn(2, 5, 13, 13)}
    # As arrays, which do not say where they were computed.
    run = prepare(network(direct, 5), inputs=inputs, gradients=True).tensors
    for name in ("gradients.0.weight", "gradients.2.weight"):
        gradient = torch.from_numpy(run[name])
        error = 3e-4 * gradient.square().mean().sqrt() * drawn(*gradient.shape)
        run[name] = (factor * (gradient + error)).numpy()
    verdict = compare(right, run, inputs, gradients=True).explained()
    assert verdict.first == "gradients.2.weight"
    named = verdict.cause.hypothesis if verdict.cause else ""
    assert (named == CUDNN_WINOGRAD_9X9) is (factor == 1)
    declared = compare(right, run, inputs, gradients=True, declared=[CUDNN_WINOGRAD_9X9])
    assert (declared.status == "agrees") is (factor == 1)
    assert KERNELS[CUDNN_WINOGRAD_9X9].text in str(declared)


class Lstm(nn.Module):
    """The model that ran on the H200."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(211, 64)
        self.lstm = nn.LSTM(64, 96, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(192, 5)

    def forward(self, input_ids):
        return self.head(self.lstm(self.embed(input_ids))[0])


def recurrent():
    torch.manual_seed(0)
    model, generator = Lstm().eval(), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    ids = torch.randint(1, 211, (4, 37), generator=torch.Generator().manual_seed(0))
    ids[1, 23:] = 0
    return model, {"input_ids": ids[:2]}


def test_an_lstm_of_cudnn_agrees_where_it_is_declared():
    model, inputs = recurrent()
    run = load_file(H200 / "lstm.float32.safetensors")
    verdict = compare(model, run, inputs, declared=[CUDNN_RECURRENT])
    assert verdict.status == "agrees"
    assert verdict.worst < 0.6
    assert "declared: cuDNN's recurrent kernels" in str(verdict)


def lstm(forward=lambda m, x: m.lstm(x)[0]):
    return Of(forward, {"lstm": lambda: nn.LSTM(5, 7, batch_first=True)})


def rough(function, share):
    # With errors like those of an approximation.
    return lambda x: (y := function(x)) * (1 + share * torch.cos(1e3 * y))


def by_steps(x, share=4e-6, order=(0, 1, 2, 3), tanh=torch.tanh):
    # An LSTM whose tanh and sigmoid are approximated as a kernel may do it.
    own = {name: p.detach().double() for name, p in lstm().lstm.named_parameters()}
    tanh, sigmoid = rough(tanh, share), rough(torch.sigmoid, share)
    x, h, c = torch.from_numpy(x).double(), torch.zeros(1, 7).double(), torch.zeros(1, 7).double()
    outputs = []
    for step in x.unbind(1):
        product = step @ own["weight_ih_l0"].T + h @ own["weight_hh_l0"].T
        gates = (product + own["bias_ih_l0"] + own["bias_hh_l0"]).chunk(4, -1)
        i, f, g, o = (gates[place] for place in order)
        c = sigmoid(f) * c + sigmoid(i) * tanh(g)
        h = sigmoid(o) * tanh(c)
        outputs.append(h)
    y = torch.stack(outputs, 1).float().numpy()
    return {"lstm[0]": y, "output": y}


def test_approximations_of_tanh_are_named_and_may_be_declared():
    inputs = {"x": drawn(3, 2, 5)}
    verdict = compare(lstm(), by_steps, inputs).explained()
    assert verdict.first == "lstm[0]"
    assert verdict.cause.hypothesis == CUDNN_RECURRENT
    assert "torch.backends.cudnn.enabled = False" in str(verdict)
    declared = compare(lstm(), by_steps, inputs, declared=[CUDNN_RECURRENT])
    assert declared.status == "agrees"


def pade(x):
    return x * (27 + x * x) / (27 + 9 * x * x)


@pytest.mark.parametrize(
    "bug", [{"share": 1e-4}, {"order": (0, 2, 1, 3)}, {"tanh": pade}], ids=lambda bug: next(iter(bug))
)
def test_a_bug_of_an_lstm_is_no_kernel(bug):
    inputs = {"x": drawn(3, 2, 5)}
    verdict = compare(lstm(), lambda x: by_steps(x, **bug), inputs, declared=[CUDNN_RECURRENT])
    assert verdict.first == "lstm[0]"


def test_a_module_on_the_cpu_ran_no_kernel_of_cudnn(monkeypatch):
    monkeypatch.setattr(module_explanation, "find_cause", lambda *arguments: None)  # takes seconds
    rough = lstm(lambda m, x: torch.from_numpy(by_steps(x.numpy())["output"]))
    assert "cuDNN" not in str(compare(lstm(), rough, {"x": drawn(3, 2, 5)}))


# Gradients of weights, given what flowed back in the run itself.


@pytest.mark.parametrize(
    ("file", "layer", "fast"),
    [
        ("convolution", conv(11, 13, 3, padding=1, bias=False), True),
        ("product", linear(64, 64, bias=False), False),
    ],
)
def test_a_gradient_of_weights_of_a_gpu_agrees(file, layer, fast):
    run = load_file(H200 / f"{file}.safetensors")
    kind = "conv" if file == "convolution" else "linear"
    torch.manual_seed(3)
    model = nn.Sequential(OrderedDict({kind: layer(), "tanh": nn.Tanh()}))
    inputs = {"input": torch.from_numpy(run.pop("x"))}
    run[kind] = model[0](inputs["input"]).detach().numpy()
    judged = compare(model.eval(), run, inputs, gradients=True).row(f"gradients.{kind}.weight")
    assert judged.status == "agrees"
    assert (judged.note == FAST) is fast
    run[f"gradients.{kind}.weight"] *= 1 + 2**-11
    assert compare(model, run, inputs, gradients=True).row(f"gradients.{kind}.weight").status == "diverges"


def test_a_small_bug_in_arrays_is_not_taken_for_a_kernel():
    # TF32 allows 4,096 times the error of float32, so that it explains a tanh GELU behind a product too.
    def net(form):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(24, 37), nn.GELU(form), nn.Linear(37, 11)).eval()

    x = drawn(5, 24)
    verdict = compare(net("none"), {"output": net("tanh")(x).detach().numpy()}, x).explained()
    assert "tanh GELU instead of erf GELU" in verdict.cause.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arrays_of_a_half_precision_are_told_from_a_bug_of_its_size(dtype, monkeypatch):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(13, 31), nn.LayerNorm(31), nn.GELU(), nn.Linear(31, 7)).eval()
    x, lower, wrong = drawn(11, 13), copy.deepcopy(model).to(dtype), copy.deepcopy(model)
    wrong[3].bias.data *= 1 + torch.finfo(dtype).eps
    for candidate, named in ((lower, True), (wrong, False)):
        arrays = {"output": candidate(x.to(candidate[0].weight.dtype)).float().detach().numpy()}
        verdict = compare(model, arrays, x).explained()
        assert verdict.status == "diverges"
        assert (f"may be explained by arithmetic in {str(dtype)[6:]}" in str(verdict)) == named
    for limit in ("LONGEST", "LATER"):  # judging in another precision also has a limit
        monkeypatch.setattr(module_explanation, limit, 0.0)
    arrays = {"output": lower(x.to(dtype)).float().detach().numpy()}
    assert "the search for a cause was cut short" in str(verdict := compare(model, arrays, x).explained())
    assert verdict.cause is None


@pytest.mark.parametrize("truly", [True, False])
def test_arrays_are_said_to_be_of_tf32_only_if_its_factors_reproduce_them(truly):
    right, inputs = network(direct), image()
    # An error that TF32 would cover at the output.
    wrong = network(tf32) if truly else Of(lambda m, input: (y := right(input)) * (1 + 1e-4 * y.sin()), {})
    verdict = compare(right, {"output": wrong(**inputs).detach().numpy()}, inputs).explained()
    assert verdict.status == "diverges"
    assert ("TF32" in str(verdict)) is truly, verdict
