"""Reading and writing checkpoints in many formats: configuration, weights, tokenizer and labels."""

from concord.porting.checkpoint import Checkpoint, LazyTensor, from_weights
from concord.porting.reading import read
from concord.porting.recognition import Recognition, recognise
from concord.porting.registry import formats
from concord.porting.writing import loading, writable, write

__all__ = [
    "Checkpoint",
    "LazyTensor",
    "Recognition",
    "formats",
    "from_weights",
    "loading",
    "read",
    "recognise",
    "writable",
    "write",
]
