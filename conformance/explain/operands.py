"""Hypotheses about a step's operands."""

from __future__ import annotations

from collections.abc import Iterator

from concord.conformance.explain.backward import made_of
from concord.conformance.explain.hypothesis import Hypothesis
from concord.conformance.explain.partial_model import group_of
from concord.conformance.explain.question import Question
from concord.spec.tensors import clause_of, source_of


def of_operands(question: Question) -> Iterator[Hypothesis]:
    if question.tensor not in question.exact.taps:
        return
    nodes = {name: question.exact.now[name] for name in question.before if name in question.exact.now}
    operands = made_of(question.exact.taps[question.tensor], {id(node): name for name, node in nodes.items()})
    groups = {group_of(question.tensor), *map(group_of, operands)}
    config, part = question.config, question.case.part
    for operand in operands:
        for replacement, node in nodes.items():
            if (
                replacement != operand
                and node.shape == nodes[operand].shape
                and group_of(replacement) in groups
            ):
                # If the replacement is the input of the operand's own step, that step was omitted.
                step = operand if source_of(config, operand, part) == replacement else question.tensor
                text = f"`{replacement}` used in place of `{operand}`"
                yield Hypothesis(
                    "other_operand", text, clause_of(config, step, part), operands={operand: replacement}
                )
