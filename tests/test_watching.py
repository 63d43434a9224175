"""What is said of a judgement that takes long."""

import time

import numpy as np

from concord import conformance, spec
from concord.backends import Run
from concord.conformance import watching
from concord.conformance.watching import Countdown, Underway, listening
from concord.spec.arithmetic import Arithmetic
from concord.spec.reference import compute


def test_each_step_says_how_many_are_left_and_how_long_they_take(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    said = []
    with listening(said.append):
        steps = Countdown("work", 7)
    for seconds in (3, 3, 1, 6, 6, 6, 6):
        now[0] += seconds
        steps.step()
    assert said == [
        "work: 2 of 7 runs, about 15 s more",
        "work: 4 of 7 runs, about 10 s more",
        "work: 5 of 7 runs, about 8 s more",
        "work: 6 of 7 runs, about 4 s more",
    ]


def test_a_judgement_says_how_far_it_has_come_and_is_the_same(monkeypatch):
    monkeypatch.setattr(watching, "EVERY", -1.0)
    config = spec.variant(
        "bert", vocab_size=29, d_model=14, num_heads=2, d_ff=17, num_classes=3, num_layers=2, max_positions=13
    )
    weights, batch = spec.initialize(config, 5), spec.example_batch(config, batch=3, tokens=7)
    made = compute(config, weights, batch, Arithmetic("float32"), False, dtype="float32")
    run = Run(
        made.output,
        made.loss,
        {name: np.asarray(tap) for name, tap in made.taps.items()},
        requested=("taps",),
    )
    said = []
    with listening(said.append):
        verdict = conformance.judge(config, weights, batch, run)
    assert verdict.passed
    assert {line.partition(":")[0] for line in said} == {
        "deriving tolerances end to end",
        "deriving tolerances of each step",
    }
    assert all(isinstance(line, Underway) for line in said)
