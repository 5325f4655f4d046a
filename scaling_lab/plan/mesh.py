"""The mesh: ordered named axes of devices, outermost = slowest link, cut into hosts. Pure arithmetic, no framework."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Devices laid out row-major over `axes`; hosts cut that order every `devices_per_host`.

    axes: name -> size pairs, outermost first, size 1 included
    chosen: axes whose size the `auto` rule chose (for showing)
    """

    axes: tuple[tuple[str, int], ...]
    hosts: int
    chosen: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def devices_per_host(self) -> int:
        """Devices of one host."""
        return self.devices // self.hosts

    def size(self, axis: str) -> int:
        """Size of one axis."""
        return dict(self.axes)[axis]

    def split(self, axes: tuple[str, ...]) -> int:
        """Into how many parts these axes together split a dim."""
        return math.prod(self.size(axis) for axis in axes)

    def part(self, axes: tuple[str, ...], place: dict[str, int]) -> int:
        """Which of the parts that these axes split a dim into belongs to the device with these coordinates."""
        part = 0
        for axis in axes:
            part = part * self.size(axis) + place[axis]
        return part

    def larger(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the axes that split anything."""
        return tuple(axis for axis in axes if self.size(axis) > 1)

    @property
    def real_axes(self) -> tuple[str, ...]:
        """Axes larger than 1, outermost first."""
        return tuple(name for name, size in self.axes if size > 1)

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device (its row-major index) lies on each axis."""
        place = {}
        for name, size in reversed(self.axes):
            device, place[name] = divmod(device, size)
        return {name: place[name] for name in self.names}

    def crossing_axes(self) -> tuple[str, ...]:
        """Axes along which some step leads from one host to another."""
        per_host = self.devices_per_host
        crossing = []
        stride = self.devices
        for name, size in self.axes:
            block = stride
            stride //= size
            if size > 1 and any(
                start // per_host != (start + block - stride) // per_host for start in self._line_starts(block, stride)
            ):
                crossing.append(name)
        return tuple(crossing)

    def _line_starts(self, block: int, stride: int) -> list[int]:
        """First device of every line of devices along an axis: `block` devices apart, `stride` lines in each."""
        return [base + offset for base in range(0, self.devices, block) for offset in range(stride)]


def product(mesh: Mesh) -> str:
    """The sizes in words: `fsdp 4 x tensor 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.axes if size > 1) or "every axis 1"
