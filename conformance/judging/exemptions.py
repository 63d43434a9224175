"""Why a tensor, or some of its elements, are not judged: every reason that there is.

Each is the note of a row. A run of which too little is left is undetermined
(:func:`concord.conformance.judging.verdict.conclude`).
"""

NOT_EXPOSED = "not delivered"
"""A run neither delivers a tensor nor says that it has none."""

DECLARED = "declared by the backend"
"""A backend says beforehand that it has no such tensor."""

ABSENT = "declared as absent"
"""The user of a candidate says the same of an output."""

UNUSED = "the model does not go on with this activation"
"""A gradient by an activation is zero, where another that flows past it is right."""

CONSTANT = "computed of no input"
"""A tensor agrees and says nothing: a parameter, or a table that is the same for all inputs."""

PADDING = "rows of padding, which the run declares not to compute"
"""A run declares that it computes no rows of padding."""

OUT_OF_RANGE = "out of range"
"""A value is too large for the precision."""

OUT_OF_RANGE_BEFORE = "the forward pass is out of range"
"""A gradient flows through values that are."""

NOT_FINITE_BEFORE = "the forward pass is not finite"
"""A gradient flows through values of the run that are no numbers."""

GROWN = "rounding may have grown beyond a tenth of it"
"""A tensor, end to end, of which correct runs may differ by that much; each step is still judged."""

NORM = "rounding decides a layer norm that it flows through"
"""A gradient is divided by the deviation of a row whose entries are all nearly equal."""

NO_DIGIT = "rounding leaves no digit of it"
"""A gradient is a difference of equal numbers, in a half precision."""

# What rounding decides in a discrete operation is named with it: concord.conformance.compare.decisions.
