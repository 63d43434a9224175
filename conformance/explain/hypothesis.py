"""Hypotheses that a search tries, and what is said of those that hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from concord.backends.interface import Request
from concord.conformance.bugs.bug import Change, weights
from concord.conformance.judging.explanation import Explanation
from concord.conformance.wording import instead
from concord.spec.arrays import Array
from concord.spec.config import EncoderConfig
from concord.spec.errors import ConfigError, SpecError

INAPPLICABLE = (SpecError, ArithmeticError, LookupError, ValueError)
"""What a hypothesis fails with that does not apply.

To this model, as a width of 1 less 1 to divide by, or to this batch.
"""


RIGHTLY = Change()
"""Nothing is changed."""


@dataclass(frozen=True)
class Hypothesis:
    """A bug that a run may contain.

    Attributes:
        name: of the kind of bug.
        text: what would explain the tensor, in words that follow "is explained by".
        clause: of SPEC.md that it breaks.
        fields: of the configuration, that are others.
        change: what is made of weights, of taps, or of a step of training.
        gradient: what is made of the gradient in question.
        factors: the format that factors of products are rounded to.
        operands: tensors that others stand in for, by the names of both.
        rare: whether hardly anyone makes it: it is tried only to show how well others are told apart from it.
    """

    name: str
    text: str
    clause: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    change: Change = RIGHTLY
    gradient: Callable[[Array], Array] | None = None
    factors: str | None = None
    operands: Mapping[str, str] = field(default_factory=dict)
    rare: bool = False


def loaded(name: str, text: str, clause: str, made: Mapping[str, Callable[[], Array]]) -> Hypothesis:
    """Return the hypothesis of other weights.

    Each is made when it is wanted: of a large model there is no room for all that may be tried.
    """

    def request(asked: Request) -> Request:
        return weights(asked, {name: make() for name, make in made.items()})

    return Hypothesis(name, text, clause, change=Change(request=request))


RIGHT = Hypothesis("right", "nothing", "PRT-1")
"""No bug at all."""


def options(
    config: EncoderConfig, name: str, values: Sequence[Any], clause: str, **besides: Any
) -> Iterator[Hypothesis]:
    """Yield hypotheses of another value of a configuration field, as far as they describe a model.

    Args:
        besides: fields that have to be others too.
    """
    right = getattr(config, name)
    for value in values:
        if value == right:
            continue
        fields = {name: value, **besides}
        try:
            config.replace(**fields)
        except ConfigError:
            continue
        yield Hypothesis(name, f"{name} = {instead(value, right, digits=12)}", clause, fields)


MOST_NAMED = 4
"""How many explanations a sentence names."""


def explained_by(
    tensor: str, hypotheses: Sequence[Hypothesis], confident: bool, since: str = ""
) -> Explanation:
    """Say that hypotheses explain a tensor, or a step if it has no name.

    Args:
        since: from which step on, where it does not hold in steps before.
    """
    # Several names may stand for one cause in the same words.
    texts = [*dict.fromkeys(f"{one.text} ({one.clause})" if one.clause else one.text for one in hypotheses)]
    shown = " or by ".join(texts[:MOST_NAMED])
    more = f" or by {len(texts) - MOST_NAMED} others" if len(texts) > MOST_NAMED else ""
    subject, how = (f"`{tensor}` ", "is ") if tensor else ("", "")
    return Explanation(
        tensor,
        tuple(dict.fromkeys(one.clause for one in hypotheses if one.clause)),
        " or ".join(dict.fromkeys(one.name for one in hypotheses)),
        f"{subject}{how if confident else 'may be '}explained by {shown}{more}{since}",
        confident,
        hypotheses=tuple(hypotheses),
    )
