"""torch's matrix product on this machine's processor, timed: `python -m scaling_lab.backends.torch.peak DTYPE` prints JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch

from scaling_lab.predict.products import Maker, answer


def products(dtype: str) -> Maker:
    """The product on all of the machine's cores, whatever OMP_NUM_THREADS says: the peak is the machine's."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def maker(size: int) -> Callable[[], object]:
        left, right = (torch.full((size, size), 0.5, dtype=getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    return maker


if __name__ == "__main__":
    print(answer("torch", products(sys.argv[-1])))
