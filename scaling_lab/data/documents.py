"""Where the documents of a corpus begin, asked for one part of the token stream at a time.

Owns what a border is: the first token of a document. Must not know rows, nor what separates documents in a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Borders(Protocol):
    """Random access to where documents begin, as positions in the token stream: listed, memory-mapped, or computed."""

    @property
    def count(self) -> int | None:
        """Documents in the whole corpus; None where that is unknown."""

    def starts(self, first: int, stop: int) -> np.ndarray:
        """The positions in [first, stop) at which a document begins, ascending, int64."""


@dataclass(frozen=True, eq=False)
class ListedBorders:
    """positions: every start in the corpus, ascending, int64; a document without tokens has none."""

    positions: np.ndarray

    @property
    def count(self) -> int:
        """Documents that hold a token."""
        return len(self.positions)

    def starts(self, first: int, stop: int) -> np.ndarray:
        """Found by bisection, so that a list that is memory-mapped is not read whole."""
        low, high = np.searchsorted(self.positions, (first, stop))
        return self.positions[low:high]


def borders_of_lengths(lengths: Iterable[int]) -> ListedBorders:
    """Documents of these lengths, one after the other."""
    held = np.array([length for length in lengths if length], np.int64)
    return ListedBorders(np.cumsum(held) - held)
