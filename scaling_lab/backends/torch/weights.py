"""The tensors that hold the weights: which part of which parameter each is, their first values, and the whole gathered back.

torch holds one tensor per layer where the plan has one stack: a `Piece` is such a tensor. Must not know how they are computed with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from scaling_lab.backends.initial import initial_values
from scaling_lab.backends.torch.collectives import all_gather
from scaling_lab.backends.torch.sharding import Placement, local_of
from scaling_lab.errors import WorkerError
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.plan import ParameterPlan

Slices = tuple[slice, ...]

#: Layouts of a parameter, each a further split of the one before it.
COLUMNS = ("compute", "weights", "gradients", "optimizer")


@dataclass(frozen=True, eq=False)
class Piece:
    """A parameter outside the stack, or one layer of a stacked one.

    parameter: torch's, in its stored state (a DTensor where it is in parts); layouts have the dims of this tensor
    """

    planned: ParameterPlan
    layer: int | None
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """Name of the whole parameter."""
        return self.planned.parameter.name

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape of this tensor."""
        shape = self.planned.parameter.shape
        return shape if self.layer is None else shape[1:]

    def layout(self, column: str) -> Layout:
        """The layout in a column: weights, compute, gradients or optimizer."""
        layout: Layout = getattr(self.planned, column)
        return layout if self.layer is None else layout.drop_dim(0)

    def further(self, column: str, base: str | None) -> Layout:
        """By which axes a column splits beyond another; all of its axes where there is no other."""
        return self.layout(column).without(self.layout(base).axes if base else ())

    def counts(self, on: Placement) -> bool:
        """Whether this process counts its part in a sum over all processes: it comes first of those that have the same part."""
        axes = (*self.layout("optimizer").axes, *on.plan.pipeline.axes)
        return on.first_along_others(axes) and (self.layer is not None or on.stage == self.planned.stages[0])

    @property
    def local(self) -> Tensor:
        """The part of the weight stored on this device, sharing its memory."""
        return local_of(self.parameter.detach())

    def part(self, column: str, mesh: Mesh, place: dict[str, int], base: str | None = None) -> Slices:
        """Which part of the tensor, or of a device's part of it in a coarser column, a device has in a column.

        Each column splits the part that the one before it leaves. So where FSDP and tensor axes split one dim, the tensor axis
        comes first, as torch stores it (strided).
        """
        first = COLUMNS.index(base) + 1 if base else 0
        shape = self.layout(base).local_shape(self.shape, mesh) if base else self.shape
        steps = range(first, COLUMNS.index(column) + 1)
        return nested_slices(shape, mesh, place, (self.further(COLUMNS[i], COLUMNS[i - 1] if i else None) for i in steps))


def nested_slices(shape: tuple[int, ...], mesh: Mesh, place: dict[str, int], layouts: Iterable[Layout]) -> Slices:
    """Which part lies on a device when each layout in turn splits what the one before has left."""
    slices = tuple(slice(0, size) for size in shape)
    for layout in layouts:
        inner = layout.local_slices(tuple(s.stop - s.start for s in slices), mesh, place)
        slices = tuple(slice(s.start + i.start, s.start + i.stop) for s, i in zip(slices, inner, strict=True))
    return slices


def name_of(path: str) -> tuple[str, int | None]:
    """`layers.3.attention.query` -> the parameter's name `layers.attention.query` and its layer 3 in the stack, or None.

    Of a mixture's modules its parameters' names do not know: experts are one since FSDP may store them apart from the rest.
    """
    first, *rest = path.replace(".experts.", ".").replace(".shared.", ".shared_").split(".")
    return (".".join((first, *rest[1:])), int(rest[0])) if rest[0].isdigit() else (path, None)


def pieces_of(module: nn.Module, on: Placement) -> tuple[Piece, ...]:
    """Every tensor of the module's weights, in the order of the module."""
    named = ((*name_of(path), parameter) for path, parameter in module.named_parameters())
    return tuple(Piece(on.described[name], layer, parameter) for name, layer, parameter in named)


