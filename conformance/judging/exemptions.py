"""Exemptions: reasons why a tensor, or some of its elements, are not judged."""

# A run neither returns a tensor nor declares that it lacks it.
NOT_EXPOSED = "not returned"

# A backend declares that it lacks the tensor.
DECLARED = "declared by the backend"

# The user of a candidate declares that it lacks an output.
ABSENT = "declared as absent"

# A tap's gradient is zero, and another gradient that bypasses it is correct: the model may use a copy of it.
UNUSED = "a zero gradient, through which no correct gradient flows"

# A tensor agrees but proves nothing: a parameter, or a table that is the same for all inputs.
CONSTANT = "does not depend on any input"

# A run declares that it computes no rows of padding: unpadded kernels leave them undefined (decision 31).
PADDING = "padding rows, which the run declares it does not compute"

# A value exceeds the precision's range: unscaled scores in float16 may legitimately overflow.
OUT_OF_RANGE = "out of range"

# A gradient flows through such values.
OUT_OF_RANGE_BEFORE = "the forward pass is out of range"

# A gradient flows through values of the run that are not finite; the forward pass itself diverges.
NOT_FINITE_BEFORE = "the forward pass is not finite"

# End to end, correct runs may differ this much; each step is still judged.
GROWN = "accumulated rounding may exceed a tenth of its value"

# A gradient is divided by the deviation of a row whose entries are nearly equal.
NORM = "it flows through a layer norm whose result depends only on rounding"

# A half-precision gradient, or the solution of an ill-conditioned system, is a difference of equal values.
NO_DIGIT = "rounding leaves no correct digit"

# Discrete operations (concord.conformance.compare.decisions), whose names follow.
DECISION = "rounding decides"


def is_decided_by_rounding(note: str) -> bool:
    """Whether a note exempts a whole tensor, of which rounding alone determines every digit."""
    return note.startswith((DECISION, NO_DIGIT))
