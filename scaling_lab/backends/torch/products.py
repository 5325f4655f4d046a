"""What the model does with a weight: describe it, use it, multiply by it, look it up. Owns casts. Must not know the model's equations.

A weight that FSDP stores comes gathered and cast already; any other is cast here, so that its gradient is summed in its own dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from scaling_lab.backends.torch.sharding import Placement, dtype_of, local_of, part_start


def described(on: Placement, name: str) -> nn.Parameter | None:
    """A parameter without a value yet, in its compute layout, or None where the model has none of that name.

    A DTensor over the compute mesh. Axes that give each device other tokens and other experts are none of that mesh's: as
    the tokens are local to a process, so are its experts, and torch knows of no others.
    """
    planned = on.described.get(name)
    if planned is None:
        return None
    shape, layout = planned.parameter.shape, planned.compute
    if planned.parameter.stacked:
        shape, layout = shape[1:], layout.drop_dim(0)
    local = torch.empty(layout.local_shape(shape, on.plan.mesh), dtype=dtype_of(on.precision.params), device="meta")
    if on.compute_mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, on.compute_mesh, on.placements(layout), run_check=False))


def use(on: Placement, weight: Tensor) -> Tensor:
    """A weight in the compute dtype."""
    return weight.to(on.compute_dtype)


def product(on: Placement, equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """`einsum(equation, x, weight)` of an activation and a weight, as one product of matrices.

    The summed letters come last in x, and either first in the weight (`bte,ehd->bthd`) or last (`bte,ve->btv`). Where x is
    this device's own, no DTensor, it meets the device's own part of the weight.
    """
    left, right = equation.split("->")[0].split(",")
    summed = len(set(left) & set(right))
    weight = use(on, weight)
    if not isinstance(x, DTensor):
        weight = local_of(weight)
    if right[0] not in left:
        return x @ weight.t()
    rows = weight if summed == 1 else weight.flatten(0, summed - 1)
    y = (x if summed == 1 else x.flatten(-summed)) @ rows.flatten(1)
    return y if rows.ndim == 2 else y.unflatten(-1, rows.shape[1:])


def plus(on: Placement, x: Tensor, bias: nn.Parameter | None) -> Tensor:
    """An activation with a bias added, where there is one."""
    return x if bias is None else x + use(on, bias)


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
