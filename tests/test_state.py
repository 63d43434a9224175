import copy
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from concord.conformance.compare import compare, prepare
from concord.spec.errors import SpecError
from tests.toys.kinds import Of, bits, drawn, linear, reordered


def stateful(m, x, box):
    # Keeps state in inputs, in attributes and in parameters.
    x -= x.mean(0)
    box.held.append(m.a(x))
    m.calls, m.seen[:, :5] = getattr(m, "calls", 0) + 1, m.a(x)
    m.list.append(m.a(x))
    if box.trains:
        with torch.no_grad():
            m.a.weight.clamp_(-0.1, 0.1)
            m.a.bias.data.mul_(2)
    return m.seen * m.calls + sum(m.list).sum() + sum(box.held).sum()


def prepared(trains):
    model = Of(stateful, {"a": linear(7, 5)})
    model.seen, model.list = torch.zeros(3, 6), []
    inputs = {"x": drawn(3, 7), "box": SimpleNamespace(held=[], trains=trains)}
    return model, inputs, lambda: bits([*model.parameters()], inputs["x"], model.seen)


@pytest.mark.parametrize("trains", [False, True])
def test_state_is_said_and_put_back(trains):
    model, inputs, snapshot = prepared(trains)
    before = snapshot()
    comparison = prepare(model, reordered(model), inputs)
    comparison.allow_same_bits = False
    assert comparison.verdict().passed
    assert comparison.reference.state == ["calls", "list", "seen", *["a.weight", "a.bias"] * trains]
    assert "state of the reference" in comparison.notes
    assert snapshot() == before
    assert not inputs["box"].held + model.list
    assert not hasattr(model, "calls")


def test_a_model_leaves_the_folder_and_the_default_device_as_they_are(tmp_path, monkeypatch):
    def forward(m, x):
        os.chdir("/")
        return m.a(x)

    monkeypatch.chdir(tmp_path)
    model, x = Of(forward, {"a": linear(7, 5)}), drawn(3, 7)
    with torch.device("meta"):
        (cotangent,) = prepare(model, inputs=x, gradients=True).reference.cotangents.values()
    assert (cotangent.device.type, Path.cwd()) == ("cpu", tmp_path)


def test_a_module_that_the_first_run_builds_is_not_kept():
    def forward(m, x):
        m.late = getattr(m, "late", linear(7, 5)())
        return m.late(x)

    model = Of(forward, {})
    assert "late.weight" in prepare(model, inputs=drawn(3, 7), seed=0).reference.state
    assert not hasattr(model, "late")


def test_a_function_that_changes_what_it_is_given_changes_nothing():
    model, inputs, snapshot = prepared(trains=False)

    def candidate(x):
        with torch.no_grad():
            output = model(torch.from_numpy(x), SimpleNamespace(held=[], trains=False)).numpy()
        x[:] = 0
        return output

    before = snapshot()
    assert compare(model, candidate, inputs).passed
    assert snapshot() == before
    model.a.register_forward_hook(lambda module, args, output: module.bias.data.add_(1))
    with pytest.raises(SpecError, match=r"the candidate changes the reference's a\.bias"):
        compare(model, candidate, inputs)
    assert snapshot() == before


# Buffers after the run.

X = drawn(11, 5)


class ByHand(nn.BatchNorm1d):
    """Computes the same in another order."""

    biased = False

    def forward(self, x):
        mean = x.flip(0).mean(0)
        variance = (x - mean).square().flip(0).mean(0)
        unbiased = variance.detach() * (1 if self.biased else len(x) / (len(x) - 1))
        self.running_mean += self.momentum * (mean.detach() - self.running_mean)
        self.running_var.lerp_(unbiased, self.momentum)
        self.num_batches_tracked += 1
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


class Biased(ByHand):
    biased = True


class Keeping(nn.Module):
    """Keeps a counter and a cache of keys."""

    def __init__(self):
        super().__init__()
        self.start, self.step, self.unit = 2, 1, True
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("keys", torch.zeros(17, 7))
        self.register_buffer("direction", F.normalize(torch.ones(7), dim=0))

    def forward(self, x):
        self.calls += self.step
        self.keys[self.start : self.start + len(x)] = x.detach()
        if self.unit:
            self.direction = F.normalize(x.detach().T @ (x.detach() @ self.direction), dim=0)
        return x


