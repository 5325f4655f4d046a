"""The grouped product: rows sorted into groups, each group by a matrix of its own. In two forms with one meaning. No layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """rows (r, e) in groups of `sizes` (n), int64, with weights (n, e, f) -> (r, f)."""
    # torch's kernel knows bfloat16 only; for other dtypes it loops as well, and asks the device for the sizes each time.
    fused = rows.is_cuda and rows.dtype == torch.bfloat16
    return (in_one_kernel if fused else in_a_loop)(rows, weights, sizes)


def in_a_loop(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """One product after the other."""
    groups = zip(rows.split(sizes.tolist()), weights.unbind(), strict=True)
    return torch.cat([group @ weight for group, weight in groups])


def in_one_kernel(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """All at once, without waiting for the sizes."""
    # torch 2.10 made the function public.
    product = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return product(rows, weights, offs=sizes.cumsum(0).to(torch.int32))
