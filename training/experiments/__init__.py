"""The sources' experiments: the same data, models that differ in one thing, several seeds, and what came of it."""

from concord.training.experiments.cells import Cell, Experiment, Trained, conduct
from concord.training.experiments.ways import EXPERIMENTS, ways

__all__ = ["EXPERIMENTS", "Cell", "Experiment", "Trained", "conduct", "ways"]
