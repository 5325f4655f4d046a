"""Uniform tokens that exist only when asked for: for throughput, and for tests that need no text.

Owns their values, and where their documents begin.
"""

from __future__ import annotations

import numpy as np

from scaling_lab.data.corpus import Corpus, Facts
from scaling_lab.data.order import below, counter_hash, key_for

#: Tokens of the corpus that is never stored: enough that no run repeats itself soon, few enough that validation ends.
SYNTHETIC_TOKENS = 2**30

#: Mean length of a document in tokens: short, so that small rows hold several. A power of two, which divides 2**64.
MEAN_DOCUMENT = 64


def synthetic_corpus(seed: int, vocab: int) -> Corpus:
    """Token i is a pure function of (seed, i), uniform in [0, vocab); so is whether a document begins there, 1 time in 64."""
    return Corpus(_UniformTokens(seed, vocab), Facts(None, None, 0, vocab - 1), _HashedBorders(seed))


class _UniformTokens:
    def __init__(self, seed: int, vocab: int):
        self.key, self.vocab = key_for(seed, "synthetic"), vocab

    def __len__(self) -> int:
        return SYNTHETIC_TOKENS

    def __getitem__(self, part: slice, /) -> np.ndarray:
        counters = np.arange(*part.indices(SYNTHETIC_TOKENS), dtype=np.uint64)
        return below(counter_hash(self.key, counters), self.vocab).astype(np.int32)


class _HashedBorders:
    """Counting them would mean to compute them all: the count is unknown."""

    count = None

    def __init__(self, seed: int):
        self.key = key_for(seed, "documents")

    def starts(self, first: int, stop: int) -> np.ndarray:
        bits = counter_hash(self.key, np.arange(first, stop, dtype=np.uint64))
        return first + np.flatnonzero(bits < np.uint64(2**64 // MEAN_DOCUMENT))
