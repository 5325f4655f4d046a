"""Initial weights: element i of a parameter is a pure function of (seed, name, i). The same bits for every layout and backend.

Counter-based, so a process draws only what it holds. NumPy on the host; must not know meshes or frameworks.
"""

from __future__ import annotations

import numpy as np

from scaling_lab.data.order import counter_hash, key_for
from scaling_lab.models.parameters import Parameter


def initial_values(parameter: Parameter, seed: int, part: tuple[slice, ...]) -> np.ndarray:
    """The initial values of a part of a parameter, float32, shaped as the part.

    part: a slice with explicit start and stop for each dim of the parameter's global shape. Padding is zero.
    """
    shape = tuple(s.stop - s.start for s in part)
    if parameter.init == "ones":
        return np.ones(shape, np.float32)
    if parameter.init == "zeros":
        return np.zeros(shape, np.float32)
    values = np.zeros(shape, np.float32)
    used = tuple(slice(s.start, max(s.start, min(s.stop, size))) for s, size in zip(part, parameter.used_shape, strict=True))
    _fill(values[tuple(slice(s.stop - s.start) for s in used)], parameter, key_for(seed, parameter.name), used)
    return values


def _fill(values: np.ndarray, parameter: Parameter, key: np.uint64, part: tuple[slice, ...]) -> None:
    """Normal values into an array shaped as the part; elements are numbered without padding, which so changes no value."""
    inner = _offsets(parameter.used_shape[1:], part[1:])
    row_size = np.uint64(np.prod(parameter.used_shape[1:], dtype=np.int64))
    for row in range(len(values)):
        index = np.atleast_1d(inner + np.uint64(part[0].start + row) * row_size)
        values[row] = _normal(counter_hash(key, index)).reshape(inner.shape) * np.float32(parameter.std)


def _offsets(shape: tuple[int, ...], part: tuple[slice, ...]) -> np.ndarray:
    """Row-major offsets, within one row of dim 0, of the elements of a part."""
    offsets = np.zeros((), np.uint64)
    for size, piece in zip(shape, part, strict=True):
        offsets = offsets[..., None] * np.uint64(size) + np.arange(piece.start, piece.stop, dtype=np.uint64)
    return offsets


def _normal(bits: np.ndarray) -> np.ndarray:
    """Standard normal values from 64 random bits each (Box and Muller 1958: two 24-bit uniforms, one of the pair kept)."""
    radius = (((bits >> np.uint64(40)).astype(np.float32)) + np.float32(0.5)) * np.float32(2**-24)
    angle = ((bits & np.uint64(0xFFFFFF)).astype(np.float32)) * np.float32(2 * np.pi * 2**-24)
    return np.sqrt(np.float32(-2) * np.log(radius)) * np.cos(angle)
