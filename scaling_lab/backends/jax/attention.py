"""Causal self-attention, in two forms with one meaning: `plain` (softmax written out) and `fused` (scores never kept whole).

Softmax is in float32 whatever the compute dtype. Must not know meshes or layouts.
Shapes: query [batch, sequence, heads, head_dim]; key [batch, sequence, kv_heads, head_dim]; value [batch, sequence, kv_heads,
value_dim], value_dim often head_dim; heads = kv_heads x group, query head h reading key head h // group; documents
[batch, sequence]: numbers of the documents packed in a row, or None. The result is [batch, sequence, heads, value_dim].
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scaling_lab.backends.jax.remat import ATTENTION_NORMALISER, ATTENTION_OUTPUT

#: Causal query blocks on CPU: n blocks compute (n + 1) / 2n of the scores; more of them are more, smaller products.
MAX_BLOCKS, MIN_BLOCK = 4, 128


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None, *, form: str, platform: str
) -> jax.Array:
    """Causal attention in a form: `plain`, or `fused` (blocks on CPU, what JAX chooses on accelerators)."""
    if form == "plain":
        return plain(query, key, value, documents)
    if platform == "cpu":
        return blocked(query, key, value, documents)
    return _library(query, key, value, None if documents is None else same_document(documents, documents)[:, None])


def same_document(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Document numbers (batch, t) and (batch, s) -> (batch, t, s): whether a query may see a key as far as they go."""
    return queries[:, :, None] == keys[:, None, :]


def _library(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
    """What JAX chooses. It wants one size of query, key and value: the smaller are filled up with zeros, which add nothing."""
    size = max(query.shape[-1], value.shape[-1])
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1]))) for x in (query, key, value))
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=query.shape[-1] ** -0.5)
    return mixed[..., : value.shape[-1]]


def plain(query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """softmax(query key' / sqrt(head_dim)) value, over keys of the same document no later than the query."""
    batch, sequence, _, head_dim = query.shape
    grouped = query.reshape(batch, sequence, key.shape[2], -1, head_dim)  # (batch, sequence, kv_heads, group, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32) * head_dim**-0.5
    seen = jnp.tril(jnp.ones((sequence, sequence), bool))
    if documents is not None:
        seen = (seen & same_document(documents, documents))[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)  # (batch, kv_heads, group, sequence, sequence)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(*query.shape[:3], -1)


@jax.custom_vjp
def blocked(query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """The same, a block of queries at a time against the keys up to its end: what the mask would discard is not computed."""
    return _forward(query, key, value, documents)[0]


def causal_blocks(sequence: int) -> list[slice]:
    """Blocks of queries, few of them; each needs the keys up to its own end only."""
    size = max(MIN_BLOCK, -(-sequence // MAX_BLOCKS))
    return [slice(start, min(start + size, sequence)) for start in range(0, sequence, size)]


def _heads_first(x: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, sequence, heads, head_dim) -> (batch, kv_heads, group, sequence, head_dim)."""
    batch, sequence, _, head_dim = x.shape
    return x.reshape(batch, sequence, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def _scores(query, key, documents, block: slice):
    """Scaled scores of a block of queries against all keys up to its end, -inf where the key is later or of another document."""
    scores = jnp.einsum("bkgtd,bksd->bkgts", query[:, :, :, block], key[:, :, : block.stop], preferred_element_type=jnp.float32)
    later = jnp.arange(block.stop)[None, :] > jnp.arange(block.start, block.stop)[:, None]
    if documents is not None:
        later = later | ~same_document(documents[:, block], documents[:, : block.stop])[:, None, None]
    return jnp.where(later, -jnp.inf, scores * query.shape[-1] ** -0.5)


def _forward(query, key, value, documents):
    kv_heads = key.shape[2]
    q, k, v = _heads_first(query, kv_heads), key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    outputs, normalisers = [], []
    for block in causal_blocks(query.shape[1]):
        scores = _scores(q, k, documents, block)
        normaliser = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - normaliser[..., None]).astype(query.dtype)
        outputs.append(jnp.einsum("bkgts,bksd->bkgtd", weights, v[:, :, : block.stop]))
        normalisers.append(normaliser)
    output = jnp.concatenate(outputs, axis=3).transpose(0, 3, 1, 2, 4).reshape(*query.shape[:3], -1)
    output = checkpoint_name(output, ATTENTION_OUTPUT)
    normaliser = checkpoint_name(jnp.concatenate(normalisers, axis=3), ATTENTION_NORMALISER)
    return output, (query, key, value, documents, output, normaliser)


def _backward(saved, gradient):
    """Dao 2022 (arXiv 2205.14135), appendix B.2: dscores = weights * (doutput value' - rowsum(doutput * output))."""
    query, key, value, documents, output, normaliser = saved
    kv_heads = key.shape[2]
    q, k, v = _heads_first(query, kv_heads), key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    d_out, out = _heads_first(gradient, kv_heads), _heads_first(output, kv_heads)
    shared = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)  # (batch, kv_heads, group, sequence)
    d_query = []
    d_key, d_value = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for block in causal_blocks(query.shape[1]):
        keys = slice(0, block.stop)
        weights = jnp.exp(_scores(q, k, documents, block) - normaliser[:, :, :, block, None])
        d_weights = jnp.einsum("bkgtd,bksd->bkgts", d_out[:, :, :, block], v[:, :, keys], preferred_element_type=jnp.float32)
        d_scores = (weights * (d_weights - shared[:, :, :, block, None]) * q.shape[-1] ** -0.5).astype(query.dtype)
        d_query.append(jnp.einsum("bkgts,bksd->bkgtd", d_scores, k[:, :, keys]))
        sums = partial(jnp.einsum, "bkgts,bkgtd->bksd", preferred_element_type=jnp.float32)
        d_key = d_key.at[:, :, keys].add(sums(d_scores, q[:, :, :, block]))
        d_value = d_value.at[:, :, keys].add(sums(weights.astype(query.dtype), d_out[:, :, :, block]))
    d_q = jnp.concatenate(d_query, axis=3).transpose(0, 3, 1, 2, 4).reshape(query.shape)
    return d_q, d_key.transpose(0, 2, 1, 3).astype(key.dtype), d_value.transpose(0, 2, 1, 3).astype(value.dtype), None


blocked.defvjp(_forward, _backward)
