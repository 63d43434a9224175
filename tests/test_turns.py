"""Backends that take turns still run every entry together."""

from collections import defaultdict

from concord.backends import BUILT_IN
from concord.conformance.run.standard_jobs import check_jobs
from concord.spec.cases import OWN, SCENARIOS
from tests.conftest import is_the_only_one, turns


def test_every_backend_meets_every_variant_in_every_precision_and_every_scenario():
    by_entry = defaultdict(set)
    for place, job in enumerate(check_jobs()):
        for entry in ((job.group, job.dtype), job.case.removeprefix(f"{job.group}-")):
            by_entry[entry] |= set(BUILT_IN) if is_the_only_one(job) else turns(sorted(BUILT_IN), place)
    assert {entry: names for entry, names in by_entry.items() if names != set(BUILT_IN)} == {}
    assert sum(map(is_the_only_one, check_jobs())) == sum(
        len(set(entry.only) - set(OWN)) for entry in SCENARIOS.values()
    ) + len(check_jobs(list(OWN)))


def test_every_backend_meets_every_entry_of_two_lists():
    meetings = {
        (name, which, entry)
        for place in range(16)
        for name in turns(sorted(BUILT_IN), place)
        for which, entry in enumerate(divmod(place, 4))
    }
    assert len(meetings) == len(BUILT_IN) * 2 * 4
