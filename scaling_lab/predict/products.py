"""How fast one library multiplies matrices: the timing, and NumPy's own answer. Must not import a framework."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

#: Sizes n of the n x n products tried, and how long one product may take before no larger size is tried.
SIZES = (512, 1024, 2048)
SLOW_S = 0.15

#: How long each size is repeated. The best of the repetitions counts: a peak is what nothing disturbed.
REPEAT_S = 0.12

#: Makes the n x n product of a size: a function that multiplies and returns when the result is there.
Maker = Callable[[int], Callable[[], object]]


def best_rate(maker: Maker) -> float:
    """The best FLOP/s over sizes and repetitions; a product of n x n matrices is 2 n^3 FLOPs."""
    best = 0.0
    for size in SIZES:
        multiply = maker(size)
        multiply()  # compiles, starts threads
        shortest = _shortest(multiply)
        best = max(best, 2 * size**3 / shortest)
        if shortest > SLOW_S:
            break
    return best


def _shortest(multiply: Callable[[], object]) -> float:
    shortest, began = float("inf"), time.perf_counter()
    while True:
        start = time.perf_counter()
        multiply()
        now = time.perf_counter()
        shortest = min(shortest, now - start)
        if now - began > REPEAT_S:
            return shortest


def numpy_products(dtype: str) -> Maker | None:
    """NumPy's product; None for a dtype that it has no fast product of."""
    import numpy as np

    if dtype != "float32":
        return None

    def maker(size: int) -> Callable[[], object]:
        left, right = (np.full((size, size), 0.5, np.float32) for _ in range(2))
        out = np.empty((size, size), np.float32)
        return lambda: np.matmul(left, right, out=out)

    return maker


def answer(library: str, maker: Maker | None) -> str:
    """What a measuring process prints: one JSON line, with a null rate where the library has no such product."""
    return json.dumps({"library": library, "flops_per_s": None if maker is None else best_rate(maker)})


if __name__ == "__main__":
    print(answer("numpy", numpy_products(sys.argv[-1])))
