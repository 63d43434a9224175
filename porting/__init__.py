"""Checkpoints of many formats, in and out: their configuration, weights, tokenizer and labels.

:func:`read` gives a :class:`Checkpoint`, whose tensors are read one by one when they are asked for;
:func:`write` writes one as a folder of any format.
"""

from concord.porting.checkpoint import Checkpoint, LazyTensor, from_weights
from concord.porting.reading import read
from concord.porting.recognition import Recognition, recognise
from concord.porting.registry import formats
from concord.porting.writing import loading, write

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "Recognition",
    "formats",
    "from_weights",
    "loading",
    "read",
    "recognise",
    "write",
]
