"""Uniform tokens that exist only when asked for: for throughput, and for tests that need no text. Owns their values."""

from __future__ import annotations

import numpy as np

from scaling_lab.data.corpus import Corpus, Facts
from scaling_lab.data.order import below, counter_hash, key_for

#: Tokens of the corpus that is never stored: enough that no run repeats itself soon, few enough that validation ends.
SYNTHETIC_TOKENS = 2**30


def synthetic_corpus(seed: int, vocab: int) -> Corpus:
    """Token i is a pure function of (seed, i), uniform in [0, vocab)."""
    return Corpus(_UniformTokens(seed, vocab), Facts(None, None, 0, vocab - 1))


class _UniformTokens:
    def __init__(self, seed: int, vocab: int):
        self.key, self.vocab = key_for(seed, "synthetic"), vocab

    def __len__(self) -> int:
        return SYNTHETIC_TOKENS

    def __getitem__(self, part: slice, /) -> np.ndarray:
        counters = np.arange(*part.indices(SYNTHETIC_TOKENS), dtype=np.uint64)
        return below(counter_hash(self.key, counters), self.vocab).astype(np.int32)
