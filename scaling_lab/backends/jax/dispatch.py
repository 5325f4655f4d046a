"""Which rows an expert computes, and how rows travel between the devices of the experts' mesh axes. Inside a `shard_map`.

A token has an assignment for each of its experts, numbered tokens x k row-major; an expert computes a row for each assignment to
it. Must not know what an expert computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: num in all, in equal parts over the devices of mesh axes. room: rows of a sequence, None for all."""

    num: int
    axes: tuple[str, ...]
    parts: int
    room: int | None

    @property
    def local(self) -> int:
        """How many one device has."""
        return self.num // self.parts

    def own(self, chosen: jax.Array) -> jax.Array:
        """Numbers of experts as this device counts its own, from 0; others are negative, or `local` and beyond."""
        return chosen - jax.lax.axis_index(self.axes) * self.local if self.axes else chosen

    def gathered(self, x: jax.Array) -> jax.Array:
        """(tokens, ...) of this device -> those of all devices of the axes."""
        return jax.lax.all_gather(x, self.axes, tiled=True) if self.axes else x

    def scattered(self, x: jax.Array) -> jax.Array:
        """The adjoint: (tokens, ...) of all devices, summed over them -> those of this one."""
        return jax.lax.psum_scatter(x, self.axes, tiled=True) if self.axes else x

    def exchanged(self, rows: jax.Array) -> jax.Array:
        """(num, rows, ...) of this device's tokens -> (local, parts x rows, ...) of this device's experts."""
        return jax.lax.all_to_all(rows, self.axes, 0, 1, tiled=True) if self.axes else rows

    def returned(self, rows: jax.Array) -> jax.Array:
        """The adjoint and inverse of `exchanged`."""
        return jax.lax.all_to_all(rows, self.axes, 1, 0, tiled=True) if self.axes else rows


class Rows(NamedTuple):
    """Rows and assignments of each other, each out of the other's range where there is none.

    source (rows,): the assignment of a row; position (tokens, k): the row of an assignment
    """

    source: jax.Array
    position: jax.Array

    def of_tokens(self, x: jax.Array) -> jax.Array:
        """(tokens, ...) -> (rows, ...): each row's token, zeros without one."""
        return _taken(x, self.source // self.position.shape[1])

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """The adjoint: (rows, ...) -> (tokens, ...), the sum of a token's rows. A lookup as well, so no order of sums is left open."""
        return _taken(rows, self.position).sum(axis=1)

    def of_assignments(self, values: jax.Array) -> jax.Array:
        """(tokens, k) -> (rows,)."""
        return _taken(values.reshape(-1), self.source)

    def to_assignments(self, rows: jax.Array) -> jax.Array:
        """(rows,) -> (tokens, k)."""
        return _taken(rows, self.position)


def rows_at(position: jax.Array, rows: int) -> Rows:
    """From the row of each assignment (tokens, k), of `rows` in all; other numbers mean none."""
    source = jnp.full(rows, position.size, jnp.int32)
    numbers = jnp.arange(position.size, dtype=jnp.int32)
    return Rows(source.at[position.reshape(-1)].set(numbers, mode="drop"), position)


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0)
