"""How tokens get to their experts and back: which row goes where, here and on other processes. Exact in both passes.

An assignment is one token at one of its experts: number (row x sequence + token) x k + choice. Without limit they are
sorted by expert and counts say how many each process sends; with limited rooms every expert has room for so many
of each row, full or not, and every process sends as much. Must not know what experts compute, or who chose them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scaling_lab.backends.torch.collectives import all_to_all, exchange


@dataclass(frozen=True, eq=False)
class Move:
    """Rows put into another order. source: which row stands at each place, -1 for none; target: at which place each row, -1 for none.

    gaps: whether there may be any -1
    """

    source: Tensor
    target: Tensor
    gaps: bool = False


@dataclass(frozen=True, eq=False)
class Trip:
    """Rows sent to the processes of a group and what came sorted by expert. sent, received: how many to and from each."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    by_expert: Move


@dataclass(frozen=True, eq=False)
class Dispatch:
    """sizes: how many rows each expert of this process gets, int64, in the order of experts; shape: of the choices (b, t, k)."""

    shape: torch.Size
    sort: Move
    trip: Trip | None
    sizes: Tensor

    def out(self, x: Tensor) -> Tensor:
        """x (b, t, e) -> the rows of this process's experts (r, e), by expert."""
        rows = _Moved.apply(x.flatten(0, 1), self.sort.source, self.sort.target, self.sort.gaps, self.shape[2])
        if self.trip is None:
            return rows
        trip = self.trip
        came = _Exchanged.apply(rows, trip.sent, trip.received, trip.group)
        return _Moved.apply(came, trip.by_expert.source, trip.by_expert.target, False, 1)

    def home(self, rows: Tensor) -> Tensor:
        """The way back: (r, e) -> (b, t, k, e), zero for what was dropped."""
        if self.trip is not None:
            trip = self.trip
            rows = _Moved.apply(rows, trip.by_expert.target, trip.by_expert.source, False, 1)
            rows = _Exchanged.apply(rows, trip.received, trip.sent, trip.group)
        return _Moved.apply(rows, self.sort.target, self.sort.source, self.sort.gaps, 1).unflatten(0, self.shape)


def dropless(chosen: Tensor, experts: int, group: dist.ProcessGroup | None) -> Dispatch:
    """Every assignment goes to its expert. chosen (b, t, k); group: of the processes with parts of the experts."""
    flat = chosen.flatten()
    source = flat.argsort(stable=True)
    sizes = counts_of(flat[None], experts)[0]
    sort = Move(source, _inverse(source))
    if group is None:
        return Dispatch(chosen.shape, sort, None, sizes)
    own = sizes.view(group.size(), -1)
    return _sent(chosen.shape, sort, own, all_to_all(own, group), group)


def limited(chosen: Tensor, experts: int, room: int, group: dist.ProcessGroup | None) -> Dispatch:
    """Each expert has `room` places for every row. chosen (b, t, k), at most `room` of a row at one expert; number `experts` is none."""
    rows, flat = chosen.shape[0], chosen.flatten(1)
    places = experts * rows * room
    row = torch.arange(rows, device=flat.device)[:, None]
    target = (flat * rows + row) * room + ranks_of(flat, experts + 1)  # (b, t x k)
    target = target.where(flat < experts, places).flatten()
    source = target.new_full((places + 1,), -1).scatter_(0, target, torch.arange(target.numel(), device=target.device))
    sort = Move(source[:-1], target.where(target < places, -1), gaps=True)
    sizes = target.new_full((experts,), rows * room)
    if group is None:
        return Dispatch(chosen.shape, sort, None, sizes)
    own = sizes.view(group.size(), -1)
    return _sent(chosen.shape, sort, own, own, group)


def counts_of(flat: Tensor, experts: int) -> Tensor:
    """How many assignments of a row each expert has: (b, assignments) -> (b, experts)."""
    return flat.new_zeros(flat.shape[0], experts).scatter_add_(1, flat, torch.ones_like(flat))


def ranks_of(flat: Tensor, experts: int) -> Tensor:
    """How many assignments of its row come before each one at the same expert, (b, assignments). By a sort: a mask would be large."""
    by_expert = flat.argsort(dim=1, stable=True)
    counts = counts_of(flat, experts)
    starts = (counts.cumsum(1) - counts).gather(1, flat.gather(1, by_expert))
    index = torch.arange(flat.shape[1], device=flat.device)
    return torch.empty_like(flat).scatter_(1, by_expert, index - starts)


def _sent(shape: torch.Size, sort: Move, own: Tensor, theirs: Tensor, group: dist.ProcessGroup) -> Dispatch:
    """own: how many of the rows here go to each process and expert of it; theirs: how many come from each process for each expert."""
    sent, received = torch.stack([own.sum(dim=1), theirs.sum(dim=1)]).tolist()
    experts = torch.arange(theirs.shape[1], device=theirs.device).repeat(theirs.shape[0])
    source = experts.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
    return Dispatch(shape, sort, Trip(group, sent, received, Move(source, _inverse(source))), theirs.sum(dim=0))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


class _Moved(torch.autograd.Function):
    """Rows in another order: place i gets row source[i] // copies. Backward by the inverse: no sum depends on an order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, target: Tensor, gaps: bool, copies: int) -> Tensor:
        """rows (m, e) -> (places, e). target: the place of each copy of a row."""
        ctx.save_for_backward(target)
        ctx.how = gaps, copies
        return _taken(rows, source // copies if copies > 1 else source, gaps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Each row's copies, summed."""
        (target,), (gaps, copies) = ctx.saved_tensors, ctx.how
        rows = _taken(gradient, target, gaps)
        return rows if copies == 1 else rows.unflatten(0, (-1, copies)).sum(dim=1), None, None, None, None


def _taken(rows: Tensor, index: Tensor, gaps: bool) -> Tensor:
    """rows[index], zero where the index is negative."""
    return rows[index.clamp(min=0)].masked_fill_((index < 0)[:, None], 0) if gaps else rows[index]


class _Exchanged(torch.autograd.Function):
    """Rows sent to other processes; backward their gradients go home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        """rows (sum of sent, e) -> (sum of received, e)."""
        ctx.way = received, sent, group
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The way back."""
        return exchange(gradient, *ctx.way), None, None, None
