"""torch's DistributedDataParallel in place of the lab's own sum of gradients, where nothing but copies of the whole model is asked for.

Its buckets are summed while the backward pass goes on. Owns what it can be used for; must not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scaling_lab.backends.torch.sharding import Placement
from scaling_lab.backends.torch.weights import Piece
from scaling_lab.errors import PlanError


def wrapped(model: nn.Module, pieces: Sequence[Piece], on: Placement) -> DistributedDataParallel:
    """The model, its gradients summed (not averaged) over the axes that keep copies of it. Raises PlanError where parts are asked for."""
    axes = _axes(pieces, on)
    group = on.group(axes) if axes else dist.group.WORLD
    ddp = DistributedDataParallel(model, process_group=group, init_sync=False)
    ddp.register_comm_hook(group, _sum)
    return ddp


def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
    """While it lasts, a backward pass sums nothing over processes: more microbatches follow."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _axes(pieces: Sequence[Piece], on: Placement) -> tuple[str, ...]:
    """The axes that every gradient is summed over."""
    found = {piece.planned.sum_axes for piece in pieces}
    split = next(
        (p.name for p in pieces if any(p.layout(column).axes for column in ("weights", "gradients", "optimizer"))), None
    )
    if split or on.compute_axes or len(found) != 1:
        raise PlanError(
            f"backend.data_parallel=ddp keeps the whole of every weight, gradient and state on each device, but the table splits "
            f"{split or 'the computation'}. Set sharding=data, or backend.data_parallel=buckets."
        )
    if on.precision.reduce != on.precision.params:
        raise PlanError(
            f"backend.data_parallel=ddp sums gradients in their own dtype. Set workload.precision.reduce={on.precision.params}, "
            f"or backend.data_parallel=buckets."
        )
    return found.pop()


def _sum(group, bucket):
    """torch's own hook divides by the number of processes; the loss is a global mean already.

    Without annotations: torch compares them with types, and here they would be text. (ProcessGroup, GradBucket) -> Future[Tensor].
    """
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
