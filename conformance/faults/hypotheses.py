"""Faults as explanations: what a tap, or a gradient, would be with one of them, from what a run had before it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

from conformance.causes.hypothesis import Hypothesis
from conformance.causes.question import Question
from conformance.causes.step import Step
from conformance.expectation import is_gradient
from conformance.faults.catalogue import ALL
from conformance.faults.context import Context, Edit
from conformance.faults.fault import Fault
from conformance.faults.tape import TapeOperations, Value
from spec.tape import Tensor


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


def told_by_themselves(backward: bool) -> Iterator[Fault]:
    """Yield the edits that no other hypothesis stands for.

    Args:
        backward: those of the backward pass alone, or the others.
    """
    for fault in ALL:
        if fault.tried and fault.change.edits and fault.name in (fault.cause or "").split(" or ") and backward == all(is_gradient(name) for name in fault.first):
            yield fault


def hypothesis(fault: Fault, edit: Edit, part: str, *on: str) -> Hypothesis:
    """Return a fault as something that a run may contain."""

    def change(m: Step, tap: str, y: Tensor) -> Tensor:
        operations = TapeOperations(m.a, m.dtype)
        context = Context(operations, m.config, m.batch, part, m.dtype, lambda name: operations.value(m.weights[name]), _Before(m, operations))
        context.tap = tap
        made: Value = edit(context, operations.value(y))
        return made.tensor

    text = f"this: {fault.what[0].lower() if fault.what[1:2].islower() else fault.what[0]}{fault.what[1:].rstrip('.')}"
    return Hypothesis(name=fault.name, text=text, clause=fault.clause, change=change, on=on)


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
