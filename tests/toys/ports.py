"""The reference as ports make it: with a bug of the table.

Or with steps, weights and options that are others.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from concord import spec
from concord.backends.interface import Request
from concord.conformance.bugs.tape import with_edits
from concord.spec.arithmetic import Arithmetic
from concord.spec.model import Model
from concord.spec.reference import compute
from tests.toys import rounded
from tests.toys.rounded import as_run

SCORES, WEIGHTS = (f"layers.0.attention.{step}" for step in ("scores", "weights"))


def run_with(bug, case, dtype="float32", seed=97):
    """Return what a port with a bug would: the reference in rounded arithmetic.

    None where the case cannot have it.
    """
    try:
        return as_run(truth_with(bug.change, case, Arithmetic(dtype, shuffle=seed), dtype), dtype, info={})
    except (spec.SpecError, KeyError, IndexError, ValueError):
        return None


def truth_with(change, case, arithmetic, dtype, memory=None):
    """Return what the reference yields with a change.

    Args:
        memory: what the bug keeps from one call to the next.
    """
    model = with_edits(change.at)
    model.memory = {} if memory is None else memory
    asked = change.request(Request(case.config, case.weights, case.batch, case.part, dtype))
    truth = compute(asked.config, asked.weights, asked.batch, arithmetic, True, case.part, dtype, model=model)
    return (
        dataclasses.replace(truth, gradients=dict(change.handed_out(truth.gradients)))
        if change.handed_out
        else truth
    )


def verdict_of(case, run):
    """Return what is said of a run, its cause looked for."""
    return rounded.verdict_of(case, run).explained()


class Spoiled(Model):
    """The reference with taps that are made into others, as a port that goes wrong there."""

    steps = {}

    def tap(self, name, tensor):
        for pattern, step in self.steps.items():
            if fnmatch.fnmatchcase(name, pattern):
                tensor = step(self, name, tensor)
        self.taken = {**getattr(self, "taken", {}), name: tensor}
        return super().tap(name, tensor)

    def beside(self, name, other):
        return self.taken[f"{name.rpartition('.')[0]}.{other}"]

    def real(self):
        return self.batch.required("input_ids") != self.config.pad_id


@dataclass(frozen=True)
class Port:
    """What is other than in the reference.

    Attributes:
        fields: of the configuration.
        weights: makes other weights.
        steps: patterns of taps, and what becomes of them.
    """

    fields: Mapping = field(default_factory=dict)
    weights: Callable | None = None
    steps: Mapping = field(default_factory=dict)


SOUND = Port()
"""Nothing is other."""


def option(**fields):
    return Port(fields)


def step(tap, change):
    return Port(steps={tap: change})


def run_of(case, port, dtype="float32", seed=97):
    """Return what a port would: the reference in rounded arithmetic."""
    model = type("Port", (Spoiled,), {"steps": port.steps})
    weights = {**case.weights, **(port.weights(case) if port.weights else {})}
    made = dataclasses.replace(case, config=case.config.replace(**port.fields), weights=weights)
    truth = rounded.truth_of(made, dtype, Arithmetic(dtype, shuffle=seed), model=model)
    return as_run(truth, dtype, info={})
