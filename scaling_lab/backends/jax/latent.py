"""Latent attention, whose keys and values are made from one narrow vector a token: the equations of `models.latent`.

Shapes: b batch, t sequence, e embed, h heads, d a head's query (nope_dim, then rope_dim), v its value, r a narrow vector.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from scaling_lab.backends.jax import context
from scaling_lab.backends.jax.norm import rms_norm
from scaling_lab.backends.jax.products import Weight, product
from scaling_lab.backends.jax.rotary import rotary
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.models.model import Latent

NARROW = ("batch", "sequence", None)
HEADS = ("batch", "sequence", "heads", None)


class LatentAttention:
    """x (b, t, e) -> (b, t, e). `query`, or with a narrow vector for queries too the three after it."""

    on: Placement
    form: str
    eps: float
    latent: Latent
    query: Weight | None
    query_down: Any
    query_down_norm: Any
    query_up: Any
    kv_down: Weight
    kv_down_norm: Weight
    kv_up: Weight
    output: Weight

    def __call__(self, x, tables, documents):
        on, latent = self.on, self.latent
        query = self._query(x)  # (b, t, h, d)
        down = on.constrain(product(on, "bte,er->btr", x, self.kv_down), NARROW)  # (b, t, r and rope_dim)
        narrow, turned = jnp.split(down, [latent.kv_rank], axis=-1)
        narrow = rms_norm(on, narrow, self.kv_down_norm, self.eps)
        up = on.constrain(product(on, "btr,rhd->bthd", narrow, self.kv_up), HEADS)  # (b, t, h, nope_dim and v)
        key, value = jnp.split(up, [latent.nope_dim], axis=-1)
        kept, turning = jnp.split(query, [latent.nope_dim], axis=-1)
        query = jnp.concatenate([kept, rotary(turning, tables)], axis=-1)
        turned = rotary(turned[:, :, None], tables)  # (b, t, 1, rope_dim), of all heads
        turned = on.constrain(jnp.broadcast_to(turned, (*key.shape[:3], latent.rope_dim)), HEADS)
        key = jnp.concatenate([key, turned], axis=-1)  # (b, t, h, d)
        query, key, value = (on.constrain(y, HEADS) for y in (query, key, value))
        mixed = on.constrain(context.attend(query, key, value, documents, form=self.form, on=on), HEADS)  # (b, t, h, v)
        return product(on, "bthv,hve->bte", mixed, self.output)

    def _query(self, x):
        on = self.on
        if self.query is not None:
            return on.constrain(product(on, "bte,ehd->bthd", x, self.query), HEADS)
        narrow = on.constrain(product(on, "bte,er->btr", x, self.query_down), NARROW)
        narrow = rms_norm(on, narrow, self.query_down_norm, self.eps)
        return on.constrain(product(on, "btr,rhd->bthd", narrow, self.query_up), HEADS)
