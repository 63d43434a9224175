"""Which clauses of the specification a wrong tensor may break, the likeliest first, by what is seen of it."""

from __future__ import annotations

from collections.abc import Iterator

from concord.conformance.bugs.bug import fits
from concord.conformance.expectation import is_gradient
from concord.conformance.explain.question import Question
from concord.conformance.explain.said import Description
from concord.spec.config import EncoderConfig

MOVED = ("shifted", "reversed", "repeated", "permuted", "transposed")


MANY = 30
"""How many wrong elements show that their errors have no order."""

COARSE = 2.0**-8
"""Up to which share of a number an error may be that of fewer bits."""


def likely(question: Question, seen: Description | None, usual: str) -> tuple[str, ...]:
    """Return the clauses that a wrong tensor may break, the likeliest first.

    Args:
        seen: what is seen of it.
        usual: the clause that defines it.
    """
    return tuple(dict.fromkeys((*(_of_what_is_seen(question, seen) if seen else ()), usual)))


def _of_what_is_seen(question: Question, seen: Description) -> Iterator[str]:
    """Yield the clauses that a description speaks of."""
    tensor, config = question.tensor, question.config
    disorderly = seen.relation in ("", "row factors") and seen.wrong >= MANY and not is_gradient(tensor)
    if disorderly and seen.relative < COARSE:
        yield "PRC-2"  # small errors without an order are those of a step that has fewer bits
    if is_gradient(tensor):
        if seen.where.startswith("head"):
            yield "ATT-2"
        return
    if tensor.startswith("embeddings."):
        yield from _of_embeddings(config, tensor, seen)
    elif fits(tensor, ("*attention.query", "*attention.key", "*attention.value")):
        if seen.relation in MOVED and "head" in seen.what:
            yield "ATT-2"
        yield "ATT-1"
    elif tensor.endswith("attention.scores"):
        yield from ("ATT-3",) if seen.relation in MOVED else ("ATT-4", "ATT-3")
    elif tensor.endswith("masked_scores"):
        yield from _of_masks(seen)
    elif tensor.endswith(("attention.weights", "masked_weights", "attention.context")):
        yield from _of_attention(tensor, seen)
    elif fits(tensor, ("*norm1", "*norm2", "*norm")):
        yield from ("NRM-7", "NRM-2") if seen.relation == "nan" else ("NRM-2", "NRM-3")
    elif tensor in ("loss", "losses"):
        yield from ("LOS-3",) if "label" in seen.where and config.ignore_label is not None else ()


def _of_embeddings(config: EncoderConfig, tensor: str, seen: Description) -> Iterator[str]:
    padding = seen.where.startswith("padded") or (
        config.token_padding_row is not None and seen.where == f"id {config.token_padding_row}"
    )
    if tensor.endswith(".token"):
        if seen.relation == "multiple" and not seen.where:
            return
        yield from ("EMB-3", "EMB-1") if padding else ("EMB-1",)
    elif tensor.endswith(".position"):
        if seen.relation == "multiple" and not seen.where:
            yield "EMB-2"
        elif padding:
            yield "POS-6"
        elif "column" in seen.what or "d_model" in seen.places:
            yield from ("POS-2", "POS-3")
        elif seen.relation in ("shifted", "reversed", "repeated", "permuted") or seen.places:
            yield "POS-5"
        else:
            yield from ("POS-5", "POS-1") if config.positions == "learned" else ("POS-3", "POS-4", "POS-1")
    elif tensor.endswith(".norm"):
        yield "NRM-2"


def _of_masks(seen: Description) -> Iterator[str]:
    if seen.relation == "infinite":
        yield "MSK-6"
    if seen.region == "empty rows" and not seen.places:
        yield from ("MSK-3", "MSK-5")
    elif seen.relation == "constant" and seen.where.startswith("masked"):
        yield from ("MSK-2", "MSK-6")
    elif "heads" in seen.places:
        yield from ("MSK-7", "MSK-1")  # every head of a sample has the same mask
    elif "query" in seen.places or seen.region == "distance":
        yield from ("MSK-4", "MSK-1")  # and every query
    elif seen.relation == "constant" or "scores" in seen.what or seen.places:
        # What should be hidden is not, or the other way round; in one sample it may be another's mask.
        other = len(seen.places.get("batch", ())) == 1 and (
            seen.relation == "constant" or "key" not in seen.places
        )
        yield from ("MSK-7", "MSK-1") if other else ("MSK-1", "MSK-4", "MSK-7")


def _of_attention(tensor: str, seen: Description) -> Iterator[str]:
    if tensor.endswith("masked_weights"):
        yield "MSK-8"
    elif seen.region == "empty rows":
        yield "MSK-5"
    elif seen.region == "padding" and seen.relation == "zero":
        yield "MSK-4"
    elif seen.where.startswith("masked keys"):
        yield "MSK-3"
    elif seen.where.startswith(("padded", "samples with padding")):
        yield from ("MSK-4", "MSK-5")
    elif tensor.endswith("context"):
        yield from ("ATT-6", "ATT-7", "ATT-5")
