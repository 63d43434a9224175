"""Checkpoints of TensorFlow, ``.index`` with ``.data-00000-of-00001``, of version 1 and 2, without TensorFlow.

The index is a table of names in the format of LevelDB (:mod:`concord.porting.containers.bundle.index`); an entry is a message that says dtype, shape, and
where in which data file the numbers lie (:mod:`concord.porting.containers.bundle.messages`). They are memory-mapped.
Described in ``tensorflow/core/util/tensor_bundle`` and ``tensorflow/core/protobuf/tensor_bundle.proto``.
"""

from concord.porting.containers.bundle.reading import is_one, read
from concord.porting.containers.bundle.writing import write

__all__ = ["is_one", "read", "write"]
