"""Which rows of a global batch a process reads, in the order in which their tokens are stored: the splits of `plan.batch` and
`plan.sequence`, applied to arrays. No framework, no data source."""

from __future__ import annotations

import numpy as np

from scaling_lab.backends.contract import Batch, Job


def local_batch(job: Job, tokens: np.ndarray, labels: np.ndarray) -> Batch:
    """This process's part of a global batch [rows, sequence]: as many microbatches as its rows make.

    Row r of the global batch is row r % microbatch of microbatch r // microbatch.
    """
    return Batch(_split(job, tokens), _split(job, labels))


def _split(job: Job, rows: np.ndarray) -> np.ndarray:
    microbatches = rows.reshape(-1, job.plan.batch.microbatch, rows.shape[1])
    return stored(job, microbatches[:, list(job.rows)])


def stored(job: Job, rows: np.ndarray) -> np.ndarray:
    """Rows [..., sequence] in the text's order -> in the order in which the plan stores a sequence."""
    return np.ascontiguousarray(rows[..., list(job.plan.sequence.positions)])
