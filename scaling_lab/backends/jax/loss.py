"""Cross-entropy summed over valid tokens, in float32 whatever the logits are, and what routers add to the loss of a step.

Must not know how tokens are split.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from scaling_lab.models.model import Model


def cross_entropy_sum(logits: jax.Array, labels: jax.Array, vocab: int | None = None) -> jax.Array:
    """Sum over labels >= 0 of logsumexp(logits) - logits[label]: a float32 scalar.

    logits: [batch, sequence, padded vocab], those from `vocab` on never taking part; labels: [batch, sequence]. Written with a
    mask over the vocabulary, not a lookup, so that it stays local where the vocabulary is split; the gradient is one pass,
    softmax minus the mask.
    """
    return _cross_entropy_sum(logits.shape[-1] if vocab is None else vocab, logits, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy_sum(vocab: int, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(vocab, logits, labels)[0]


def _wide(vocab: int, logits: jax.Array) -> jax.Array:
    """The logits in float32, -inf where there is only padding."""
    wide = logits.astype(jnp.float32)
    if vocab == logits.shape[-1]:
        return wide
    return jnp.where(_column(logits) < vocab, wide, -jnp.inf)


def _forward(vocab, logits, labels):
    wide = _wide(vocab, logits)
    normaliser = jax.nn.logsumexp(wide, axis=-1)  # (batch, sequence)
    chosen = jnp.where(_is_label(logits, labels), wide, 0.0).sum(axis=-1)
    losses = jnp.where(labels >= 0, normaliser - chosen, 0.0)
    return losses.sum(), (logits, labels, normaliser)


def _backward(vocab, saved, scale):
    logits, labels, normaliser = saved
    softmax = jnp.exp(_wide(vocab, logits) - normaliser[..., None])
    weight = jnp.where(labels >= 0, scale, 0.0)[..., None]
    gradient = (softmax - _is_label(logits, labels)) * weight
    return gradient.astype(logits.dtype), None


def _is_label(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _column(logits) == labels[..., None]


def _column(logits: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


_cross_entropy_sum.defvjp(_forward, _backward)


def router_metrics(reported: Mapping[str, jax.Array], rows: int) -> dict[str, jax.Array]:
    """From what routers report of each row of a microbatch (b,): its share of the means over `rows` rows, and what it dropped."""
    return {name: x.sum() if name == "dropped_tokens" else x.sum() / rows for name, x in reported.items()}


def router_loss(model: Model, metrics: Mapping[str, jax.Array]) -> jax.Array | float:
    """What is added to the loss of a training step, 0 without experts."""
    if model.moe is None:
        return 0.0
    return model.moe.balance_loss * metrics["balance_loss"] + model.moe.z_loss * metrics["z_loss"]
