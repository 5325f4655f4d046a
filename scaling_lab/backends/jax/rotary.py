"""Rotary positions (Su et al. 2021) in the half-split pairing of Llama, with Llama 3.1's frequency scaling. No layouts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from scaling_lab.models.model import Model, RopeScaling


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


def frequencies(model: Model) -> np.ndarray:
    """Radians per position of each pair, theta^(-2i / turned), scaled where the model says so; float32 [turned / 2]."""
    turned = model.latent.rope_dim if model.latent else model.head_dim
    plain = model.rope_theta ** (-np.arange(0, turned, 2) / turned)
    scaled = plain if model.rope_scaling is None else _scaled(plain, model.rope_scaling)
    return scaled.astype(np.float32)


def _scaled(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Divided by `factor` where the original sequence holds few turns, kept where it holds many, a ramp between.

    Source: Llama 3.1's reference code (`apply_scaling`), as Hugging Face's `rope_type="llama3"`.
    """
    turns = scaling.original_sequence * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / scaling.factor
