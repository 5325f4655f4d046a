"""The frequencies of rotary positions (Su et al. 2021), with Llama 3.1's scaling. NumPy only; imports no framework."""

from __future__ import annotations

import math

import numpy as np

from scaling_lab.models.model import Model, RopeScaling


def frequencies(model: Model) -> np.ndarray:
    """Radians per position of each pair, theta^(-2i / turned), scaled where the model says so; float32 [turned / 2].

    turned: head_dim, or the size of the part of a head that latent attention turns.
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
