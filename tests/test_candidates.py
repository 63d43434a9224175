"""Candidates as they run: what is judged is the user's program, and none passes by ending its process."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys import endings

X = torch.linspace(-1, 1, 35).reshape(7, 5)


def some_of(every, *quick):
    """Return all of several, as parameters of a test; all but a few are slow."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in every]


@pytest.mark.parametrize("time", [1, 2, 5])
def test_a_reference_that_ends_the_process_is_refused_whenever_it_does(time):
    other = {"output": np.zeros((7, 3), np.float32)}
    with pytest.raises(SpecError, match=r"the reference .* SystemExit: 0"):
        compare(endings.Leaving(time).eval(), other, X)


@pytest.mark.parametrize("candidate", [endings.leaving(), lambda *x: endings.leaves(), endings.raises])
def test_a_candidate_that_ends_the_process_is_refused(candidate):
    with pytest.raises(SpecError, match=r"the candidate .*: (SystemExit: 0|\w+Error: )"):
        compare(endings.linear(), candidate, {"input": X})


ENDS = {
    "leaves": (2, "endings:leaves gave no result: SystemExit: 0"),
    "leaves_with_words": (2, "endings:leaves_with_words gave no result: SystemExit: enough"),
    "raises": (2, "endings:raises gave no result: KeyError: 'no such layer'"),
    "dies": (3, "endings:dies gave no result: killed by SIGKILL"),
    "dies_without_a_word": (3, "endings:dies_without_a_word gave no result: exit code 0"),
}


