"""Collectives that torch has renamed from one version to the next. Knows no layouts."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensors of every process of the group, [group, *local shape], in the order of its ranks."""
    every = local.new_empty(group.size() * local.numel())  # gloo wants a concatenation, not a stack
    # torch 2.13 renamed the function; the old name warns.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, local.flatten(), group=group)
    return every.view(group.size(), *local.shape)


def reduce_scatter(every: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group's processes of row r of `every` [group, ...], r being this process's rank in it."""
    own = every.new_empty(every[0].numel())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, every.flatten(), group=group)
    return own.view(every.shape[1:])


def all_to_all(every: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row r of `every` [group, ...] goes to rank r; row r of the result came from it."""
    return exchange(every, [1] * group.size(), [1] * group.size(), group)


def exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1 and so on; the result holds what came from each in turn."""
    came = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
    return came
