"""Products and lookups that say where their results lie, for meshes whose axes are part of types (`backend.axis_types=explicit`).

There an operation whose result could lie in several ways is refused unless it is told, and none moves data that nobody asked to
move. With `auto` axes the same calls leave all of that to the partitioner. Must not know weights or the model.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.plan.layout import Layout


def einsum(on: Placement, equation: str, x: jax.Array, y: jax.Array, wanted: Layout | None = None, **options: Any) -> jax.Array:
    """`jnp.einsum`, its result laid out as wanted, or with each dim as in the operand that it comes from."""
    if not on.explicit:
        return jnp.einsum(equation, x, y, **options)
    if wanted is None:
        inputs, output = equation.split("->")
        found: dict[str, tuple[str, ...]] = {}
        for letters, operand in zip(inputs.split(","), (x, y), strict=True):
            for letter, axes in zip(letters, axes_of(operand), strict=True):
                found[letter] = found.get(letter) or axes
        wanted = Layout(tuple(found[letter] for letter in output))
    return jnp.einsum(equation, x, y, out_sharding=on.named(wanted), **options)


def reshaped(on: Placement, x: jax.Array, shape: tuple[int, ...], wanted: Layout) -> jax.Array:
    """`x.reshape`, its result laid out as wanted: which of a dim's new dims its mesh axes split is a choice."""
    return jax.lax.reshape(x, shape, out_sharding=on.named(wanted)) if on.explicit else x.reshape(shape)


def taken(on: Placement, table: jax.Array, indices: jax.Array) -> jax.Array:
    """Rows of a table, laid out as the indices are, and within a row as the table."""
    if not on.explicit:
        return table[indices]
    return table.at[indices].get(out_sharding=on.named(Layout((*axes_of(indices), *axes_of(table)[1:]))))


def added(on: Placement, shape: tuple[int, ...], indices: jax.Array, rows: jax.Array, wanted: Layout) -> jax.Array:
    """The adjoint: sums of rows, in a table laid out as wanted."""
    if not on.explicit:
        return on.laid_out(jnp.zeros(shape, rows.dtype).at[indices].add(rows), wanted)
    named = on.named(wanted)
    return jnp.zeros(shape, rows.dtype, device=named).at[indices].add(rows, out_sharding=named)


def axes_of(x: jax.Array) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dim, as its type says."""
    spec = jax.typeof(x).sharding.spec
    return tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)
