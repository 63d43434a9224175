"""What a right backend returns, or one with a bug: the reference in rounded arithmetic, judged."""

import dataclasses

from concord.backends.interface import Request, Run
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.edited_model import with_edits
from concord.conformance.explain.family_judge import judge
from concord.spec.arithmetic import Arithmetic
from concord.spec.reference import compute


def truth_of(case, dtype="float32", arithmetic=None, **more):
    """Return what the reference computes of a case, with gradients; by default in the dtype's arithmetic."""
    arithmetic = arithmetic or Arithmetic(dtype, shuffle=97)
    return compute(case.config, case.weights, case.batch, arithmetic, True, case.part, dtype, **more)


def truth_with(change, case, dtype="float32", arithmetic=None, memory=None):
    """Return what the reference yields with the change of a bug.

    Args:
        memory: what the bug keeps from one call to the next.
    """
    model = with_edits(change.at)
    model.memory = {} if memory is None else memory
    asked = change.request(Request(case.config, case.weights, case.batch, case.part, dtype))
    made = dataclasses.replace(case, config=asked.config, weights=asked.weights, batch=asked.batch)
    return truth_of(made, dtype, arithmetic, model=model)


def as_run(truth, dtype="float32", **fields):
    """Return a run that holds what the reference computed, and declares nothing."""
    given = {"info": {"not_exposed": []}, **fields}
    return Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", dtype, **given)


def run_of(case, dtype="float32", arithmetic=None, **more):
    return as_run(truth_of(case, dtype, arithmetic, **more), dtype)


def run_with(change, case, dtype="float32"):
    """Return what a port with a bug would, which says nothing of itself."""
    return as_run(truth_with(change, case, dtype), dtype, info={})


def declaring(run, name, value=1):
    """Return a run that declares a deviation."""
    return dataclasses.replace(
        run, info={"deviations": [{"name": name, "value": value, "reason": "made so"}]}
    )


def option(**fields):
    """Return the change of fields of the configuration."""
    return Change(request=lambda asked: dataclasses.replace(asked, config=asked.config.replace(**fields)))


def verdict_of(case, run, **more):
    return judge(case.config, case.weights, case.batch, run, case.part, **more)


def explained(case, run):
    """Return what is said of a run, its cause looked for."""
    return verdict_of(case, run).explained()


def other(run, name, change):
    """Return a run in which one tensor, named as in a verdict, is what a change makes of it."""
    gradient = name.removeprefix("gradients.")
    held, name = ("taps", name) if gradient == name else ("gradients", gradient)
    if (tap := name.removeprefix("taps.")) != name:
        held, name = "tap_gradients", tap
    tensors = getattr(run, held)
    return dataclasses.replace(run, **{held: {**tensors, name: change(tensors[name].copy())}})


def without(run, *names):
    """Return a run that lacks tensors."""
    return dataclasses.replace(
        run,
        taps={name: tap for name, tap in run.taps.items() if name not in names},
        gradients={
            name: gradient for name, gradient in run.gradients.items() if f"gradients.{name}" not in names
        },
    )


def put(place, value):
    """Return the change that puts a number, perhaps made of what is there, at a place."""

    def change(array):
        array[place] = value(array[place]) if callable(value) else value
        return array

    return change