@pytest.mark.parametrize("end", some_of(ENDS, "leaves", "dies"))
def test_the_command_ends_as_its_candidate_does(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(
        f"compare tests.toys.endings:linear tests.toys.endings:{end}",
        *("--inputs", tmp_path / "inputs.safetensors"),
    )
    expected, words = ENDS[end]
    assert (code, len(lines)) == (expected, 1)
    assert words in lines[0]


@pytest.mark.parametrize("end", ["leaving", "leaves_where_it_is_built", "linears"])
def test_the_command_refuses_a_reference_that_ends_it_or_cannot_be_built(end, invoke, tmp_path):
    save_file({"input": X.numpy()}, tmp_path / "inputs.safetensors")
    code, _, lines = invoke(f"compare tests.toys.endings:{end}", "--inputs", tmp_path / "inputs.safetensors")
    assert (code, len(lines)) == (2, 1)
    assert any(words in lines[0] for words in ("SystemExit: 0", "AttributeError: "))


# What is compiled.


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm, self.outer = nn.Linear(5, 11), nn.LayerNorm(11), nn.Linear(11, 3)

    def body(self, x):
        return self.outer(F.gelu(self.norm(self.inner(x))))

    def forward(self, x):
        return self.body(x)


class Within(nn.Module):
    """A network with another in it."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        torch.manual_seed(2)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.net(x))


def right(graph, _):
    return graph


def wrong_where_it_fuses(graph, _):
    """Return a program that is wrong if a norm and an activation stand in one graph."""
    called = [str(node.target) for node in graph.graph.nodes]
    factor = 1.01 if all(any(name in one for one in called) for name in ("layer_norm", "gelu")) else 1.0
    return lambda *given: [
        factor * one if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in graph(*given)
    ]


def compiled(backend):
    return torch.compile(Net(), backend=backend).eval()


def compiled_whole(backend):
    return torch.compile(Net(), backend=backend, fullgraph=True).eval()


def compiled_in_place(backend):
    net = Net().eval()
    net.compile(backend=backend)
    return net


def compiled_method(backend):
    net = Net().eval()
    net.body = torch.compile(net.body, backend=backend)
    return net


def compiled_part(backend):
    return Within(torch.compile(Net(), backend=backend)).eval()


def part_compiled_in_place(backend):
    net = Net()
    net.compile(backend=backend)
    return Within(net).eval()


COMPILED = [
    compiled,
    compiled_whole,
    compiled_in_place,
    compiled_method,
    compiled_part,
    part_compiled_in_place,
]


@pytest.mark.parametrize("gradients", some_of([False, True], True))
@pytest.mark.parametrize("make", some_of(COMPILED, compiled, part_compiled_in_place))
def test_a_program_is_judged_as_its_compiler_made_it(make, gradients):
    reference = Within(Net()).eval() if "part" in make.__name__ else Net().eval()
    agrees = prepare(reference, make(right), {"x": X}, gradients=gradients).verdict()
    assert agrees.passed
    comparison = prepare(reference, wrong := make(wrong_where_it_fuses), {"x": X}, gradients=gradients)
    verdict = comparison.verdict()
    assert (verdict.status, verdict.first) == ("diverges", "output")
    assert not any("_orig_mod" in name for name in comparison.tensors)
    if make is not compiled_whole:
        assert not agrees.unchecked
        assert {row.status for row in verdict.table if row.tensor.endswith("norm")} <= {"agrees"}
        assert "no activation diverges" in str(verdict)
    assert compare(wrong, reference, {"x": X}, gradients=gradients).passed  # what is right is what it says


def test_a_program_is_judged_alike_whenever_it_is():
    """What was compiled for the activations of one comparison is not what the next one judges."""
    wrong = compiled(wrong_where_it_fuses)
    assert [compare(Net().eval(), wrong, {"x": X}).first for _ in range(2)] == ["output"] * 2


def scripted():
    return torch.jit.script(Net().eval())


def traced():
    return torch.jit.trace(Net().eval(), X)


def scripted_part():
    net = Net().eval()
    net.norm = torch.jit.script(net.norm)
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", [scripted, traced, scripted_part])
def test_a_scripted_module_is_judged_as_it_is(make):
    assert compare(Net().eval(), make(), {"x": X}).passed
    wrong = make()
    with torch.no_grad():
        wrong.outer.bias += 0.01
    assert compare(Net().eval(), wrong, {"x": X}).first in ("outer", "output")


class Shy(Net):
    """Computes otherwise where somebody looks at it."""

    def body(self, x):
        return super().body(x) * (1.0 if self.norm._forward_hooks else 1.01)


def test_a_module_that_computes_otherwise_under_hooks_is_judged_without():
    assert compare(Net().eval(), Shy().eval(), {"x": X}).first == "output"


class Branching(Net):
    """Computes otherwise where it is compiled."""

    def body(self, x):
        return super().body(x) * (1.01 if torch.compiler.is_compiling() else 1.0)


def test_a_way_that_compiles_to_something_else_diverges(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert compare(Branching().eval(), way="compile", inputs={"x": X}).first == "output"


# What draws random numbers.


def own_generator():
    generator = torch.Generator().manual_seed(7)
    return lambda x: x + torch.randn(x.shape, generator=generator)


def sown_anew(x):
    return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(7))


def written_in_place(x):
    return x + torch.empty_like(x).uniform_(-1, 1)


def attended(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]


def normal_about(x):
    return torch.normal(x, 0.5)


def picked(x):
    return x[torch.multinomial(torch.softmax(x[:, 0], 0), len(x), replacement=True)]


DRAWING = {
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randint": lambda x: x * torch.randint(1, 9, (len(x), 1)),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.3)),
    "native_dropout": lambda x: torch.native_dropout(x, 0.25, True)[0],
    "uniform_": written_in_place,
    "normal": normal_about,
    "gumbel": F.gumbel_softmax,
    "multinomial": picked,
    "randperm": lambda x: x[torch.randperm(len(x))],
    "attention": attended,
}


class Drawing(Net):
    """Hands what is inside to a function, and goes on with what that gives."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def body(self, x):
        return self.outer(self.function(self.norm(self.inner(x))))


def biased(function):
    model = Drawing(function).eval()
    with torch.no_grad():
        model.outer.bias += 0.1
    return model


@pytest.mark.parametrize("kind", some_of(DRAWING, "dropout", "native_dropout", "normal", "attention"))
def test_a_reference_that_draws_is_refused_and_judged_by_a_seed(kind):
    function = DRAWING[kind]
    with pytest.raises(SpecError, match=r"reference draws random numbers.* \(test_candidates\.py:\d+\)"):
        compare(Drawing(function).eval(), biased(function), {"x": X})
    right, other, wrong = Drawing(function).eval(), Drawing(function).eval(), biased(function)
    state = torch.get_rng_state()
    comparison = prepare(right, other, {"x": X}, seed=5)
    comparison.again = False  # the arithmetics draw what the runs drew
    assert comparison.verdict().passed
    assert compare(right, wrong, {"x": X}, seed=5).first == "outer"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_in_training_is_judged_by_a_seed_with_its_gradients():
    model = nn.Sequential(nn.Linear(5, 11), nn.Dropout(0.3), nn.Linear(11, 3))
    with pytest.raises(SpecError, match="is in training mode"):
        compare(model, model, X)
    comparison = prepare(model, model, X, gradients=True, seed=3)
    comparison.again = False
    assert comparison.verdict().passed


def counted():
    calls = []
    return lambda x: calls.append(x) or x + 0.01 * len(calls)


def drawn_by_numpy(x):
    return x + torch.from_numpy(np.random.rand(*x.shape)).float()


def drawn_by_python(x):
    return x * random.random()


@pytest.mark.parametrize("function", [counted(), own_generator(), drawn_by_numpy, drawn_by_python])
def test_a_reference_that_gives_something_else_each_time_is_refused(function):
    said = (
        r"draws random numbers.* randn"
        if "generator" in str(function)
        else r"something else .* first at outer"
    )
    with pytest.raises(SpecError, match=said):
        compare(Drawing(function).eval(), biased(function), {"x": X})


@pytest.mark.parametrize("function", [drawn_by_numpy, drawn_by_python])
def test_a_seed_reaches_other_generators(function):
    assert compare(Drawing(function).eval(), Drawing(function).eval(), {"x": X}, seed=5).passed
    assert compare(Drawing(function).eval(), biased(function), {"x": X}, seed=5).first == "outer"


@pytest.mark.parametrize(
    "function", [sown_anew, partial(F.dropout, p=0.0), partial(F.dropout, p=0.5, training=False)]
)
def test_what_draws_the_same_each_time_is_judged_as_it_is(function):
    assert compare(Drawing(function).eval(), Drawing(function).eval(), {"x": X}).passed
    assert compare(Drawing(function).eval(), biased(function), {"x": X}).first == "outer"


@pytest.mark.parametrize("kind", ["dropout", "rand_like"])
def test_a_candidate_that_gives_something_else_each_time_does_not_agree(kind):
    """Even where what it drew lies within the tolerance."""
    right, noisy = Drawing(lambda x: x).eval(), Drawing(DRAWING[kind]).eval()
    assert compare(right, noisy, {"x": X}).status == "diverges"
    comparison = prepare(right, noisy, {"x": X})
    comparison.tensors = prepare(right, right, {"x": X}).tensors
    verdict = comparison.verdict()
    assert verdict.status == "undetermined"
    assert "the candidate gives something else each time: " in str(verdict)


def test_a_function_that_draws_does_not_agree():
    model = Drawing(lambda x: x).eval()

    def run(x):
        with torch.no_grad():
            return {"output": model(torch.from_numpy(x)).numpy() + 1e-9 * np.random.rand()}

    assert compare(model, run, {"x": X}).passed  # what it draws does not show
    assert compare(model, lambda x: run(x)["output"] + np.random.rand(), {"x": X}).status == "diverges"


# What a candidate does to the reference, and what PyTorch does beside its modules.


def test_a_candidate_that_changes_the_reference_is_refused():
    model = Net().eval()

    def run(x):
        with torch.no_grad():
            model.outer.weight.mul_(1.01)
            return model(torch.from_numpy(x)).numpy()

    with pytest.raises(SpecError, match=r"the candidate changes the reference's outer\.weight: "):
        compare(model, run, {"x": X})


@pytest.mark.parametrize("cut_off", ["reference", "candidate"])
def test_a_branch_whose_gradient_is_cut_off_diverges(cut_off):
    class Branching(Net):
        def body(self, x):
            norm = self.norm(self.inner(x))
            return self.outer(norm.detach() if self.cut_off else norm) + self.outer(x.new_ones(11))

    right, port = Branching().eval(), Branching().eval()
    right.cut_off, port.cut_off = cut_off == "reference", cut_off == "candidate"
    verdict = compare(right, port, {"x": X}, gradients=True)
    assert verdict.first.startswith("gradients.")
    assert verdict.row("gradients.inner.weight").status == "diverges"


class Padded(nn.Module):
    """PyTorch's encoder, whose fast path returns zeros for padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(12, 2, 19, batch_first=True)
        self.encoder, self.outer = nn.TransformerEncoder(layer, 1), nn.Linear(12, 3)

    def forward(self, x, padding):
        return self.outer(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_an_encoder_is_judged_where_it_is_taken():
    inputs = {"x": torch.randn(3, 7, 12), "padding": torch.arange(7) >= torch.tensor([[7], [3], [5]])}
    right, port = Padded().eval(), Padded().eval()
    with torch.no_grad():
        port.encoder.layers[0].linear1.bias += 1e-8  # other bits
    comparison = prepare(right, port, inputs)
    assert comparison.verdict().passed
    assert comparison.whole == {"output"}
    comparison.tensors["output"][1, 4] += 1e-3  # in padding
    assert comparison.verdict().first == "output"
