"""Experts that take whatever comes. A device computes for all tokens of the experts' axes what its own experts add to them.

Shapes are fixed before it is known how many assignments an expert gets, and all might go to one device's experts. So tokens, not
assignments, are exchanged: an all-gather over the experts' axes, and a reduce-scatter of the sums; both again in the backward
pass, with a second all-gather for the gradients. Of n devices with T tokens of e elements, each receives (n - 1) x T x e elements
by each of the five, where an exchange of exactly the assignments (k a token) would be about k x T x e x (n - 1) / n, but for room
that nobody can name beforehand: the all-gather costs n / k times as much, and no more for n up to k. What does not grow with the
worst case is the work: an expert's rows are taken in blocks, as many as there are, by loops of that many turns.
Shapes: T tokens, those of all devices of the axes; k experts a token; r rows of a block; e embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax.dispatch import Experts, Rows, rows_at
from scaling_lab.backends.jax.expert import Matrices, mlp, mlp_gradients

#: An expert's last block is half empty on average: small beside its even share of rows, large enough for a product.
BLOCKS, MIN_BLOCK, MAX_BLOCK = 8, 16, 512


class Sorted(NamedTuple):
    """Assignments to this device's experts in the order of the experts, in which each has rows `first` to `first + count`."""

    rows: Rows
    first: jax.Array
    count: jax.Array
    block: int


def forward(experts: Experts, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices) -> tuple[jax.Array, Any]:
    """x (b x t, e), weights (b x t, k), chosen (b, t, k) of this device -> y; nothing to save."""
    order = _sorted(experts, experts.gathered(chosen.reshape(weights.shape)))
    tokens, weights = experts.gathered(x), experts.gathered(weights)

    def block(rows: Rows, matrices: Matrices, _: Any) -> tuple[tuple[jax.Array], None]:
        return (mlp(rows.of_tokens(tokens), rows.of_assignments(weights), matrices),), None

    empty = (jnp.zeros((len(order.rows.source), x.shape[1]), x.dtype),)
    (out,), _ = _each_block(order, block, empty, matrices, lambda _: None)
    return experts.scattered(order.rows.to_tokens(out)), ()


def backward(
    experts: Experts, x: jax.Array, chosen: jax.Array, weights: jax.Array, matrices: Matrices, saved: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array, Matrices]:
    """Gradients of x, of the weights and, float32, of this device's matrices."""
    order = _sorted(experts, experts.gathered(chosen.reshape(weights.shape)))
    tokens, weights, d_tokens = experts.gathered(x), experts.gathered(weights), experts.gathered(dy)

    def block(rows: Rows, matrices: Matrices, sums: Matrices) -> tuple[tuple[jax.Array, jax.Array], Matrices]:
        given = rows.of_tokens(tokens), rows.of_assignments(weights), rows.of_tokens(d_tokens)
        d_rows, d_weight, more = mlp_gradients(*given, matrices)
        return (d_rows, d_weight), jax.tree.map(jnp.add, sums, more)

    num = len(order.rows.source)
    empty = jnp.zeros((num, x.shape[1]), x.dtype), jnp.zeros(num, jnp.float32)
    (d_rows, d_weight), d_matrices = _each_block(order, block, empty, matrices, _nothing)
    dx, d_weights = order.rows.to_tokens(d_rows), order.rows.to_assignments(d_weight)
    return experts.scattered(dx), experts.scattered(d_weights), d_matrices


def _nothing(matrices: Matrices) -> Matrices:
    return jax.tree.map(lambda matrix: jnp.zeros(matrix.shape, jnp.float32), matrices)


def _sorted(experts: Experts, chosen: jax.Array) -> Sorted:
    """Of assignments (T, k). By counting: an assignment's place is its expert's first row and how many came before it."""
    share = chosen.size // experts.num
    block = min(MAX_BLOCK, max(MIN_BLOCK, 1 << (share // BLOCKS).bit_length()))
    assigned = experts.own(chosen).reshape(-1, 1) == jnp.arange(experts.local)  # (T x k, experts)
    upto = jnp.cumsum(assigned, axis=0, dtype=jnp.int32)
    count = upto[-1]
    first = jnp.cumsum(count) - count
    num = chosen.size + block  # a block that begins among the last rows ends beyond them
    position = jnp.where(assigned.any(axis=-1), ((first + upto - 1) * assigned).sum(axis=-1), num)
    return Sorted(rows_at(position.reshape(chosen.shape), num), first, count, block)


def _each_block(
    order: Sorted, compute: Callable[..., Any], results: tuple[jax.Array, ...], matrices: Matrices, start: Callable[..., Any]
) -> tuple[tuple[jax.Array, ...], Any]:
    """(rows of a block, matrices of its expert, sums so far) -> (results of the rows, sums), over all blocks of all experts.

    Returns the results of all rows, and the sums of each expert, which begin as `start` of its matrices.
    """

    def expert(results, of_expert):
        matrices, first, count = of_expert

        def block(number, carried):
            results, sums = carried
            begin = first + number * order.block
            source = jax.lax.dynamic_slice(order.rows.source, (begin,), (order.block,))
            inside = number * order.block + jnp.arange(order.block) < count
            rows = Rows(jnp.where(inside, source, order.rows.position.size), order.rows.position)
            found, sums = compute(rows, matrices, sums)
            # Beyond the expert's last row a block writes zeros, which the next expert's rows then take the place of.
            return tuple(jax.lax.dynamic_update_slice_in_dim(a, x, begin, 0) for a, x in zip(results, found, strict=True)), sums

        return jax.lax.fori_loop(0, -(-count // order.block), block, (results, start(matrices)))

    return jax.lax.scan(expert, results, (matrices, order.first, order.count))
