"""Two checkpoints of any formats, tensor by tensor: what differs, how.

And what is likely to have caused it.
"""

from concord.porting.comparison.checkpoints import Comparison, Pair, compare
from concord.porting.comparison.kinds import TensorDifference, classify

__all__ = ["Comparison", "Pair", "TensorDifference", "classify", "compare"]
