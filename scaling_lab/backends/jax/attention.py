"""Causal self-attention, in two forms with one meaning: `plain` (softmax written out) and `fused` (scores never kept whole).

Softmax is in float32 whatever the compute dtype. Must not know meshes or layouts.
Shapes: query [batch, sequence, heads, head_dim]; key [batch, sequence, kv_heads, head_dim]; value [batch, sequence, kv_heads,
value_dim], value_dim often head_dim; heads = kv_heads x group, query head h reading key head h // group; documents
[batch, sequence]: numbers of the documents packed in a row, or None. The result is [batch, sequence, heads, value_dim].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from scaling_lab.backends.jax import blocks
from scaling_lab.backends.jax.remat import ATTENTION_NORMALISER, ATTENTION_OUTPUT


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


def _heads_first(x: jax.Array, kv_heads: int) -> jax.Array:
    """(batch, sequence, heads, head_dim) -> (batch, kv_heads, group, sequence, head_dim)."""
    batch, sequence, _, head_dim = x.shape
    return x.reshape(batch, sequence, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)


def _heads_back(x: jax.Array) -> jax.Array:
    """(batch, kv_heads, group, sequence, head_dim) -> (batch, sequence, heads, head_dim)."""
    batch, _, _, sequence, head_dim = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, sequence, -1, head_dim)


def _arranged(query, key, value, documents):
    """As `blocks` wants them."""
    numbers = None if documents is None else documents[..., None]
    own = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), numbers
    return _heads_first(query, key.shape[2]), own


def _forward(query, key, value, documents):
    q, own = _arranged(query, key, value, documents)
    output, normaliser = blocks.attended_causally((q, own[2]), own)
    output = checkpoint_name(_heads_back(output).astype(query.dtype), ATTENTION_OUTPUT)
    return output, (query, key, value, documents, output, checkpoint_name(normaliser, ATTENTION_NORMALISER))


def _backward(saved, gradient):
    query, key, value, documents, output, normaliser = saved
    q, own = _arranged(query, key, value, documents)
    d_out, out = (_heads_first(x, key.shape[2]) for x in (gradient, output))
    asking = q, d_out, normaliser, blocks.shared(d_out, out), own[2]
    d_query, d_key, d_value = blocks.causal_gradients(asking, own)
    d_key, d_value = d_key.transpose(0, 2, 1, 3).astype(key.dtype), d_value.transpose(0, 2, 1, 3).astype(value.dtype)
    return _heads_back(d_query).astype(query.dtype), d_key, d_value, None


blocked.defvjp(_forward, _backward)
