"""Rotary positions (Su et al. 2021) in the half-split pairing of Llama, with Llama 3.1's frequency scaling. No layouts."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from scaling_lab.models.model import Model, RopeScaling


def rotary_tables(model: Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., sequence, 1, turned dims / 2] of position x frequency, float32. positions: integers [..., sequence]."""
    angles = positions.float()[..., None, None] * torch.from_numpy(frequencies(model)).to(positions.device)
    return angles.cos(), angles.sin()


def rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, sequence, heads, head_dim] with the pairs (i, i + head_dim / 2) turned by their position's angle."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def frequencies(model: Model) -> np.ndarray:
    """Radians per position of each pair, theta^(-2i / d), scaled where the model says so; float32 [d / 2].

    d is head_dim, or the size of the part of a head that latent attention turns.
    """
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
