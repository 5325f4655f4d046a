"""Experts with room for a number of rows of each sequence. Rows are sent to the devices of their experts by an all-to-all.

Every expert computes all of its room, filled or not: shapes are fixed, and each device does the same work. Each of n devices
receives experts x room x e x (n - 1) / n elements a sequence by each of four exchanges: there and back, in both passes.
Shapes: b sequences, t tokens, k experts a token, e embed; rows (experts, sequences x room, e).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax.dispatch import Experts, Rows, rows_at
from scaling_lab.backends.jax.expert import Matrices, mlp, mlp_gradients


def forward(experts: Experts, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices) -> tuple[jax.Array, Any]:
    """x (b x t, e), weights (b x t, k), chosen (b, t, k) of this device -> y; to save: what came to its experts."""
    slots = _slots(experts, chosen)
    came = _sent(experts, slots.of_tokens(x)), _sent(experts, slots.of_assignments(weights))
    return slots.to_tokens(_back(experts, jax.vmap(mlp)(*came, matrices))), came


def backward(
    experts: Experts, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices, saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Matrices]:
    """Gradients of x, of the weights and, float32, of this device's matrices."""
    slots = _slots(experts, chosen)
    d_out = _sent(experts, slots.of_tokens(dy))
    d_rows, d_weight, d_matrices = jax.vmap(mlp_gradients)(*saved, d_out, matrices)
    return slots.to_tokens(_back(experts, d_rows)), slots.to_assignments(_back(experts, d_weight)), d_matrices


def _slots(experts: Experts, chosen: jax.Array) -> Rows:
    """Of assignments (b, t, k): an expert's rows are those of the first sequence, then of the next, each in the order of tokens."""
    assert experts.room is not None
    sequences, _, k = chosen.shape
    assigned = chosen.reshape(sequences, -1, 1) == jnp.arange(experts.num)  # (b, t x k, experts)
    slot = (jnp.cumsum(assigned, axis=1, dtype=jnp.int32) * assigned).sum(axis=-1).reshape(chosen.shape) - 1
    sequence = jnp.arange(sequences)[:, None, None]
    num = experts.num * sequences * experts.room
    position = jnp.where(chosen < experts.num, (chosen * sequences + sequence) * experts.room + slot, num)
    return rows_at(position.reshape(-1, k), num)


def _sent(experts: Experts, rows: jax.Array) -> jax.Array:
    """Rows (rows of all experts, ...) of this device's tokens -> (its experts, rows, ...)."""
    return experts.exchanged(rows.reshape(experts.num, -1, *rows.shape[1:]))


def _back(experts: Experts, rows: jax.Array) -> jax.Array:
    """The inverse."""
    returned = experts.returned(rows)
    return returned.reshape(-1, *returned.shape[2:])
