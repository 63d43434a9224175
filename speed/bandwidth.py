"""How fast memory is, as copying shows it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SIZE = 2**25
"""Numbers that each thread copies: larger than any cache."""


def copy_gbytes(threads: int, times: int = 5) -> float:
    """Return the bytes read and written, in 1e9 a second, when every thread copies an array.

    The best of a few times.
    """
    arrays = [
        (np.ones(SIZE // threads, np.float32), np.empty(SIZE // threads, np.float32)) for _ in range(threads)
    ]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        best = float("inf")
        for _ in range(times):
            started = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), arrays))
            best = min(best, time.perf_counter() - started)
    return sum(source.nbytes + target.nbytes for source, target in arrays) / best / 1e9
