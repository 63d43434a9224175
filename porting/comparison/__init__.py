"""Two checkpoints of any formats, tensor by tensor: what differs, how.

And what is likely to have caused it.
"""

from concord.porting.comparison.checkpoints import Comparison, compare
from concord.porting.comparison.difference import TensorDifference, classify

__all__ = ["Comparison", "TensorDifference", "classify", "compare"]
