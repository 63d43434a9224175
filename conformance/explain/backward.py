"""Location of a bug in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping

from concord.conformance.explain.question import Question
from concord.spec.tape import Node
from concord.spec.tensors import clause_of

# Steps with a simple derivative (products, sums, masks) are less likely than other steps in question.
PLAIN = ("FFN-1", "ATT-6", "ATT-3", "HED-3", "EMB-6", "RES-1", "MSK-3")

# A gradient this small relative to the largest one proves nothing (SPEC GRD-4).
SMALL = 1e-6


def bounds(question: Question, statuses: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Locate the bug: a sentence, and the clauses in question, likeliest first.

    Both are empty unless exactly one step uses the parameter.
    """
    consumers = _consumers(question)
    proofs = _right(question, statuses, consumers)
    name = str(question.parameter)
    tap = name.removeprefix("taps.")
    if tap == name:
        users = consumers.get(f"={name}", [])
        if len(users) != 1:
            return "", ()
        (tap,) = users
        if tap in proofs:
            text = (
                f"`{proofs[tap]}` is correct: the gradient of `{name}` is computed wrongly, or from a wrong "
                "activation"
            )
            return text, (_clause(question, tap), "GRD-1")
    steps, queue = list[str](), list(consumers.get(tap, []))
    while queue:
        step = queue.pop(0)
        if step not in steps:
            steps.append(step)
            queue += [] if step in proofs else consumers.get(step, [])
    if not steps:
        return "", ()
    clauses = {step: _clause(question, step) for step in steps}
    gradients = (
        ", ".join(dict.fromkeys(f"`{proofs[step]}`" for step in steps if step in proofs)) or "the loss"
    )
    suspected = ", ".join(f"`{step}` ({clause})" for step, clause in clauses.items())
    text = (
        f"the derivative of a step between {gradients} (correct) and `{question.tensor}` (wrong): {suspected}"
    )
    likeliest = sorted(clauses.values(), key=lambda clause: (clause in PLAIN) + (clause == "ATT-4") / 2)
    return text, tuple(dict.fromkeys(likeliest))


def _consumers(question: Question) -> dict[str, list[str]]:
    """Map each tap, and each parameter as ``=<name>``, to the taps computed from it."""
    exact, consumers = question.exact, dict[str, list[str]]()
    names = {id(tensor): name for name, tensor in exact.now.items()}
    names |= {id(tensor): f"={name}" for name, tensor in exact.parameters.items()}
    for name, tensor in exact.taps.items():
        for source in made_of(tensor, names):
            consumers.setdefault(source, []).append(name)
    return consumers


def _right(
    question: Question, statuses: Mapping[str, str], consumers: Mapping[str, list[str]]
) -> dict[str, str]:
    """Map each tap with a correct gradient to the gradient that proves it."""
    exact, prefix = question.exact, "gradients.taps."
    agreeing = [name for name, status in statuses.items() if status == "agrees"]
    proofs = {name.removeprefix(prefix): name for name in agreeing if name.startswith(prefix)}
    sizes = {
        name: float(abs(node.gradient).max())
        for name, node in exact.parameters.items()
        if node.gradient is not None
    }
    for parameter, users in consumers.items():
        name = parameter.removeprefix("=")
        visible = sizes.get(name, 0.0) > SMALL * max(sizes.values(), default=0.0)
        if parameter != name and len(users) == 1 and visible and f"gradients.{name}" in agreeing:
            proofs.setdefault(users[0], f"gradients.{name}")
    return proofs


def _clause(question: Question, step: str) -> str:
    norm = "norm" in step.rpartition(".")[2]
    return "NRM-2" if norm else clause_of(question.config, step, question.case.part)


def made_of(tensor: Node, names: Mapping[int, str]) -> list[str]:
    """Taps and parameters from which a tensor is computed directly."""
    sources, visited = list[str](), set[int]()
    stack = [operand for operand, _ in tensor.operands]
    while stack:
        current = stack.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if id(current) in names:
            sources.append(names[id(current)])
        else:
            stack += [operand for operand, _ in current.operands]
    return sources
