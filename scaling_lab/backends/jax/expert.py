"""One expert's mlp on the rows sent to it, and its gradients. Must not know where rows come from, nor meshes.

Hidden values are computed again in the backward pass: where an expert takes whatever comes, what to save for the most that might
come would be a multiple of what does come. It adds two products to the nine of both passes.
Shapes: r rows, e embed, f mlp. `into`: the matrices (e, f) up and, where there is one, gate; down (f, e); weight (r,) float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax.mlp import activated

#: into, down; or gradients of them.
Matrices = tuple[tuple[jax.Array, ...], jax.Array]


def mlp(rows: jax.Array, weight: jax.Array, matrices: Matrices) -> jax.Array:
    """(r, e) -> (r, e): weight x mlp(row)."""
    into, down = matrices
    return _weighted(activated(*(rows @ matrix for matrix in into)), weight, rows.dtype) @ down


def mlp_gradients(
    rows: jax.Array, weight: jax.Array, d_out: jax.Array, matrices: Matrices
) -> tuple[jax.Array, jax.Array, Matrices]:
    """Gradients of the rows (r, e), their weights (r,) and the matrices, the last two summed in float32."""
    into, down = matrices
    hidden, pull = jax.vjp(activated, *(rows @ matrix for matrix in into))  # (r, f)
    d_weighted = d_out @ down.T
    d_weight = (d_weighted.astype(jnp.float32) * hidden.astype(jnp.float32)).sum(axis=-1)
    d_inputs = pull(_weighted(d_weighted, weight, rows.dtype))
    d_rows = sum(d @ matrix.T for d, matrix in zip(d_inputs, into, strict=True))
    d_into = tuple(_summed(rows, d) for d in d_inputs)
    return d_rows, d_weight, (d_into, _summed(_weighted(hidden, weight, rows.dtype), d_out))


def _weighted(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    return (x * weight[:, None]).astype(dtype)


def _summed(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.einsum("ra,rb->ab", x, dy, preferred_element_type=jnp.float32)
