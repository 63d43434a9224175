"""Lockstep in the four frameworks, in their workers, and what the command says of backends that are wrong."""

import json
from contextlib import nullcontext

import pytest

from concord import backends
from concord.conformance.campaign import Setup
from concord.conformance.lockstep.cases import example, standard
from concord.conformance.lockstep.outcome import MODES
from concord.conformance.lockstep.running import conduct
from concord.spec.training.recipe import Recipe
from tests.test_lockstep import ADAMW
from tests.test_lockstep import CONFIG as SMALL
from tests.toys.surroundings import options, toy

CONFIG = SMALL.replace(d_ff=11)
"""Of the sizes of the runs of training bugs: what JAX has compiled serves both."""

RECIPE = Recipe(**ADAMW)


class OneWorker(Setup):
    """The setup by which the worker of a test is opened, and stays open."""

    def __init__(self, worker):
        super().__init__(asked=(worker.name,), threads=1)
        object.__setattr__(self, "open", lambda name, opened=None: nullcontext(worker))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_backend_agrees_in_lockstep(worker, mode, dtype):
    found = conduct(
        example(CONFIG, RECIPE, 4, batch=2, tokens=5, seed=1, dtype=dtype),
        [worker.name],
        OneWorker(worker),
        mode,
    )
    (track,) = found.tracks
    assert (track.status, track.steps, track.detail) == ("agrees", 4, ""), track.first
    sections = "losses gradients norm clipped rate moments parameters"
    assert {curve.section for curve in track.curves} == {*sections.split()}
    assert found.exit_code == 0


def test_command_says_what_is_wrong_with_each_backend(entered, tmp_path):
    fields = (
        "d_model=6 num_heads=2 d_ff=5 num_layers=1 vocab_size=17 max_positions=7 schedule=linear "
        "warmup_steps=3 total_steps=7 learning_rate=0.01 accumulation=2 algorithm=adam weight_decay=0.1 "
        "decay_form=times_rate"
    )
    named = [toy("Late", "stepping"), toy("Decaying", "stepping"), toy("NumpyBackend"), "nowhere.at_all:Its"]
    output, _ = entered(
        f"train --lockstep --variant nndl-paddle --steps 3 --tokens 5 --json {tmp_path / 'found.json'}",
        *options("--set", [*fields.split(), 'undecayed=["bias", "gamma", "beta"]']),
        *options("--backend", named),
        ends=1,
    )
    assert "diverges first at step 3, parameters." in output
    assert "undecayed = " in output
    data = json.loads((tmp_path / "found.json").read_text())
    assert (data["kind"], data["exit_code"], data["mode"]) == ("lockstep", 1, "resynchronised")
    late, _, numpy, nowhere = data["tracks"]
    assert late["first"]["step"] == 2
    assert (numpy["status"], nowhere["status"]) == ("unsupported", "missing")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [*((MODES[0], seed) for seed in range(20)), (MODES[1], 0)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_standard_case_raises_no_false_alarm(dtype, mode, seed):
    names = backends.BUILT_IN
    found = conduct(
        standard(seed=seed, dtype=dtype),
        names,
        Setup(threads=1, asked=names),
        mode,
    )
    assert [(track.backend, track.status, track.steps) for track in found.tracks] == [
        (name, "agrees", 200) for name in names
    ]
