"""What the model does with a weight: use it, multiply by it, look it up. Owns casts. Must not know the model's equations.

A weight that FSDP stores comes gathered and cast already; any other is cast here, so that its gradient is summed in its own dtype.
Split operands are multiplied as local tensors: DTensor's own dispatch costs more than a small product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from scaling_lab.backends.torch.sharding import Placement, part_start


def use(on: Placement, weight: Tensor) -> Tensor:
    """A weight in the compute dtype."""
    return weight.to(on.compute_dtype)


def product(on: Placement, equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """`einsum(equation, x, weight)` of an activation and a weight, as one product of matrices.

    The summed letters come last in x, and either first in the weight (`bte,ehd->bthd`) or last (`bte,ve->btv`).
    """
    weight = use(on, weight)
    if not isinstance(x, DTensor) or not isinstance(weight, DTensor):
        return _multiply(equation, x, weight)
    layouts = [_split_product(equation, *pair) for pair in zip(x.placements, weight.placements, strict=True)]
    if None in layouts:
        return _multiply(equation, x, weight)  # DTensor brings the operands together
    local_x = x.to_local(grad_placements=[layout.x_gradient for layout in layouts])
    local_weight = weight.to_local(grad_placements=[layout.weight_gradient for layout in layouts])
    y = _multiply(equation, local_x, local_weight)
    return DTensor.from_local(y, x.device_mesh, [layout.y for layout in layouts], run_check=False)


def _multiply(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    left, right = equation.split("->")[0].split(",")
    summed = len(set(left) & set(right))
    if right[0] not in left:
        return x @ weight.t()
    rows = weight if summed == 1 else weight.flatten(0, summed - 1)
    y = (x if summed == 1 else x.flatten(-summed)) @ rows.flatten(1)
    return y if rows.ndim == 2 else y.unflatten(-1, rows.shape[1:])


@dataclass(frozen=True)
class _SplitProduct:
    """Along one mesh axis: how the product of two parts lies, and the gradients of the operands that it gives."""

    y: Any
    x_gradient: Any
    weight_gradient: Any


def _split_product(equation: str, x: Any, weight: Any) -> _SplitProduct | None:
    """What the product of local parts is along one mesh axis, given how x and the weight lie; None where parts do not match."""
    operands, result = equation.split("->")
    left, right = operands.split(",")
    if isinstance(weight, Shard):
        letter = right[weight.dim]
        if letter in left:  # both hold a part of what is summed
            return _SplitProduct(Partial(), x, weight) if x == Shard(left.index(letter)) else None
        return _SplitProduct(Shard(result.index(letter)), Partial(), weight) if x.is_replicate() else None
    if isinstance(x, Shard):  # each part of x meets the whole weight
        letter = left[x.dim]
        return _SplitProduct(Shard(result.index(letter)), x, Partial()) if letter in result else None
    return _SplitProduct(Replicate(), Replicate(), Replicate()) if x.is_replicate() else None


def lookup(on: Placement, table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table (dim 0), in the compute dtype. Where the rows are split each device gives those it has: a partial sum."""
    if not isinstance(table, DTensor):
        return F.embedding(indices, table).to(on.compute_dtype)
    local = table.to_local()
    index = indices - part_start(table, 0)
    inside = (index >= 0) & (index < local.shape[0])
    found = F.embedding(index.where(inside, 0), local).to(on.compute_dtype) * inside[..., None]
    placements = [Partial() if p.is_shard(0) else Shard(indices.ndim) if p.is_shard(1) else p for p in table.placements]
    return DTensor.from_local(found, table.device_mesh, placements, run_check=False)
