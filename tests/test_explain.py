import pytest

from concord.commands.explain import known_meanings
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.judging.verdict import STATUSES
from concord.spec.deviations import KNOWN_DEVIATIONS


def test_every_bug_cause_status_and_declaration_is_explained_with_its_clause():
    meanings = known_meanings()
    causes = {cause for bug in BUGS.values() for cause in bug.cause.split(" or ")} - {""}
    assert {*BUGS, *causes, *STATUSES, *KNOWN_DEVIATIONS} <= meanings.keys()
    assert all(meanings[bug.name][1].startswith(f"{bug.clause}: ") for bug in BUGS.values())
    assert all(name in meanings[bug.clause][-1] for name, bug in BUGS.items())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ATT-4", "1 / sqrt(K)"),
        ("undetermined", "precision"),
        ("tf32", "to switch it off:"),
        ("gelu_tanh", "a value of the option activation"),
    ],
)
def test_a_name_is_explained(name, words, entered):
    output, _ = entered(f"explain {name}")
    assert words in output


def test_an_unknown_name_is_refused_with_the_nearest(invoke):
    code, _, (line,) = invoke("explain gelu_tan_for_erf")
    assert code == 2
    assert "gelu_tanh_for_erf" in line
