"""Faults as explanations: what a tap, or a gradient, would be with one of them, from what a run had before it."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Bug
from concord.conformance.bugs.catalogue import ALL
from concord.conformance.bugs.context import Context, Edit
from concord.conformance.bugs.tape import TapeOperations, Value
from concord.conformance.expectation import is_gradient
from concord.conformance.explain.hypothesis import INAPPLICABLE, Hypothesis
from concord.conformance.explain.question import Question
from concord.conformance.explain.step import Step
from concord.spec.precision import PRECISIONS
from concord.spec.tape import Node
from concord.spec.tensors import taps


def of_tap(question: Question, tap: str) -> Iterator[Hypothesis]:
    """Yield the faults that edit a tap."""
    for fault in told_by_themselves(backward=False):
        for patterns, edit in fault.change.edits:
            if any(fnmatch.fnmatchcase(tap, pattern) for pattern in patterns):
                yield hypothesis(fault, edit, question.case.part, tap)


def of_backward(question: Question) -> Iterator[Hypothesis]:
    """Yield the faults of the backward pass alone."""
    for fault in told_by_themselves(backward=True):
        for patterns, edit in fault.change.edits:
            yield hypothesis(fault, edit, question.case.part, *patterns)


def of_hidden(question: Question) -> Iterator[Hypothesis]:
    """Yield every fault that lies on the way to a tensor from what a run delivered: within a kernel, or a model that gives its output alone.

    There one fault may change several taps, or weights, which hypotheses of a single tap do not stand for.
    """
    names = list(taps(question.config, question.case.part, list(question.case.batch.arrays())))
    if question.tensor not in names:
        return
    before = names[: names.index(question.tensor)]
    hidden = [name for name in before if name not in question.forced]
    if not hidden:
        return
    for fault in ALL:
        if fault.after or all(is_gradient(name) for name in fault.first):
            continue
        changed = [name for name in (*hidden, question.tensor) if _edit(fault, name)]
        if changed:
            yield hypothesis(fault, functools.partial(_made, fault), question.case.part, *changed)
        elif not fault.change.edits:
            yield from _of_request(question, fault)


def _made(fault: Bug, m: Context, y: Value) -> Value:
    """Return what a fault makes of the tap in question, by whichever of its edits that is."""
    edit = _edit(fault, m.tap)
    made: Value = edit(m, y) if edit else y
    return made


def _edit(fault: Bug, tap: str) -> Edit | None:
    """Return what a fault makes of a tap, which in a part has a shorter name."""
    for patterns, edit in fault.change.edits:
        shorter = (
            pattern.split(".", cut)[-1] for pattern in patterns for cut in range(pattern.count(".") + 1)
        )
        if any(pattern != "*" and fnmatch.fnmatchcase(tap, pattern) for pattern in shorter):
            return edit
    return None


def _of_request(question: Question, fault: Bug) -> Iterator[Hypothesis]:
    """Yield a fault of the configuration or the weights, where the case can have it."""
    case = question.case
    asked = Request(
        case.config,
        case.weights,
        case.batch,
        case.part,
        "float32" if case.dtype not in PRECISIONS else case.dtype,
    )
    try:
        made = fault.change.request(asked)
    except INAPPLICABLE:
        return
    fields = {one.name: getattr(made.config, one.name) for one in dataclasses.fields(made.config)}
    fields = {name: value for name, value in fields.items() if value != getattr(asked.config, name)}
    weights = {
        name: functools.partial(np.asarray, array)
        for name, array in made.weights.items()
        if not np.array_equal(array, asked.weights[name])
    }
    if fields or weights:
        yield Hypothesis(
            name=_name(fault), text=_said(fault), clause=fault.clause, fields=fields, weights=weights
        )


def told_by_themselves(backward: bool) -> Iterator[Bug]:
    """Yield the edits that no other hypothesis stands for.

    Args:
        backward: those of the backward pass alone, or the others.
    """
    for fault in ALL:
        if (
            fault.tried
            and fault.change.edits
            and fault.name in (fault.cause or "").split(" or ")
            and backward == all(is_gradient(name) for name in fault.first)
        ):
            yield fault


def hypothesis(fault: Bug, edit: Edit, part: str, *on: str) -> Hypothesis:
    """Return a fault as something that a run may contain.

    Args:
        edit: what is made of a tap.
        on: patterns of the taps that are changed.
    """

    def change(m: Step, tap: str, y: Node) -> Node:
        operations = TapeOperations(m.a, m.dtype)
        context = Context(
            operations,
            m.config,
            m.batch,
            part,
            m.dtype,
            lambda name: operations.value(m.weights[name]),
            _Before(m, operations),
        )
        context.tap = tap
        made: Value = edit(context, operations.value(y))
        return made.tensor

    return Hypothesis(name=_name(fault), text=_said(fault), clause=fault.clause, change=change, on=on)


def _name(fault: Bug) -> str:
    """Return what a fault is called as a hypothesis: by its own name where that is one, else as the hypothesis of a single tap that is the same."""
    causes = (fault.cause or fault.name).split(" or ")
    return fault.name if fault.name in causes else causes[0]


def _said(fault: Bug) -> str:
    return f"this: {fault.what[0].lower() if fault.what[1:2].islower() else fault.what[0]}{fault.what[1:].rstrip('.')}"


class _Before(Mapping[str, Any]):
    """The taps before a step, and the given inputs, as values with operators."""

    def __init__(self, step: Step, operations: TapeOperations) -> None:
        self.step, self.operations = step, operations

    def __getitem__(self, name: str) -> Value:
        given = name.removeprefix("inputs.")
        return self.operations.value(self.step.now[name] if given == name else self.step.given[given])

    def __contains__(self, name: object) -> bool:
        given = str(name).removeprefix("inputs.")
        return name in self.step.now if given == name else given in self.step.given

    def __iter__(self) -> Iterator[str]:
        return iter([*self.step.now, *(f"inputs.{name}" for name in self.step.given)])

    def __len__(self) -> int:
        return len(self.step.now) + len(self.step.given)
