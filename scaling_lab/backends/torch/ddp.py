"""torch's own sums of gradients in place of the lab's, where nothing but copies of the whole model is asked for.

Both are taken while the backward pass goes on: in DistributedDataParallel's buckets, or layer by layer by FSDP2 (`fsdp.wrap`). Owns
how they are told to wait; that the table asks for copies is the plan's to see. Must not know the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def wrapped(model: nn.Module) -> DistributedDataParallel:
    """The model, its gradients summed (not averaged) over all processes."""
    ddp = DistributedDataParallel(model, init_sync=False)
    ddp.register_comm_hook(dist.group.WORLD, _sum)
    return ddp


@contextmanager
def unsynchronised(model: nn.Module) -> Iterator[None]:
    """While it lasts, a backward pass sums nothing over processes: more microbatches follow."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _sum(group, bucket):
    """torch's own hook divides by the number of processes; the loss is a global mean already.

    Without annotations: torch compares them with types, and here they would be text. (ProcessGroup, GradBucket) -> Future[Tensor].
    """
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
