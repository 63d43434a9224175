"""Texts with labels: read from files, encoded, and put into batches.

:func:`read` gives :class:`Samples`; :class:`Labels` and a :class:`TextEncoder` turn them into a
:class:`Corpus` (:func:`encode`), of which :func:`batches` makes what a model takes. :func:`fitted` makes a
configuration fit vocabulary and classes.
"""

from concord.training.data.batching import batches
from concord.training.data.corpus import Corpus, encode
from concord.training.data.encoder import TextEncoder, fitted, unfit
from concord.training.data.labels import Labels
from concord.training.data.lines import Bad, Complaints
from concord.training.data.samples import Sample, Samples, read, splits
from concord.training.data.tokenizers import TOKENIZATIONS

__all__ = [
    "TOKENIZATIONS",
    "Bad",
    "Complaints",
    "Corpus",
    "Labels",
    "Sample",
    "Samples",
    "TextEncoder",
    "batches",
    "encode",
    "fitted",
    "read",
    "splits",
    "unfit",
]
