"""Porting bugs on purpose.

The catalogue is sound, edits leave no trace, and every bug is found at the right tensor.
"""

import fnmatch
import json
import re
from pathlib import Path

import numpy as np
import pytest

from concord import spec
from concord.backends.interface import Request, Unsupported
from concord.backends.wire import WorkerFailure
from concord.conformance.bugs.bug import REFUSED
from concord.conformance.bugs.catalogue import ALL, BUGS, GROUPS, KNOWN, TRAINING
from concord.conformance.bugs.precision import EMULATIONS
from concord.conformance.mutants.matrix import Finding, Hunt, Matrix, chosen, plugin
from concord.spec.cases import SCENARIOS, build_case, scenarios_of
from concord.spec.errors import SpecError
from tests.toys.rounded import verdict_of
from tests.toys.small import run_case
from tests.toys.surroundings import EACH_BACKEND, sample_of

EDITS = [mutant for mutant in ALL if mutant.precisions and mutant.change.edit]
VISIBLE = [mutant for mutant in ALL if mutant.precisions and not mutant.change.edit]
KINDS = {
    kind: mutant.name
    for mutant in reversed((*VISIBLE, *EDITS))
    for kind in (mutant.group, (mutant.clause, mutant.scenario))
}
"""The first bug of each group, and the first that breaks a clause in a scenario: those are quick."""
EQUIVALENT = [mutant for mutant in ALL if not mutant.precisions]
MASKED = "layers.0.attention.masked_scores"
SPECIFICATION = (Path(__file__).parent.parent / "spec" / "SPEC.md").read_text()


@pytest.fixture(params=EACH_BACKEND)
def mutated(request, open_worker):
    """Each of the four backends in turn, with bugs on request, in a process of its own."""
    return request.param, open_worker(plugin(request.param))


def case_of(mutant):
    return build_case(mutant.variant, mutant.scenario, options=dict(mutant.options))


def request_of(case):
    return Request(case.config, case.weights, case.batch, case.part, "float64")


def arrays_of(run):
    return {
        "output": run.output,
        "loss": run.loss,
        **run.taps,
        **{f"gradients.{name}": array for name, array in run.gradients.items()},
    }


# The catalogue.


def test_catalogue_is_large_and_has_every_group():
    assert len(VISIBLE) + len(EDITS) >= 320
    assert EQUIVALENT
    assert {mutant.group for mutant in KNOWN.values()} == set(GROUPS)


@pytest.mark.parametrize("bug", [*ALL, *TRAINING.values()], ids=lambda bug: bug.name)
def test_bug_is_documented(bug):
    assert re.fullmatch("[a-z0-9_]+", bug.name)
    assert bug.what.endswith(".")
    assert not bug.clause or f"**{bug.clause}**" in SPECIFICATION
    assert not bug.source or bug.source.startswith("https://")


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_mutant_shows_where_there_is_something_and_changes_one_thing(mutant):
    assert mutant.scenario in scenarios_of(mutant.variant)
    assert all(mutant.equivalent.values())
    assert bool(mutant.first) == bool(mutant.precisions)
    case, again = case_of(mutant), case_of(mutant)
    taps = [*spec.taps(case.config)]
    gradients = [*spec.trainable(case.config), *(f"taps.{name}" for name in taps)]
    names = [REFUSED, *taps, *(f"gradients.{name}" for name in gradients)]
    assert not [pattern for pattern in mutant.first if not fnmatch.filter(names, pattern)]
    changed = mutant.change.request(request_of(case))
    assert case.config == again.config
    for before, after in ((again.weights, case.weights), (again.batch.arrays(), case.batch.arrays())):
        assert all(np.array_equal(before[name], after[name]) for name in before)
    differs = changed.config != case.config or any(
        not np.array_equal(array, given[name])
        for given, now in ((case.weights, changed.weights), (case.batch.arrays(), changed.batch.arrays()))
        for name, array in now.items()
    )
    ways = [differs, bool(mutant.change.edit), mutant.change.handed_out is not None]
    assert ways.count(True) == 1, "a request is changed, or taps, or gradients"


# In the backends.


def test_clean_run_after_mutated_ones_is_the_same_bit_for_bit(mutated):
    _, worker = mutated
    case, one = build_case("bert", "ragged"), build_case("bert", "single")

    def clean():
        return arrays_of(run_case(worker, case))

    before = clean()
    for name in ("mutant:tf32_everywhere", "mutant:weight_transposed"):
        changed = arrays_of(run_case(worker, case, implementation=name))
        assert changed.keys() == before.keys()
    with pytest.raises(WorkerFailure):
        run_case(worker, one, implementation="mutant:pooling_squeezed")
    after = clean()
    assert not [name for name in before if not np.array_equal(before[name], after[name])]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "mutant",
    sample_of([*VISIBLE, *EDITS], lambda _, mutant: mutant.name in KINDS.values()),
    ids=lambda mutant: mutant.name,
)
def test_mutant_is_found_at_the_right_tensor(mutated, mutant):
    name, worker = mutated
    finding = Hunt(name, worker=worker, diagnosing=False).find(mutant)
    assert finding.status == "found", finding


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("name", "implementation", "execution"),
    [("norm_gain_from_zero", "@library", "eager"), ("mask_causal_too", "", "compiled")],
)
def test_mutant_is_found_in_other_implementations_and_executions(mutated, name, implementation, execution):
    case, asked = case_of(BUGS[name]), f"mutant:{name}{implementation}"
    run = run_case(mutated[1], case, implementation=asked, execution=execution)
    row = verdict_of(case, run).first_divergence
    assert BUGS[name].rightly_first(row.tensor)


