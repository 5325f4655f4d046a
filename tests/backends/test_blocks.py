"""Attention to some keys at a time against softmax written out in float64, in both backends: also more queries than a block has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from scaling_lab.backends.jax import blocks as of_jax
from scaling_lab.backends.torch import blocks as of_torch

#: (queries, keys, documents); causal where they are one part. A block has 8 queries here: one, some exactly, a ragged last one.
CASES = [(5, 5, False), (16, 16, True), (21, 21, False), (21, 21, True), (8, 3, False), (19, 7, True)]
SIZE, KV_HEADS, GROUP = 4, 2, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(of_jax, "ROWS", 8)
    monkeypatch.setattr(of_torch, "ROWS", 8)


def drawn(queries, keys, documents):
    random = np.random.default_rng(queries)
    query = random.standard_normal((2, KV_HEADS, GROUP, queries, SIZE))
    gradient = random.standard_normal(query.shape)
    key, value = random.standard_normal((2, 2, KV_HEADS, keys, SIZE))
    if not documents:
        return query, gradient, key, value, None, None
    of_query = np.arange(queries).reshape(1, -1, 1).repeat(2, axis=0) // 6
    of_key = of_query if queries == keys else np.arange(keys).reshape(1, -1, 1).repeat(2, axis=0) // 6
    return query, gradient, key, value, of_query, of_key


def written_out(query, gradient, key, value, of_query, of_key, causal):
    """Output and logsumexp, then the gradients of (output x gradient).sum() by the chain rule."""
    scores = np.einsum("bkgtd,bksd->bkgts", query, key) / np.sqrt(SIZE)
    seen = np.tril(np.ones(scores.shape[-2:], bool)) if causal else np.ones(scores.shape[-2:], bool)
    if of_query is not None:
        seen = (seen & (of_query == of_key.swapaxes(1, 2)))[:, None, None]
    weights = np.where(seen, np.exp(scores), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    output = np.einsum("bkgts,bksd->bkgtd", weights, value)
    d_weights = np.einsum("bkgtd,bksd->bkgts", gradient, value)
    d_scores = weights * (d_weights - (gradient * output).sum(axis=-1, keepdims=True)) / np.sqrt(SIZE)
    d_query, d_key = np.einsum("bkgts,bksd->bkgtd", d_scores, key), np.einsum("bkgts,bkgtd->bksd", d_scores, query)
    with np.errstate(divide="ignore"):
        return (output, np.log(total)), (d_query, d_key, np.einsum("bkgts,bkgtd->bksd", weights, gradient))


def in_jax(query, gradient, key, value, of_query, of_key, causal):
    attend, differentiate = (
        (of_jax.attended_causally, of_jax.causal_gradients) if causal else (of_jax.attended, of_jax.gradients)
    )

    def both(query, gradient, key, value):
        output, normaliser = attend((query, of_query), (key, value, of_key))
        shared = (gradient * output).sum(axis=-1, keepdims=True)
        asking = query, gradient, normaliser, shared, of_query
        return (output, normaliser), differentiate(asking, (key, value, of_key))

    return jax.jit(both)(*(jnp.asarray(x, jnp.float32) for x in (query, gradient, key, value)))


def in_torch(query, gradient, key, value, of_query, of_key, causal):
    query, gradient, key, value = (torch.tensor(x, dtype=torch.float32) for x in (query, gradient, key, value))
    of_query, of_key = (None if x is None else torch.tensor(x) for x in (of_query, of_key))
    part = torch.cat([key, value], dim=-1), of_key
    output, normaliser = of_torch.attended((query, of_query), part, causal=causal)
    asking = query, gradient, normaliser, (gradient * output).sum(dim=-1, keepdim=True), of_query
    d_query, d_keys = of_torch.gradients(asking, part, causal=causal)
    return (output, normaliser), (d_query, *of_torch.parted(d_keys, query))


@pytest.mark.parametrize("compute", [in_jax, in_torch])
@pytest.mark.parametrize("case", CASES)
def test_blocks_add_up_to_softmax_written_out(case, compute):
    queries, keys, _ = case
    arrays = drawn(*case)
    wanted, gradients = written_out(*arrays, causal=queries == keys)
    found, theirs = compute(*arrays, causal=queries == keys)
    for got, right in zip((*found, *theirs), (*wanted, *gradients), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-5)
