"""Rows of any optimizer step: training and validation, the windows, their order, padding, raggedness, documents.

Owns the meaning of a sample: window i of a split has inputs [i x sequence, (i + 1) x sequence) and as labels the tokens one
further on; if packed, no label is of another document. Must not know where tokens come from, nor who computes which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from scaling_lab.data.corpus import Tokens
from scaling_lab.data.documents import Borders
from scaling_lab.data.order import below, counter_hash, key_for, shuffled

#: The label of a position that no loss counts.
IGNORED = -1


@dataclass(frozen=True, eq=False)
class Rows:
    """tokens, labels: int32 [rows, sequence]; labels are next tokens, IGNORED where none counts.

    samples: int64 [rows]. Training: epoch x num_train_samples + window, so ids are unique over a whole run; validation: the
    window; -1: a row that only fills a batch.
    documents: int32 [rows, sequence], None unless packed: the number within its row, from 0, of the document that a token
    belongs to. A window that begins inside a document begins its row's document 0; padding continues the last number.
    """

    tokens: np.ndarray
    labels: np.ndarray
    samples: np.ndarray
    documents: np.ndarray | None = None

    def ignoring(self, rows: Sequence[int]) -> Rows:
        """The same rows with every label of the given ones (positions in this object) ignored."""
        labels = self.labels.copy()
        labels[list(rows)] = IGNORED
        return replace(self, labels=labels)


@dataclass(frozen=True, eq=False)
class Split:
    """The part [start, stop) of a corpus. `whole`: only full windows (training); else the last one may be short.

    borders: where the corpus's documents begin, if rows are packed
    """

    tokens: Tokens
    start: int
    stop: int
    whole: bool
    borders: Borders | None = None

    def num_samples(self, sequence: int) -> int:
        """Windows of sequence + 1 tokens, each sharing one token with the next, so that every label appears once."""
        labels = max(0, self.stop - self.start - 1)
        return labels // sequence if self.whole else -(-labels // sequence)

    def window(self, index: int, sequence: int) -> np.ndarray:
        """Tokens of a window: sequence + 1 of them, or fewer (at least 2) in a last short one."""
        first = self.first(index, sequence)
        return self.tokens[first : min(first + sequence + 1, self.stop)]

    def first(self, index: int, sequence: int) -> int:
        """Where in the corpus a window begins."""
        return self.start + index * sequence


@dataclass(frozen=True, eq=False)
class Source:
    """Random access to rows by step. Equal for every mesh, host count, backend and accumulation.

    corpus: {source, sha256, bytes, tokens, files, documents, train_tokens, validation_tokens, validation}, where validation
    holds the facts of data.validation_path, or null
    """

    corpus: dict[str, Any]
    train: Split
    validation: Split
    sequence: int
    seed: int
    shuffle: bool
    ragged: bool

    @property
    def num_train_samples(self) -> int:
        """Samples of one epoch."""
        return self.train.num_samples(self.sequence)

    @property
    def num_validation_samples(self) -> int:
        """Samples that hold each label of the validation split exactly once; 0 without one."""
        return self.validation.num_samples(self.sequence)

    def validation_batches(self, global_batch: int) -> int:
        """Batches that cover the validation split; the last may be filled up with ignored rows."""
        return -(-self.num_validation_samples // global_batch)

    def train_rows(self, step: int, rows: Sequence[int], global_batch: int) -> Rows:
        """The given rows (each in 0..global_batch - 1) of an optimizer step counted from 0. Only they are read."""
        position = _positions(step, rows, global_batch)
        epoch, index = np.divmod(position, self.num_train_samples)
        window = shuffled(index, epoch, self.num_train_samples, self.seed) if self.shuffle else index
        return self._read(self.train, window, epoch * self.num_train_samples + window, "train")

    def validation_rows(self, batch_index: int, rows: Sequence[int], global_batch: int) -> Rows:
        """The given rows of a validation batch, in the order of the text; past the end: ignored rows with sample id -1."""
        position = _positions(batch_index, rows, global_batch)
        window = np.where(position < self.num_validation_samples, position, -1)
        return self._read(self.validation, window, window, "validation")

    def _read(self, split: Split, windows: np.ndarray, samples: np.ndarray, purpose: str) -> Rows:
        tokens = np.zeros((len(windows), self.sequence), np.int32)
        labels = np.full((len(windows), self.sequence), IGNORED, np.int32)
        limits = self._limits(windows, purpose)
        for row, window in enumerate(windows.tolist()):
            if window < 0:
                continue
            piece = split.window(window, self.sequence)
            valid = min(len(piece) - 1, limits[row])
            tokens[row, :valid] = piece[:valid]
            labels[row, :valid] = piece[1 : valid + 1]
        if split.borders is None:
            return Rows(tokens, labels, samples)
        firsts = [split.first(window, self.sequence) for window in windows.tolist()]
        labels, documents = _packed(labels, firsts, split.borders)
        return Rows(tokens, labels, samples, documents)

    def _limits(self, windows: np.ndarray, purpose: str) -> list[int]:
        """How many labels each window may keep: all, or if ragged a pseudo-random number from 1 to sequence."""
        if not self.ragged:
            return [self.sequence] * len(windows)
        bits = counter_hash(key_for(self.seed, f"ragged {purpose}"), windows)
        return (1 + below(bits, self.sequence)).tolist()


def _packed(labels: np.ndarray, firsts: Sequence[int], borders: Borders) -> tuple[np.ndarray, np.ndarray]:
    """The labels that are of their token's document, and the documents' numbers. firsts: where in the corpus rows begin."""
    labels, begins = labels.copy(), np.zeros_like(labels)
    for row, first in enumerate(firsts):
        valid = int((labels[row] != IGNORED).sum())
        if valid == 0:
            continue
        # Label i is token i + 1, so labels are of tokens 1..valid; token `valid` itself is not in the row, or is padding.
        starts = borders.starts(first + 1, first + valid + 1) - first
        labels[row, starts - 1] = IGNORED
        begins[row, starts[starts < valid]] = 1
    return labels, begins.cumsum(axis=1, dtype=np.int32)


def _positions(step: int, rows: Sequence[int], global_batch: int) -> np.ndarray:
    index = np.asarray(rows, np.int64).reshape(-1)
    if step < 0 or ((index < 0) | (index >= global_batch)).any():
        raise ValueError(f"step {step}, rows {index.tolist()}: not within a global batch of {global_batch} rows")
    return step * global_batch + index
