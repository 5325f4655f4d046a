"""Attention of some queries to some keys at a time, and its gradients: what an online softmax adds up. Must not know devices.

Scores of at most ROWS queries exist at once, so that memory is linear in the number of queries and of keys. All results are float32.
Trees of arrays: queries `asking`, in the forward pass (query, documents), in the backward one (query, gradient, normaliser, shared,
documents); keys `visiting`, (key, value, documents). Shapes: query b k g t d, key and value b k t d, statistics b k g t 1,
documents b t 1 or None: the sequence is always the last dim but one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

#: Queries of a block of scores, so few that these stay in a cache: 8,192 keys, 512 rows took 2.4 x the time of 128 on a Xeon.
ROWS = 128
#: Causal query blocks: n of them compute (n + 1) / 2n of the scores; more of them are more, smaller products.
MAX_BLOCKS, MIN_BLOCK = 4, 128

Tree = Any


def attended(asking: Tree, visiting: Tree) -> Tree:
    """Attention to these keys alone, and its logsumexp."""
    return _by_rows(partial(_found, visiting), (*asking, None), ())[0]


def attended_causally(asking: Tree, own: Tree) -> Tree:
    """The same of a part of the sequence to itself, whose order is the text's: blocks that the mask would discard are left out."""
    found = []
    for block, rows in _causal_rows(asking):
        keys = cut(own, slice(0, block.stop))
        found.append(_by_rows(partial(_found, keys), (*cut(asking, block), rows), ())[0])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=-2), *found)


def merged(one: Tree, other: Tree) -> Tree:
    """Attention to two sets of keys as one softmax, from that to each (Milakov and Gimelshein 2018, arXiv 1805.02867).

    A query has seen its own key before anything is merged: the sum's logarithm is finite.
    """
    (output, normaliser), (more, its) = one, other
    both = jnp.logaddexp(normaliser, its)
    return output * jnp.exp(normaliser - both) + more * jnp.exp(its - both), both


def gradients(asking: Tree, visiting: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of queries, keys and values, as far as these keys go."""
    d_query, sums = _by_rows(partial(_gradients, visiting), (*asking, None), _nothing(visiting))
    return d_query, *sums


def causal_gradients(asking: Tree, own: Tree) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same of `attended_causally`."""
    d_query, sums = [], _nothing(own)
    for block, rows in _causal_rows(asking):
        keys = cut(own, slice(0, block.stop))
        found, more = _by_rows(partial(_gradients, keys), (*cut(asking, block), rows), _nothing(keys))
        d_query.append(found)
        sums = tuple(total.at[..., : block.stop, :].add(x) for total, x in zip(sums, more, strict=True))
    return jnp.concatenate(d_query, axis=-2), *sums


def shared(gradient: jax.Array, output: jax.Array) -> jax.Array:
    """What the gradients of all of a query's scores have in common."""
    return (gradient.astype(jnp.float32) * output.astype(jnp.float32)).sum(axis=-1, keepdims=True)


def cut(tree: Tree, part: slice) -> Tree:
    """A part of the sequence of each array."""
    return jax.tree.map(lambda x: x[..., part, :], tree)


def _nothing(visiting: Tree) -> Tree:
    return tuple(jnp.zeros_like(x, jnp.float32) for x in visiting[:2])  # alike in layout too, where types have one


def _causal_rows(asking: Tree) -> list[tuple[slice, jax.Array]]:
    """Blocks of queries, each with the place of its queries in the part, (t, 1): no key after that is seen."""
    length = asking[0].shape[-2]
    size = max(MIN_BLOCK, -(-length // MAX_BLOCKS))
    blocks = [slice(start, min(start + size, length)) for start in range(0, length, size)]
    return [(block, jnp.arange(block.start, block.stop)[:, None]) for block in blocks]


def _by_rows(compute: Callable[[Tree], tuple[Tree, Tree]], asking: Tree, sums: Tree) -> tuple[Tree, Tree]:
    """`compute` of some queries after the others: asking -> (what is found for each query, what is added to `sums`)."""
    length = asking[0].shape[-2]
    chunks = -(-length // ROWS)
    if chunks == 1:
        found, more = compute(asking)
        return found, jax.tree.map(jnp.add, sums, more)
    size = -(-length // chunks)
    filled = chunks * size - length  # with zeros: queries whose gradient is zero add nothing

    def chunked(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, filled), (0, 0)])
        return jnp.moveaxis(x.reshape(*x.shape[:-2], chunks, size, x.shape[-1]), -3, 0)

    def one(sums: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        found, more = compute(chunk)
        return jax.tree.map(jnp.add, sums, more), found

    sums, found = jax.lax.scan(one, sums, jax.tree.map(chunked, asking))
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1]), found)
    return cut(joined, slice(0, length)), sums


def _scores(query: jax.Array, key: jax.Array, of_query: Tree, of_key: Tree, rows: Tree) -> jax.Array:
    """Scaled scores, -inf for keys after `rows`, where that is given, and for those of other documents."""
    scores = jnp.einsum("bkgtd,bksd->bkgts", query, key, preferred_element_type=jnp.float32) * query.shape[-1] ** -0.5
    if rows is not None:
        scores = jnp.where(jnp.arange(key.shape[-2]) <= rows, scores, -jnp.inf)
    if of_query is None:
        return scores
    return jnp.where((of_query == of_key.swapaxes(1, 2))[:, None, None], scores, -jnp.inf)


def _weights(scores: jax.Array, normaliser: jax.Array) -> jax.Array:
    """exp(scores - normaliser), 0 where a query sees none of the keys: both are -inf there."""
    return jnp.exp(scores - jnp.where(normaliser == -jnp.inf, 0.0, normaliser))


def _found(visiting: Tree, asking: Tree) -> tuple[Tree, Tree]:
    (query, of_query, rows), (key, value, of_key) = asking, visiting
    scores = _scores(query, key, of_query, of_key, rows)
    normaliser = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    weights = _weights(scores, normaliser).astype(query.dtype)
    return (jnp.einsum("bkgts,bksd->bkgtd", weights, value, preferred_element_type=jnp.float32), normaliser), ()


def _gradients(visiting: Tree, asking: Tree) -> tuple[Tree, Tree]:
    """Dao 2022 (arXiv 2205.14135), appendix B.2, of one block: of its queries, and of keys and values."""
    (query, gradient, normaliser, shared, of_query, rows), (key, value, of_key) = asking, visiting
    weights = _weights(_scores(query, key, of_query, of_key, rows), normaliser)
    d_weights = jnp.einsum("bkgtd,bksd->bkgts", gradient, value, preferred_element_type=jnp.float32)
    d_scores = (weights * (d_weights - shared) * query.shape[-1] ** -0.5).astype(query.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    d_query = product("bkgts,bksd->bkgtd", d_scores, key)
    d_key = product("bkgts,bkgtd->bksd", d_scores, query)
    return d_query, (d_key, product("bkgts,bkgtd->bksd", weights.astype(query.dtype), gradient))
