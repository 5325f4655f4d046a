"""Rotary positions (Su et al. 2021) in the half-split pairing of Llama, with Llama 3.1's frequency scaling. No layouts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scaling_lab.models.model import Model
from scaling_lab.models.rope import frequencies


def rotary_tables(model: Model, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., sequence, 1, turned / 2] of position x frequency, float32. positions: integers [..., sequence].

    turned: how many dims of a head are, all of them but with latent attention.
    """
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies(model)
    return jnp.cos(angles), jnp.sin(angles)


def rotary(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [batch, sequence, heads, turned] with the pairs (i, i + turned / 2) turned by their position's angle."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
