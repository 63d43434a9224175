"""Checkpoints of many formats, in and out: their configuration, weights, tokenizer and labels.

:func:`read` gives a :class:`Checkpoint`, whose tensors are read one by one when they are asked for.
"""

from concord.porting.checkpoint import Checkpoint, Entry, LazyTensor, from_weights
from concord.porting.formats import Recognition, formats, read, recognise

__all__ = ["Checkpoint", "Entry", "LazyTensor", "Recognition", "formats", "from_weights", "read", "recognise"]