def place_initial(pieces: Iterable[Piece], on: Placement, seed: int) -> None:
    """Draw the initial values of what this device stores, and no more."""
    for piece in pieces:
        part = piece.part("weights", on.plan.mesh, on.place)
        stack = () if piece.layer is None else (slice(piece.layer, piece.layer + 1),)
        values = initial_values(piece.planned.parameter, seed, (*stack, *part))
        local = piece.local
        if local.numel() != values.size:
            raise WorkerError(f"{piece.name}: torch stores {tuple(local.shape)} on this device, the plan {part}")
        local.copy_(torch.from_numpy(values).reshape(local.shape))


def gather(pieces: Sequence[Piece], locals_: Iterable[Tensor], column: str, on: Placement) -> dict[str, np.ndarray]:
    """Whole parameters by name, stacked over layers, from each piece's local part in a column; in float32 on the host.

    One collective per parameter, over the axes that split it. All processes must call this together.
    """
    stacks: dict[str, list[tuple[Piece, Tensor]]] = {}
    for piece, local in zip(pieces, locals_, strict=True):
        stacks.setdefault(piece.name, []).append((piece, local))
    return {name: _gather_stack(stack, column, on) for name, stack in stacks.items()}


def _gather_stack(stack: list[tuple[Piece, Tensor]], column: str, on: Placement) -> np.ndarray:
    piece, mesh = stack[0][0], on.plan.mesh
    local = torch.stack([local for _, local in stack])
    axes = tuple(axis for axis in mesh.real_axes if axis in piece.layout(column).axes)
    whole = np.empty((len(stack), *piece.shape), np.float32)
    every = all_gather(local, on.group(axes)) if axes else [local]
    for place, part in zip(places(mesh, axes, on.place), every, strict=True):
        whole[(slice(None), *piece.part(column, mesh, place))] = part.float().cpu().numpy()
    return whole[0] if piece.layer is None else whole


def places(mesh: Mesh, axes: tuple[str, ...], place: dict[str, int]) -> list[dict[str, int]]:
    """Coordinates of the devices that differ from `place` only along these axes, in row-major order: ranks of their group."""
    found = [place]
    for axis in axes:
        found = [{**one, axis: index} for one in found for index in range(mesh.size(axis))]
    return found


def layouts(pieces: Iterable[Piece], on: Placement) -> dict[str, Layout]:
    """The layout that each parameter really has, read from its tensors; raises WorkerError where layers differ."""
    found: dict[str, Layout] = {}
    for piece in pieces:
        layout = _layout_of(piece, on)
        layout = layout if piece.layer is None else Layout(((), *layout.dims))
        if found.setdefault(piece.name, layout) != layout:
            raise WorkerError(f"{piece.name}: layer {piece.layer} lies as {layout.dims}, others as {found[piece.name].dims}")
    return found


def _layout_of(piece: Piece, on: Placement) -> Layout:
    parameter, dims = piece.parameter, _local_axes(piece, on)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True):
            if size > 1 and not placement.is_replicate():
                dims[placement.dim].extend(_axes_of(name, on))  # type: ignore[attr-defined]
    order = on.plan.mesh.names.index
    return Layout(tuple(tuple(sorted(axes, key=order)) for axes in dims))


def _local_axes(piece: Piece, on: Placement) -> list[list[str]]:
    """For each dim the axes that torch does not know of: where its tensor is as much smaller than the whole as they say."""
    mesh, layout = on.plan.mesh, piece.layout("compute").without(on.compute_axes)
    sizes = zip(piece.shape, piece.parameter.shape, layout.dims, strict=True)
    return [list(axes) if whole == size * mesh.split(axes) else [] for whole, size, axes in sizes]


def _axes_of(name: str, on: Placement) -> list[str]:
    """The mesh axes of a dim of a DTensor's mesh: one, or those that `Placement.submesh` has flattened."""
    return [name] if name in on.plan.mesh.names else name.split("_")


def digests(pieces: Iterable[Piece], on: Placement) -> dict[str, str]:
    """A digest of each part on this device, keyed `name[layer]|part`."""
    found = {}
    for piece in pieces:
        part = ",".join(f"{s.start}:{s.stop}" for s in piece.part("weights", on.plan.mesh, on.place))
        layer = "" if piece.layer is None else f"[{piece.layer}]"
        data = piece.local.contiguous().cpu().view(torch.uint8).numpy().tobytes()
        found[f"{piece.name}{layer}|{part}"] = hashlib.sha256(data).hexdigest()
    return found


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors on this device."""
    return sum(x.numel() * x.element_size() for x in map(local_of, tensors))
