"""Hypotheses for a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Change, weights
from concord.conformance.judging.explanation import Explanation
from concord.conformance.wording import instead_of
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.errors import ConfigError, SpecError

# A hypothesis that does not apply to a model or batch fails with one of these: an unbiased variance of width
# 1 divides by zero. Any other exception is a fault of the search, and is recorded.
INAPPLICABLE = (SpecError, ArithmeticError, LookupError, ValueError)

RIGHTLY = Change()


@dataclass(frozen=True)
class Hypothesis:
    """A bug that a run may contain.

    Attributes:
        text: words after "is explained by".
        fields: configuration fields with a different value.
        factors: format to which factors of products are rounded.
        operands: maps each replaced operand to its replacement.
        rare: named only if no other hypothesis fits, and never as certain.
    """

    name: str
    text: str
    clause: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    change: Change = RIGHTLY
    gradient: Callable[[Array], Array] | None = None
    factors: str | None = None
    operands: Mapping[str, str] = field(default_factory=dict)
    rare: bool = False


def loaded(name: str, text: str, clause: str, arrays: Mapping[str, Callable[[], Array]]) -> Hypothesis:
    # Computed on demand, since all variants of a large model's weights do not fit in memory.
    def request(original: Request) -> Request:
        return weights(original, {name: make() for name, make in arrays.items()})

    return Hypothesis(name, text, clause, change=Change(request=request))


RIGHT = Hypothesis("right", "nothing", "PRT-1")


def options(
    config: EncoderConfig, name: str, values: Sequence[Any], clause: str, **besides: Any
) -> Iterator[Hypothesis]:
    expected = getattr(config, name)
    for value in values:
        if value == expected:
            continue
        fields = {name: value, **besides}
        try:
            config.replace(**fields)
        except ConfigError:
            continue
        yield Hypothesis(name, f"{name} = {instead_of(value, expected, digits=12)}", clause, fields)


# A sentence names up to this many hypotheses, and counts the rest.
MOST_NAMED = 4


def explained_by(
    tensor: str, hypotheses: Sequence[Hypothesis], confident: bool, since: str = ""
) -> Explanation:
    """Explain a tensor, or a step if ``tensor`` is empty; ``since`` names the first affected step."""
    # Several names may describe one cause in the same words.
    texts = [
        *dict.fromkeys(
            f"{hypothesis.text} ({hypothesis.clause})" if hypothesis.clause else hypothesis.text
            for hypothesis in hypotheses
        )
    ]
    causes = " or by ".join(texts[:MOST_NAMED])
    rest = f" or by {len(texts) - MOST_NAMED} others" if len(texts) > MOST_NAMED else ""
    subject, verb = (f"`{tensor}` ", "is ") if tensor else ("", "")
    return Explanation(
        tensor,
        tuple(dict.fromkeys(hypothesis.clause for hypothesis in hypotheses if hypothesis.clause)),
        " or ".join(dict.fromkeys(hypothesis.name for hypothesis in hypotheses)),
        f"{subject}{verb if confident else 'may be '}explained by {causes}{rest}{since}",
        confident,
        hypotheses=tuple(hypotheses),
    )
