"""Gradients of what FSDP does not sum, and steps on parts of a weight: sums, splits and gathers by hand, in few collectives.

After the backward pass a gradient may be a partial sum over mesh axes (`ParameterPlan.sum_axes`). Where its planned layout splits it over
such an axis it is reduce-scattered (ZeRO-2), else all-reduced; where only the optimizer splits it, a part is taken (ZeRO-1); after the
step the parts of the weight are gathered. Tensors that go the same way share one buffer and one collective: on a slow
link a collective's latency costs more than its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from scaling_lab.backends.torch.collectives import all_gather, reduce_scatter
from scaling_lab.backends.torch.fsdp import copied_axes
from scaling_lab.backends.torch.sharding import Placement, dtype_of, local_of
from scaling_lab.backends.torch.weights import Piece, Slices, places

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """What happens to a gradient: axes it is scattered over while summed, axes it is summed over.

    split: axes over which the optimizer splits the weight further than it is stored; what was not scattered is cut.
    """

    scattered: Axes
    summed: Axes
    split: Axes


def way_of(piece: Piece, on: Placement) -> Way:
    """The way of a piece's gradient, from its planned layouts."""
    planned, real = piece.planned, on.plan.mesh.real_axes
    done = (*planned.fsdp_axes, *copied_axes(planned, on), *on.compute_axes) if planned.fsdp_axes else ()
    partial = tuple(axis for axis in planned.sum_axes if axis not in done)
    gradients, split = piece.further("gradients", "weights").axes, piece.further("optimizer", "weights").axes
    scattered = tuple(axis for axis in real if axis in gradients) if set(gradients) <= set(partial) else ()
    summed = tuple(axis for axis in partial if axis not in scattered)
    return Way(scattered, summed, tuple(axis for axis in real if axis in split))


class Bucket:
    """Pieces whose gradients go the same way.

    stepped: for each piece, the tensor that the optimizer updates: the stored weight itself, or where the optimizer splits it
    further a copy of this device's part, all of them in one buffer
    """

    def __init__(self, way: Way, pieces: Sequence[Piece], on: Placement):
        self.way, self.pieces, self.on = way, tuple(pieces), on
        if not way.split:
            self.stepped = [piece.local for piece in pieces]
            return
        parts = [piece.local[self._part(piece, on.place, "optimizer")] for piece in pieces]
        self.buffer = torch.cat([part.flatten() for part in parts])
        self.stepped = _unpack(self.buffer, [part.shape for part in parts])

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Local gradients, shaped as stored -> reduced ones, shaped as `stepped`."""
        if self.way.scattered:
            gradients = self._scatter(gradients)
        if self.way.summed:
            gradients = self._sum(gradients)
        if self.way.split:
            base = "gradients" if self.way.scattered else "weights"
            parts = (self._part(piece, self.on.place, "optimizer", base) for piece in self.pieces)
            gradients = [g[part].contiguous() for g, part in zip(gradients, parts, strict=True)]
        return [g.to(stepped.dtype) for g, stepped in zip(gradients, self.stepped, strict=True)]

    def gather(self) -> None:
        """Bring the updated parts back into the stored weights of every device."""
        if not self.way.split:
            return
        axes = self.way.split
        every = all_gather(self.buffer, self.on.group(axes))
        weights = [piece.local for piece in self.pieces]
        for place, row in zip(places(self.on.plan.mesh, axes, self.on.place), every, strict=True):
            parts = _unpack(row, [stepped.shape for stepped in self.stepped])
            for piece, weight, part in zip(self.pieces, weights, parts, strict=True):
                weight[self._part(piece, place, "optimizer")] = part

    def _scatter(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        rows = []
        for place in places(self.on.plan.mesh, self.way.scattered, self.on.place):
            parts = (g[self._part(p, place, "gradients")] for p, g in zip(self.pieces, gradients, strict=True))
            rows.append(torch.cat([part.flatten() for part in parts]))
        reduced = reduce_scatter(torch.stack(rows).to(self._reduce_dtype), self.on.group(self.way.scattered))
        own = [g[self._part(p, self.on.place, "gradients")].shape for p, g in zip(self.pieces, gradients, strict=True)]
        return _unpack(reduced, own)

    def _sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        packed = torch.cat([g.flatten() for g in gradients]).to(self._reduce_dtype)
        dist.all_reduce(packed, group=self.on.group(self.way.summed))
        return _unpack(packed, [g.shape for g in gradients])

    @cached_property
    def _reduce_dtype(self) -> torch.dtype:
        return dtype_of(self.on.precision.reduce)

    def _part(self, piece: Piece, place: dict[str, int], column: str, base: str = "weights") -> Slices:
        return piece.part(column, self.on.plan.mesh, place, base)


def buckets_of(pieces: Sequence[Piece], on: Placement, *, summed: bool = False) -> list[Bucket]:
    """Every piece in one bucket, by its way. summed: someone else sums the gradients of whole weights."""
    ways: dict[Way, list[Piece]] = {}
    for piece in pieces:
        ways.setdefault(Way((), (), ()) if summed else way_of(piece, on), []).append(piece)
    return [Bucket(way, members, on) for way, members in ways.items()]


def take_gradients(pieces: Sequence[Piece], on: Placement) -> list[Tensor]:
    """The pieces' gradients on this device as the backward pass has left them, taken off the parameters.

    Where devices that computed parts of the same tokens have partial sums of what all of them hold whole, these are summed.
    """
    taken = []
    partial: dict[Axes, list[int]] = {}
    for index, piece in enumerate(pieces):
        gradient, piece.parameter.grad = piece.parameter.grad, None
        assert gradient is not None, piece.name
        if isinstance(gradient, DTensor) and on.compute_axes and not piece.planned.fsdp_axes:
            gradient, axes = _local_summand(gradient, piece, on)
            if axes:
                partial.setdefault(axes, []).append(index)
        taken.append(local_of(gradient))
    for axes, members in partial.items():
        packed = torch.cat([taken[index].flatten() for index in members])
        dist.all_reduce(packed, group=on.group(axes))
        for index, part in zip(members, _unpack(packed, [taken[index].shape for index in members]), strict=True):
            taken[index] = part
    return taken


def _local_summand(gradient: DTensor, piece: Piece, on: Placement) -> tuple[Tensor, Axes]:
    """What this device adds to the sums that a bucket takes over compute axes: where autograd has summed already, its share.

    Also the compute axes over which it is a partial sum that no bucket takes.
    """
    placements = dict(zip(on.compute_axes, gradient.placements, strict=True))
    wanted = dict(zip(on.compute_axes, on.placements(piece.layout("compute")), strict=True))
    partial = tuple(axis for axis, p in placements.items() if p.is_partial())
    kept = {axis: p if axis in (*piece.planned.sum_axes, *partial) else wanted[axis] for axis, p in placements.items()}
    local = gradient.redistribute(placements=tuple(kept.values())).to_local()
    whole = tuple(axis for axis, p in kept.items() if axis in piece.planned.sum_axes and p.is_replicate())
    share = local / on.plan.mesh.split(whole) if whole else local
    return share, tuple(axis for axis in partial if axis not in piece.planned.sum_axes)


def _unpack(packed: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat buffer, one per shape."""
    flat = packed.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
