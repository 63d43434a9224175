"""Exemptions: every reason for which a tensor, or some of its elements, is not judged.

Each is the note of a row. A run with too little left is undetermined
(:func:`concord.conformance.judging.verdict.conclude`).
"""

# A run neither delivers a tensor nor says that it has none.
NOT_EXPOSED = "not returned"

# A backend says beforehand that it has no such tensor.
DECLARED = "declared by the backend"

# The user of a candidate says the same of an output.
ABSENT = "declared as absent"

# A gradient by an activation is zero, where another that flows past it is right.
UNUSED = "the model does not go on with this activation"

# A tensor agrees and says nothing: a parameter, or a table that is the same for all inputs.
CONSTANT = "computed of no input"

# A run declares that it computes no rows of padding: unpadded kernels leave them to chance (decision 31).
PADDING = "rows of padding, which the run declares not to compute"

# A value is too large for the precision: float16 overflows honestly, in scores before they are scaled.
OUT_OF_RANGE = "out of range"

# A gradient flows through such values.
OUT_OF_RANGE_BEFORE = "the forward pass is out of range"

# A gradient flows through values of the run that are not finite; the forward pass diverges by itself.
NOT_FINITE_BEFORE = "the forward pass is not finite"

# End to end, correct runs may differ by so much; each step is still judged.
GROWN = "rounding may have grown beyond a tenth of it"

# A gradient is divided by the deviation of a row whose entries are all nearly equal.
NORM = "rounding decides a layer norm that it flows through"

# A gradient is a difference of equal numbers, in a half precision.
NO_DIGIT = "rounding leaves no digit of it"

# What rounding decides in a discrete operation is named with it: concord.conformance.compare.decisions.
