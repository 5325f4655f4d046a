"""Which rows of a global batch a process reads, in the order in which their tokens are stored: the splits of `plan.batch` and
`plan.sequence`, applied to arrays. No framework, no data source."""

from __future__ import annotations

import numpy as np

from scaling_lab.backends.contract import Batch, Job


def local_batch(job: Job, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray | None = None) -> Batch:
    """This process's part of a global batch [rows, sequence]: as many microbatches as its rows make.

    Row r of the global batch is row r % microbatch of microbatch r // microbatch. documents: as `data.Rows` has them.
    """
    own = None if documents is None else _split(job, documents)
    return stored_batch(job, _split(job, tokens), _split(job, labels), own)


def _split(job: Job, rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1, job.plan.batch.microbatch, rows.shape[1])[:, list(job.rows)]


def stored_batch(job: Job, tokens: np.ndarray, labels: np.ndarray, documents: np.ndarray | None) -> Batch:
    """Rows [accumulation, rows, sequence] in the text's order -> in the order in which the plan stores a sequence."""
    split = job.plan.sequence

    def stored(rows: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(rows[..., list(split.positions)] if split.zigzag else rows)

    if documents is None:
        return Batch(stored(tokens), stored(labels))
    return Batch(stored(tokens), stored(labels), stored(documents), stored(restarted(documents)))


def restarted(documents: np.ndarray) -> np.ndarray:
    """The position of each token in its document, or in what the row has of it: int32, shaped as documents."""
    index = np.broadcast_to(np.arange(documents.shape[-1], dtype=np.int32), documents.shape)
    begins = np.zeros(documents.shape, bool)
    begins[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return (index - np.maximum.accumulate(np.where(begins, index, 0), axis=-1)).astype(np.int32)