def stage(norm=nn.BatchNorm1d, **settings):
    layers = {"inner": linear(5, 7), "norm": lambda: norm(7), "keep": Keeping, "outer": linear(7, 3)}
    model = Of(lambda m, x: m.outer(m.keep(m.norm(m.inner(x)))), layers).train()
    for name, value in settings.items():
        setattr(model.norm if name == "momentum" else model.keep, name, value)
    return model


WRONG = {
    "momentum": (stage(momentum=0.01), "norm.running_mean", "0.01 instead of 0.1"),
    "variance": (stage(Biased), "norm.running_var", ""),
    "counter": (stage(step=2), "keep.calls", "2 instead of 1"),
    "cache": (stage(start=3), "keep.keys", "3 instead of 2"),
    "vector": (stage(unit=False), "keep.direction", "False instead of True"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_buffers_that_the_reference_changes_are_judged_and_restored(kind):
    port, first, cause = WRONG[kind]
    right, before = stage(), bits(*stage().buffers())
    comparison = prepare(right, stage(ByHand), X, seed=0, gradients=True)
    verdict = comparison.verdict()
    assert verdict.passed, verdict
    assert 0 < verdict.row("buffers.norm.running_var").ratio < 1
    assert "not judged" not in str(comparison.notes)
    wrong = compare(right, port, X, seed=0)
    assert (wrong.first, wrong.row("output").status) == (f"buffers.{first}", "agrees"), wrong
    assert "only buffers diverge" in str(wrong)
    assert cause in str(wrong)
    assert "failed" not in str(wrong)
    assert bits(*right.buffers()) == before == bits(*port.buffers())


def test_buffers_of_a_function_are_judged_if_it_returns_them():
    right = stage()

    def port(x, **others):
        return {"output": copy.deepcopy(right)(torch.from_numpy(x)).detach().numpy(), **others}

    silent = compare(right, port, X, seed=0)
    assert silent.passed
    assert "not judged: norm.num_batches_tracked, " in str(silent)
    assert "all 6 buffers" in str(silent)
    for calls, status in ((4, "agrees"), (5, "diverges")):
        verdict = compare(right, partial(port, **{"buffers.keep.calls": calls}), X, seed=0)
        assert verdict.row("buffers.keep.calls").status == status
    halved = (1 + prepare(right, port, X, seed=0).reference.arrays["buffers.norm.running_var"]) / 2
    stale = compare(right, partial(port, **{"buffers.norm.running_var": halved}), X, seed=0)
    assert "values multiplied by 0.5, measured from those before the run" in str(stale)


def test_a_buffer_under_another_name_is_mapped():
    right, port = (
        Of(lambda m, x, name=name: getattr(m, name)(x), {name: lambda: nn.BatchNorm1d(5)}).train()
        for name in "ab"
    )
    names = {"b": "a", "buffers.b.running_mean": "buffers.a.running_mean"}
    verdict = compare(right, port, X, seed=0, names=names)
    assert verdict.row("buffers.a.running_mean").status == "agrees"
    assert verdict.row("buffers.a.running_var").status == "not exposed"


KEPT, LAST = {}, None


class Remembering(nn.Module):
    """Remembers a table in places that every module of this class shares."""

    base, place = 10.0, "dict"

    def forward(self, x):
        global LAST  # noqa: PLW0603 – as some models do
        if self.place == "global":
            LAST = self.table(x) if LAST is None else LAST
            return x * LAST
        return x * KEPT.setdefault(len(x), self.table(x))

    def table(self, x):
        return torch.cos(torch.arange(5) * self.base + x.new_ones(5))


@pytest.mark.parametrize("place", ["dict", "global"])
def test_what_the_reference_leaves_in_a_global_cache_is_not_the_candidates(place):
    right, wrong = Remembering().eval(), Remembering().eval()
    right.place = wrong.place = place
    wrong.base = 11.0
    assert compare(right, reordered(right), X).passed
    assert compare(right, wrong, X).first == "output"
    assert (KEPT, LAST) == ({}, None)
