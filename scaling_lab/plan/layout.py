"""The layout of one tensor: one fact, two readings. Per dim: which mesh axes. Per mesh axis: which dim, or none."""

from __future__ import annotations

from dataclasses import dataclass

from scaling_lab.plan.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """dims: for each dim of the tensor, the mesh axes that split it, outermost first; () where it is whole."""

    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split the tensor."""
        return tuple(axis for dim in self.dims for axis in dim)

    def dim_of(self, axis: str) -> int | None:
        """The dim that a mesh axis splits, or None: the reading of DTensor's `Shard(dim)` / `Replicate()`."""
        return next((dim for dim, axes in enumerate(self.dims) if axis in axes), None)

    def without(self, axes: tuple[str, ...]) -> Layout:
        """The layout after gathering over these mesh axes."""
        return Layout(tuple(tuple(axis for axis in dim if axis not in axes) for dim in self.dims))

    def real(self, mesh: Mesh) -> Layout:
        """The layout without axes of size 1."""
        return self.without(tuple(axis for axis in self.axes if mesh.size(axis) == 1))

    def drop_dim(self, dim: int) -> Layout:
        """The layout of a slice that takes one index of a dim, such as one layer of the stack."""
        return Layout(self.dims[:dim] + self.dims[dim + 1 :])

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape of the part that one device holds; every dim divides, as the plan has checked."""
        return tuple(size // mesh.split(axes) for size, axes in zip(shape, self.dims, strict=True))

    def local_slices(self, shape: tuple[int, ...], mesh: Mesh, place: dict[str, int]) -> tuple[slice, ...]:
        """Which part of the global tensor lies on the device with these coordinates."""
        slices = []
        for size, axes in zip(shape, self.dims, strict=True):
            index, part = mesh.part(axes, place), size // mesh.split(axes)
            slices.append(slice(index * part, (index + 1) * part))
        return tuple(slices)
