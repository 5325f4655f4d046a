"""The shuffled order: a random-access permutation, and the counter-based hash behind every pseudo-random choice of the data.

Owns reproducibility: all is integer arithmetic on (seed, purpose, counter), so nothing depends on a library's generator, on
who asks, or on what was asked before. Must not know tokens or files.
"""

from __future__ import annotations

import hashlib

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUNDS = 8


def key_for(seed: int, purpose: str) -> np.uint64:
    """An independent stream of `counter_hash` for each purpose, so that one seed never serves two choices."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def counter_hash(key: np.uint64 | np.ndarray, counter: np.ndarray) -> np.ndarray:
    """64 pseudo-random bits per counter, uint64: SplitMix64 (Steele, Lea, Flood 2014) at state key + (counter + 1) x step.

    counter: an array of at least one dim, since NumPy wraps arrays silently but warns where a scalar overflows.
    """
    bits = key + (counter.astype(np.uint64) + np.uint64(1)) * _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


def below(bits: np.ndarray, bound: int) -> np.ndarray:
    """Integers in [0, bound), int64, from 64 random bits each; bound <= 2**32. Multiply-shift: no bias that could be seen."""
    return (((bits >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def shuffled(index: np.ndarray, epoch: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Where each index in [0, size) stands in its epoch's shuffled order, int64; a bijection of [0, size) for each epoch.

    A Feistel network permutes the smallest 4**k >= size; what falls outside [0, size) is permuted again until it is inside
    (cycle-walking: Black, Rogaway 2002; fewer than 4 rounds expected). Costs nothing at start-up for any size.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    key = counter_hash(key_for(seed, "order"), epoch)
    value = _feistel(index.astype(np.uint64), key, half)
    while (outside := value >= np.uint64(size)).any():
        value[outside] = _feistel(value[outside], key[outside], half)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, key: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (counter_hash(key, right * np.uint64(_ROUNDS) + np.uint64(turn)) & mask)
    return (left << half) | right
