"""A corpus: one long array of token ids, where its documents begin, and the facts recorded about it.

Must not know rows, batches or order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scaling_lab.data.documents import Borders, borders_of_lengths

_SEPARATOR = b"\n"


class Tokens(Protocol):
    """What is asked of an array of token ids: its length, and slices of it. In memory, memory-mapped, or computed."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


@dataclass(frozen=True)
class Facts:
    """sha256: of the ids as stored (for byte tokens: of the text); size_bytes: of the files read; largest: token id.

    None where it has no meaning (computed tokens).
    """

    sha256: str | None
    size_bytes: int | None
    files: int
    largest: int


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids, integers of any width, with their facts. borders: None where nothing says where documents begin."""

    tokens: Tokens
    facts: Facts
    borders: Borders | None

    @property
    def record(self) -> dict[str, Any]:
        """What result.json holds about it."""
        facts = self.facts
        return {
            "sha256": facts.sha256,
            "bytes": facts.size_bytes,
            "tokens": len(self.tokens),
            "files": facts.files,
            "documents": self.borders.count if self.borders else None,
        }


def smallest_dtype(largest: int) -> np.dtype[Any]:
    """The narrowest little-endian unsigned dtype that holds every id up to the largest."""
    return np.dtype("u1" if largest < 2**8 else "<u2" if largest < 2**16 else "<u4")


def byte_corpus(documents: Sequence[bytes], files: int) -> Corpus:
    """A corpus whose tokens are the bytes of texts, at least one, joined by a newline, which belongs to the text before it."""
    text = _SEPARATOR.join(documents)
    *joined, last = documents
    borders = borders_of_lengths([len(document) + len(_SEPARATOR) for document in joined] + [len(last)])
    tokens = np.frombuffer(text, np.uint8)
    largest = int(tokens.max(initial=0))
    return Corpus(tokens, Facts(hashlib.sha256(text).hexdigest(), len(text), files, largest), borders)
