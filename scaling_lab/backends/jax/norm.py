"""Norms, their statistics in float32: of the residual stream, of each head's queries and keys, of narrow vectors."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scaling_lab.backends.jax.products import Weight, plus, use
from scaling_lab.backends.jax.sharding import Placement


class Norm:
    """x (b, t, e) -> (b, t, e): RMSNorm, or LayerNorm where it has a bias."""

    on: Placement
    eps: float
    scale: Weight
    bias: Weight | None

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        return plus(self.on, _unit(wide, self.eps).astype(x.dtype) * use(self.on, self.scale), self.bias)


def rms_norm(on: Placement, x: jax.Array, scale: Weight, eps: float) -> jax.Array:
    """RMSNorm over the last dim."""
    return _unit(x.astype(jnp.float32), eps).astype(x.dtype) * use(on, scale)


def _unit(x: jax.Array, eps: float) -> jax.Array:
    """x with a mean square of 1 over the last dim."""
    return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
