"""Two checkpoints of any formats, tensor by tensor: what differs, how.

And what is likely to have caused it.
"""

from concord.porting.comparison.checkpoints import Comparison, Pair, compare
from concord.porting.comparison.kinds import Difference, classify

__all__ = ["Comparison", "Difference", "Pair", "classify", "compare"]