@pytest.mark.in_turn
@pytest.mark.parametrize("mutant", EQUIVALENT, ids=lambda mutant: mutant.name)
def test_equivalent_mutant_is_not_called_a_bug(mutated, mutant):
    name, worker = mutated
    finding = Hunt(name, worker=worker, diagnosing=False).find(mutant)
    assert finding.status == "equivalent", finding


@pytest.mark.in_turn
@pytest.mark.parametrize("emulation", [*EMULATIONS, "tf32@library"])
def test_products_in_tf32_conform_to_tf32_and_not_to_float32(mutated, emulation):
    case = build_case("bert", "ragged")
    run = run_case(mutated[1], case, implementation=f"emulate:{emulation}")
    assert verdict_of(case, run, dtype="tf32").passed
    assert not verdict_of(case, run).passed


def test_what_a_backend_has_not_is_refused(mutated):
    _, worker = mutated
    case = build_case("bert", "single")
    with pytest.raises(SpecError, match="unknown mutant 'mask_mising': did you mean 'mask_missing'"):
        run_case(worker, case, implementation="mutant:mask_mising")
    with pytest.raises(SpecError, match="unknown kind of implementation 'mutent': did you mean 'mutant'"):
        run_case(worker, case, implementation="mutent:mask_missing")
    with pytest.raises(Unsupported, match="computes none of layers"):
        run_case(worker, case, implementation="mutant:mask_missing@library")


def test_clean_backend_has_no_mutants(worker):
    with pytest.raises(Unsupported, match=f"{worker.name} has no implementation 'mutant:mask_missing'"):
        run_case(worker, build_case("bert", "single"), implementation="mutant:mask_missing")


# The matrix.


def finding(status, backend="torch", mutant="mask_missing", **fields):
    return Finding(mutant, backend, status, **{"tensor": "logits", "margin": 3e8, **fields})


@pytest.mark.parametrize(
    ("code", "statuses", "asked"),
    [
        (0, ["found"], ()),
        (0, ["found", "equivalent", "absent"], ()),
        (1, ["found", "missed"], ()),
        (1, ["misplaced"], ()),
        (1, ["alarm"], ()),
        (3, ["missed", "failed"], ()),
        (3, ["found", "absent"], ("torch",)),
        (3, ["absent"], ()),
        (3, [], ()),
    ],
)
def test_exit_code_of_a_matrix(code, statuses, asked):
    assert Matrix([finding(status) for status in statuses], asked).exit_code == code


@pytest.mark.parametrize(
    ("name", "tensors", "status"),
    [
        ("norm_epsilon_outside", {("tiny", "float32"): "embeddings.norm"}, "found"),
        ("norm_epsilon_outside", {("tiny", "float32"): "logits"}, "misplaced"),
        ("norm_epsilon_outside", {("single", "float64"): "embeddings.norm"}, "missed"),
        # Where nothing can show it, it is an alarm.
        (
            "mask_constant_through_float32",
            {("ragged", "float64"): MASKED},
            "found",
        ),
        (
            "mask_constant_through_float32",
            {("ragged", "float32"): MASKED},
            "alarm",
        ),
    ],
)
def test_a_mutant_is_looked_for_in_its_own_case_in_each_precision(name, tensors, status, monkeypatch):
    def look(self, mutant, scenario, dtype, certain=False):
        tensor = tensors.get((scenario, dtype))
        return tensor and finding("found" if mutant.rightly_first(tensor) else "misplaced", tensor=tensor)

    monkeypatch.setattr(Hunt, "look", look)
    assert Hunt("torch").find(BUGS[name]).status == status


@pytest.mark.xdist_group("torch")
def test_command_shows_the_matrix(entered, open_worker, tmp_path):
    open_worker(plugin("torch"))  # or skip
    file = tmp_path / "matrix.json"
    printed, said = entered(
        "mutants --backend torch --mutant norm_gain_missing --mutant heads_one_by_one "
        f"--mutant last_batch_dropped --json {file} --html {tmp_path / 'matrix.html'} --threads 1"
    )
    assert not said
    assert "torch: found 2 of 2; first tensor right in 100 %" in printed
    data = json.loads(file.read_text())
    assert [(entry["mutant"], entry["status"]) for entry in data["findings"]] == [
        ("heads_one_by_one", "equivalent"),
        ("norm_gain_missing", "found"),
        ("last_batch_dropped", "found"),
    ]
    assert (data["exit_code"], data["findings"][1]["tensor"]) == (0, "embeddings.norm")
    assert "missing: the backend returned no such tensor" in (page := (tmp_path / "matrix.html").read_text())
    assert 'class="heat"' in page


def test_a_group_is_all_of_its_mutants_each_once():
    found = chosen(["last_batch_dropped", "data", "mask_missing"])
    assert found[0].name == "mask_missing"
    assert {mutant.name for mutant in found} == {
        "mask_missing",
        *(bug.name for bug in KNOWN.values() if bug.group == "data"),
    }
    assert len(found) == len({mutant.name for mutant in found}) > 9


# The standard cases: none can be done without.


def test_every_scenario_has_a_mutant_that_it_alone_shows():
    assert {mutant.scenario for mutant in ALL if mutant.alone} == set(SCENARIOS)


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize("mutant", [mutant for mutant in ALL if mutant.alone], ids=lambda mutant: mutant.name)
def test_without_its_scenario_a_mutant_lives(open_worker, mutant):
    hunt = Hunt("torch", worker=open_worker(plugin("torch")), diagnosing=False)
    # What combines much runs in one precision alone, and stands in for no case that runs in all of them.
    others = [
        scenario
        for scenario in scenarios_of(mutant.variant)
        if scenario == mutant.scenario or not SCENARIOS[scenario].once
    ]
    assert [scenario for scenario in others if hunt.look(mutant, scenario, "float32")] == [mutant.scenario]
