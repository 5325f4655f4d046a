"""Rotary positions (Su et al. 2021) in the half-split pairing of Llama, with Llama 3.1's frequency scaling. No layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from scaling_lab.models.model import Model
from scaling_lab.models.rope import frequencies


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
