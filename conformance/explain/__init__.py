"""What may have caused a divergence: hypotheses, each tested by recomputing the one step that diverged.

The first tensor of a run that is wrong is recomputed from the run's own preceding tensors with one mistake
made on purpose. If that gives what the run gave, to within the tolerance derived for it, the mistake explains
it.
"""

from concord.conformance.explain.hypothesis import Cause

__all__ = ["Cause"]
