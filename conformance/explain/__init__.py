"""Where and how two tensors differ, and what may have caused it: hypotheses, each tested by recomputation.

The first tensor of a run that is wrong is recomputed from the run's own preceding tensors with one bug
made on purpose. If that gives what the run gave, to within the tolerance derived for it, the bug explains
it. Where none does, it is said which elements are wrong, and how they are related to the right ones.
"""
