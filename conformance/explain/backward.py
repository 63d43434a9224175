"""Where in the backward pass a gradient went wrong.

Which steps lie between the last right gradients and the first wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from concord.conformance.bugs.bug import fits
from concord.conformance.expectation import root_mean_square
from concord.conformance.explain.computation import within
from concord.conformance.explain.question import Question
from concord.conformance.wording import few
from concord.spec.arrays import Array
from concord.spec.tape import Node
from concord.spec.tensors import clause_of

SUMS = ("*.residual1", "*.residual2", "embeddings.sum")
"""Taps whose gradient is that of each of their terms."""

PLAIN = ("FFN-1", "ATT-6", "ATT-3", "HED-3", "EMB-6", "RES-1", "MSK-3")
"""Clauses of steps that are less likely to be differentiated wrongly than another in question."""

SMALL = 1e-6
"""How small a gradient beside the largest is no sign of anything (SPEC GRD-4)."""

WHOLE = 1e-4
"""How near to a whole or simple number a share has to be to be one."""


@dataclass(frozen=True)
class Bounds:
    """Where the mistake lies.

    Attributes:
        text: a sentence.
        clauses: of the steps in question, the likeliest first.
    """

    text: str
    clauses: tuple[str, ...]


class Backward:
    """The backward pass of a run: what depends on what, found on the tape, and which gradients are right.

    Args:
        question: the gradient in question.
        statuses: of every tensor.
    """

    def __init__(self, question: Question, statuses: Mapping[str, str]) -> None:
        self.question, self.statuses = question, statuses
        exact = question.exact
        names = {id(tensor): name for name, tensor in exact.now.items()} | {
            id(tensor): f"={name}" for name, tensor in exact.parameters.items()
        }
        self.consumers: dict[str, list[str]] = {}
        for name, tensor in exact.taps.items():
            for source in made_of(tensor, names):
                self.consumers.setdefault(source, []).append(name)
        self.largest = max(
            (float(abs(t.gradient).max()) for t in exact.parameters.values() if t.gradient is not None),
            default=0.0,
        )

    def bounds(self) -> Bounds | None:
        """Return between which gradients the mistake lies."""
        name = str(self.question.parameter)
        tap = name.removeprefix("taps.")
        if tap == name:
            users = self.consumers.get(f"={name}", [])
            if len(users) != 1:
                return None
            tap = users[0]
            if self.is_right(tap, but=name):
                text = f"what flows back to `{tap}` is right, so far as other gradients made of it show: the "
                text += f"gradient of `{name}` is made wrongly, or of a wrong activation"
                return Bounds(text, (self._clause(tap), "GRD-1"))
        steps, ends = self._between(tap)
        if not steps:
            return None
        users, clauses = self.consumers[tap], [self._clause(step) for step in steps]
        if len(users) > 1 and all(self.is_right(step) for step in users):
            clauses.sort(key=lambda clause: clause != "RES-1")
            text = (
                f"the gradients that meet at `{tap}`, from {' and '.join(f'`{step}`' for step in users)}, "
                "are right, or so far as can be seen: their sum is not"
            )
        else:
            right = ", ".join(dict.fromkeys(f"`{self.evidence(end)}`" for end in ends)) or "the loss"
            made = ", ".join(f"`{step}` ({self._clause(step)})" for step in steps)
            text = (
                f"the derivative of a step between {right} (right) and `{self.question.tensor}` (wrong): "
                f"of {made}"
            )
            clauses.sort(key=lambda clause: (clause in PLAIN) + (clause == "ATT-4") / 2)
        return Bounds(text, tuple(dict.fromkeys(clauses)))

    def _between(self, tap: str) -> tuple[list[str], list[str]]:
        """Return the steps from a tap to the next taps whose gradients are right, and those."""
        steps: list[str] = []
        ends: list[str] = []
        waiting = list(self.consumers.get(tap, []))
        while waiting:
            step = waiting.pop(0)
            if step in steps:
                continue
            steps.append(step)
            if self.is_right(step):
                ends.append(step)
            else:
                waiting += self.consumers.get(step, [])
        return steps, ends

    def is_right(self, tap: str, but: str = "") -> bool:
        """Return whether the gradient of a tap is known to be right.

        It is delivered, or gradients made of it alone are right.
        """
        return bool(self.evidence(tap, but))

    def evidence(self, tap: str, but: str = "") -> str:
        """Return the gradient that shows that of a tap to be right."""
        if self.statuses.get(f"gradients.taps.{tap}") == "agrees":
            return f"gradients.taps.{tap}"
        exact = self.question.exact
        for name, users in self.consumers.items():
            tensor = exact.weights.get(name[1:]) if name.startswith("=") else None
            if tensor is None or users != [tap] or name == f"={but}" or tensor.gradient is None:
                continue
            visible = float(abs(tensor.gradient).max()) > SMALL * self.largest
            if visible and self.statuses.get(f"gradients.{name[1:]}") == "agrees" and not fits(tap, SUMS):
                return f"gradients.{name[1:]}"
        if fits(tap, SUMS):  # each of its terms has the same gradient
            for name, users in self.consumers.items():
                if users == [tap] and not name.startswith("=") and not fits(name, SUMS):
                    found = self.evidence(name, but)
                    if found:
                        return found
        return ""

    def _clause(self, step: str) -> str:
        return (
            "NRM-2"
            if "norm" in step.rpartition(".")[2]
            else clause_of(self.question.config, step, self.question.case.part)
        )


def made_of(tensor: Node, names: Mapping[int, str]) -> list[str]:
    """Return the taps and parameters that a tensor is made of directly."""
    found: list[str] = []
    seen: set[int] = set()
    waiting = [operand for operand, _ in tensor.operands]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if id(current) in names:
            if names[id(current)] not in found:
                found.append(names[id(current)])
        else:
            waiting += [operand for operand, _ in current.operands]
    return found


def shares(question: Question, backward: Backward, delivered: Mapping[str, Array]) -> str:
    """Say which samples or tokens count how often in a gradient, if they do not all count once.

    Nothing if that is not it.

    Args:
        delivered: every tensor of the run.
    """
    users = backward.consumers.get(f"={question.parameter}", [])
    if len(users) != 1:
        return ""
    siblings = [
        other[1:] for other, taps in backward.consumers.items() if other.startswith("=") and taps == users
    ]
    known = {
        name: np.asarray(delivered[full]) for name in siblings if (full := f"gradients.{name}") in delivered
    }
    for parameter in sorted(known, key=lambda other: -known[other].size):
        for axis, word in enumerate(("sample", "token")):
            found = _counted(question, users[0], parameter, known[parameter].astype(np.float64), axis)
            odd = [] if found is None else np.flatnonzero(abs(found - 1) > WHOLE).tolist()
            if found is not None and 0 < len(odd) < len(found):
                counts = sorted({float(found[i]) for i in odd})
                how = (
                    "not at all"
                    if counts == [0.0]
                    else f"{' or '.join(f'{count:g}' for count in counts)} times"
                )
                last = len(odd) > 1 and odd == list(range(odd[0], len(found)))
                some = f"{word}s from {odd[0]} on" if last else f"{word}s {few(odd, 6)}"
                places, verb = (f"{word} {odd[0]}", "counts") if len(odd) == 1 else (some, "count")
                return f"in `gradients.{parameter}` {places} {verb} {how}"
    return ""


def _counted(
    question: Question, tap: str, parameter: str, actual: Array, axis: int
) -> NDArray[np.floating] | None:
    """Return how often each sample (axis 0) or token (1) counts in a gradient, if that explains it."""
    parts = _parts(question, tap, parameter, axis)
    if parts is None or actual.shape != parts.shape[1:] or 2 * len(parts) > actual.size or len(parts) < 2:
        return None
    used = np.array([bool(part.any()) for part in parts])
    design = parts[used].reshape(int(used.sum()), -1).T.astype(np.float64)
    scale = float(abs(design).max(initial=0.0))
    if scale == 0 or np.linalg.matrix_rank(design / scale, tol=1e-5) < design.shape[1]:
        return None
    found = np.ones(len(parts))
    found[used] = np.linalg.lstsq(design, actual.reshape(-1), rcond=None)[0]
    simple = np.round(found * 4) / 4
    if np.abs(simple - found).max() > WHOLE * 10:
        return None
    left, unit = actual - np.tensordot(simple, parts, 1), root_mean_square(actual)
    small = root_mean_square(left) <= WHOLE * unit + 1e-300
    return simple if small and within(left, np.full_like(left, max(1e-5 * unit, 1e-300))) else None


def _parts(question: Question, tap: str, parameter: str, axis: int) -> Array | None:
    """Return what each sample, or each token, contributes to a gradient of a linear layer, norm or table."""
    exact, batch = question.exact, question.case.batch
    flowing = exact.now[tap].gradient
    weight = exact.weights[parameter]
    if flowing is None or flowing.size * max(weight.shape[0], 1) > 2**24:
        return None
    if flowing.ndim == 2:
        flowing = flowing[:, None]
    if flowing.ndim < 3:
        return None
    flowing = flowing.reshape(*flowing.shape[:2], -1)
    if parameter.endswith(".bias"):
        made = "bto->bo" if axis == 0 else "bto->to"
        return np.asarray(np.einsum(made, flowing))
    if weight.value.ndim == 1 or parameter.startswith("embeddings.position"):
        return None
    if parameter.startswith("embeddings."):
        ids = batch.required("segment_ids" if ".segment." in parameter else "input_ids")
        inputs = np.eye(weight.shape[0])[ids]
    else:
        inputs = exact.inputs[tap].value
        inputs = inputs.reshape(*flowing.shape[:2], -1)
    return np.asarray(np.einsum("bti,bto->bio" if axis == 0 else "bti,bto->tio", inputs, flowing))
