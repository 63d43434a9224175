import json

import numpy as np
import pytest

from concord.backends.interface import Unsupported
from concord.backends.wire import WorkerFailure
from concord.conformance.bugs.catalogue import BUGS, KNOWN
from concord.conformance.bugs.rounding import EMULATIONS
from concord.conformance.mutants.matrix import Finding, Hunt, Matrix, select_mutants, turns
from concord.spec.cases import build_case
from concord.spec.errors import SpecError
from tests.test_wire import arrays_of, assert_same_bits
from tests.toys.rounded import verdict_of
from tests.toys.small import run_case
from tests.toys.surroundings import needs, sample_of, toy

# The quick ones: the first bug of each operation, and the first that breaks each clause.
FIRST = {
    mutant.name: mutant
    for kind in ("operation", "clause")
    for mutant in {getattr(bug, kind): bug for bug in reversed(BUGS.values())}.values()
}


ALTERED = toy("torch", "built_in")


def case_of(mutant):
    return build_case(mutant.variant, mutant.scenario, options=mutant.options)


def test_clean_run_after_mutated_ones_is_the_same_bit_for_bit(altered):
    case, single = build_case("bert", "ragged"), build_case("bert", "single")

    before = arrays_of(run_case(altered, case))
    for name in ("mutant:outer_in_tf32_last", "mutant:norm_missing"):
        changed = arrays_of(run_case(altered, case, implementation=name))
        assert changed.keys() == before.keys()
        assert not all(np.array_equal(changed[name], before[name]) for name in before)
    with pytest.raises(WorkerFailure):
        run_case(altered, single, implementation="mutant:pooling_squeezed")
    assert_same_bits(arrays_of(run_case(altered, case)), before)


@pytest.mark.in_turn(command="mutants --every")
@pytest.mark.parametrize(
    "mutant",
    sample_of([*BUGS.values()], lambda _, mutant: mutant.name in FIRST),
    ids=lambda mutant: mutant.name,
)
def test_mutant_is_found_at_the_right_tensor(altered, mutant):
    finding = Hunt(altered.name, worker=altered, diagnosing=False).find(mutant)
    assert finding.status == "found", finding


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("name", "implementation", "execution"),
    [("norm_gain_missing", "@library", "eager"), ("mask_causal_too", "", "compiled")],
)
def test_mutant_is_found_in_other_implementations_and_executions(altered, name, implementation, execution):
    case, mutant = case_of(BUGS[name]), f"mutant:{name}{implementation}"
    run = run_case(altered, case, implementation=mutant, execution=execution)
    row = verdict_of(case, run).first_divergence
    assert BUGS[name].rightly_first(row.tensor)


@pytest.mark.in_turn
@pytest.mark.parametrize("emulation", [*EMULATIONS, "tf32@library"])
def test_products_in_tf32_conform_to_tf32_and_not_to_float32(altered, emulation):
    case = build_case("bert", "ragged")
    run = run_case(altered, case, implementation=f"emulate:{emulation}")
    assert verdict_of(case, run, dtype="tf32").passed
    assert not verdict_of(case, run).passed


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize(
    ("backend", "implementation", "error", "message"),
    [
        (ALTERED, "mutant:mask_mising", SpecError, "unknown mutant .*: did you mean 'mask_missing'"),
        (ALTERED, "mutent:mask_missing", SpecError, "unknown kind .*: did you mean 'mutant'"),
        (ALTERED, "mutant:mask_missing@library", Unsupported, "computes none of layers"),
        ("torch", "mutant:mask_missing", Unsupported, "torch has no implementation 'mutant:mask_missing'"),
    ],
)
def test_what_a_backend_has_not_is_refused(backend, implementation, error, message, open_worker):
    with pytest.raises(error, match=message):
        run_case(open_worker(backend), build_case("bert", "single"), implementation=implementation)


# The matrix.


def finding(status, backend="torch", mutant="mask_missing", **fields):
    return Finding(mutant, backend, status, **{"tensor": "logits", "margin": 3e8, **fields})


@pytest.mark.parametrize(
    ("code", "statuses", "asked"),
    [
        (0, ["found", "absent"], ()),
        (1, ["found", "missed"], ()),
        (1, ["misplaced"], ()),
        (3, ["missed", "failed"], ()),
        (3, ["found", "absent"], ("torch",)),
        (3, ["absent"], ()),
    ],
)
def test_exit_code_of_a_matrix(code, statuses, asked):
    assert Matrix([finding(status) for status in statuses], asked).exit_code == code


@pytest.mark.parametrize(
    ("tensors", "status"),
    [
        ({"float32": "embeddings.norm"}, "found"),
        ({"float32": "logits"}, "misplaced"),
        ({"float64": "embeddings.norm", "float32": "logits"}, "found"),
        ({}, "missed"),
    ],
)
def test_a_mutant_is_looked_for_in_each_precision(tensors, status, monkeypatch):
    def look(self, mutant, dtype):
        tensor = tensors.get(dtype)
        return tensor and finding("found" if mutant.rightly_first(tensor) else "misplaced", tensor=tensor)

    monkeypatch.setattr(Hunt, "look", look)
    assert Hunt("torch").find(BUGS["norm_epsilon_as_floor"]).status == status


def test_each_mutant_has_one_backend_in_turn_or_all():
    mutants, names = select_mutants(["last_batch_dropped", "data", "mask_missing"]), ["torch", "jax"]
    data = [bug.name for bug in KNOWN.values() if bug.operation == "data"]
    assert [mutant.name for mutant in mutants] == ["mask_missing", *data]
    in_turn = turns(mutants, names)
    assert sorted(entry.name for own in in_turn.values() for entry in own) == sorted(["mask_missing", *data])
    assert abs(len(in_turn["torch"]) - len(in_turn["jax"])) <= 1
    assert turns(mutants, names, every=True) == dict.fromkeys(names, mutants)


@pytest.mark.xdist_group("torch")
def test_command_shows_the_matrix(entered, tmp_path):
    needs("torch")
    file, html = tmp_path / "matrix.json", tmp_path / "matrix.html"
    line = "mutants --backend torch --mutant norm_gain_missing --mutant last_batch_dropped --threads 1"
    printed, _ = entered(f"{line} --json {file} --html {html}")
    assert "torch: found 2 of 2; first tensor correct in 100 %" in printed
    data = json.loads(file.read_text())
    assert [(entry["mutant"], entry["status"]) for entry in data["findings"]] == [
        ("norm_gain_missing", "found"),
        ("last_batch_dropped", "found"),
    ]
    assert (data["exit_code"], data["findings"][0]["tensor"]) == (0, "embeddings.norm")
    assert "missing: the backend returned no such tensor" in html.read_text()
    assert 'class="heat"' in html.read_text()
