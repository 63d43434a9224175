"""Runs of the reference in rounded arithmetic, right or with a bug."""

from dataclasses import replace

from concord.backends.interface import Request, Run
from concord.conformance.bugs.bug import Change
from concord.conformance.bugs.edited_model import Edited
from concord.conformance.explain.family_judge import judge
from concord.spec.arithmetic import Arithmetic
from concord.spec.reference import compute


def with_edits(edits, model=Edited, part="model"):
    """A model class with these edits."""
    return type("Port", (model,), {"edits": staticmethod(edits), "part": part})


def truth_of(case, dtype="float32", arithmetic=None, **more):
    """Results with gradients, by default in shuffled arithmetic of the dtype."""
    arithmetic = arithmetic or Arithmetic(dtype, shuffle=97)
    return compute(case.config, case.weights, case.batch, arithmetic, True, case.part, dtype, **more)


def truth_with(change, case, dtype="float32", arithmetic=None, memory=None):
    """Results with a bug, which keeps ``memory`` between calls."""
    model = with_edits(change.at)
    model.memory = {} if memory is None else memory
    request = change.request(Request(case.config, case.weights, case.batch, case.part, dtype))
    problem = replace(case, config=request.config, weights=request.weights, batch=request.batch)
    return truth_of(problem, dtype, arithmetic, model=model)


def as_run(truth, dtype="float32", **fields):
    options = {"info": {"not_exposed": []}, **fields}
    return Run(truth.output, truth.loss, dict(truth.taps), dict(truth.gradients), "numpy", dtype, **options)


def run_of(case, dtype="float32", arithmetic=None, **more):
    return as_run(truth_of(case, dtype, arithmetic, **more), dtype)


def run_with(change, case, dtype="float32"):
    """A run of a port with a bug."""
    return as_run(truth_with(change, case, dtype), dtype, info={})


def declaring(run, name, value=1):
    return replace(run, info={"deviations": [{"name": name, "value": value, "reason": "made so"}]})


def option(**fields):
    return Change(request=lambda request: replace(request, config=request.config.replace(**fields)))


def verdict_of(case, run, **more):
    return judge(case.config, case.weights, case.batch, run, case.part, **more)


def explained(case, run):
    return verdict_of(case, run).explained()


def other(run, name, change):
    """A run with a changed tensor, named as in a verdict."""
    gradient = name.removeprefix("gradients.")
    field, name = ("taps", name) if gradient == name else ("gradients", gradient)
    if (tap := name.removeprefix("taps.")) != name:
        field, name = "tap_gradients", tap
    tensors = getattr(run, field)
    return replace(run, **{field: {**tensors, name: change(tensors[name].copy())}})


def without(run, *names):
    return replace(
        run,
        taps={name: tap for name, tap in run.taps.items() if name not in names},
        gradients={
            name: gradient for name, gradient in run.gradients.items() if f"gradients.{name}" not in names
        },
    )


def put(place, value):
    """A change that sets an element to a number, or to a function of its value."""

    def change(array):
        array[place] = value(array[place]) if callable(value) else value
        return array

    return change
