"""Cross-entropy summed over valid tokens, in float32 whatever the logits are. Must not know how tokens are counted or split."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy_sum(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Sum over labels >= 0 of logsumexp(logits) - logits[label]: a float32 scalar.

    logits: [batch, sequence, vocab]; labels: [batch, sequence]. Written with a mask over the vocabulary, not a lookup, so that
    it stays local where the vocabulary is split; the gradient is one pass, softmax minus the mask.
    """
    return _forward(logits, labels)[0]


def _forward(logits, labels):
    wide = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(wide, axis=-1)  # (batch, sequence)
    chosen = jnp.where(_is_label(logits, labels), wide, 0.0).sum(axis=-1)
    losses = jnp.where(labels >= 0, normaliser - chosen, 0.0)
    return losses.sum(), (logits, labels, normaliser)


def _backward(saved, scale):
    logits, labels, normaliser = saved
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    weight = jnp.where(labels >= 0, scale, 0.0)[..., None]
    gradient = (softmax - _is_label(logits, labels)) * weight
    return gradient.astype(logits.dtype), None


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]


cross_entropy_sum.defvjp(_forward, _backward)
