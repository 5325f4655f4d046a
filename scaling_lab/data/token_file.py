"""Arrays of token ids on disk: raw uint16 or uint32 as nanoGPT writes them, or .npy. Memory-mapped; read whole once, to check.

Owns what such a file must hold. Must not know what the ids mean.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from scaling_lab.data.cache import load_or_build, signature_of, state_of
from scaling_lab.data.corpus import Corpus, Facts
from scaling_lab.data.documents import ListedBorders
from scaling_lab.errors import ConfigError

#: Files of this ending say themselves what they hold; all others are raw.
NPY = ".npy"

_CHUNK = 2**22


def token_corpus(path: str, key: str, dtype: str | None, document_end: int | None, cache_folder: Path | None) -> Corpus:
    """The ids of a file, memory-mapped. key: the config key that gave the path. Raises ConfigError for anything else in it.

    document_end: the id that ends a document; None: where documents begin is unknown. The first time every id is read, for the
    hash, the largest and the documents; these findings are cached by the file's size and time.
    """
    check_token_file(path, key)
    check_raw_dtype(path, key, dtype)
    try:
        tokens = _map_npy(path, key, dtype) if path.endswith(NPY) else _map_raw(path, key, dtype)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    kind = "facts" if document_end is None else f"documents-{document_end}"
    name, signature = f"{kind}-{signature_of([path])[:16]}", signature_of([state_of(Path(path)), tokens.dtype.str])
    found = load_or_build(cache_folder, name, signature, lambda: _findings(tokens, path, key, document_end))
    return Corpus(tokens, found.facts, found.borders)


def check_token_file(path: str, key: str) -> None:
    """Raise ConfigError where there is no such file."""
    if not os.path.isfile(path):
        raise ConfigError(f"{key}={path}: no such file; give an array of token ids, raw (.bin) or .npy")


def check_raw_dtype(path: str, key: str, dtype: str | None) -> None:
    """Raise ConfigError where nothing says how wide an id is."""
    if dtype is None and not path.endswith(NPY):
        raise ConfigError(f"{key}={path}: a raw file does not say how wide an id is; set data.dtype=uint16 (nanoGPT) or uint32")


def _map_raw(path: str, key: str, dtype: str | None) -> np.ndarray:
    assert dtype is not None, "checked before"
    size, width = os.path.getsize(path), np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ConfigError(f"{key}={path}: {size} bytes are no array of {dtype} ({width} bytes each); check data.dtype")
    return np.asarray(np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r"))


def _map_npy(path: str, key: str, dtype: str | None) -> np.ndarray:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{key}={path}: not a .npy array: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"{key}={path}: holds {tokens.dtype} of shape {list(tokens.shape)}, not a flat array of integers; "
            f"save it with numpy.save(path, ids.ravel().astype('uint16'))"
        )
    if dtype is not None and tokens.dtype != np.dtype(dtype):
        raise ConfigError(f"{key}={path}: data.dtype={dtype} but the file says {tokens.dtype}; set data.dtype=null for .npy")
    return np.asarray(tokens)


def _findings(tokens: np.ndarray, path: str, key: str, document_end: int | None) -> Corpus:
    """What one reading of the whole file finds, chunk by chunk: a corpus without the tokens, which stay where they are."""
    digest, largest = hashlib.sha256(), 0
    starts = [np.zeros(1, np.int64)]
    for first in range(0, len(tokens), _CHUNK):
        chunk = np.ascontiguousarray(tokens[first : first + _CHUNK])
        if int(chunk.min()) < 0:
            raise ConfigError(f"{key}={path}: holds the negative id {chunk.min()}; token ids count from 0")
        digest.update(chunk.data)
        largest = max(largest, int(chunk.max()))
        if document_end is not None:
            starts.append(first + 1 + np.flatnonzero(chunk == document_end))
    facts = Facts(digest.hexdigest(), os.path.getsize(path), 1, largest)
    return Corpus(np.empty(0, np.uint8), facts, None if document_end is None else _borders(starts, len(tokens)))


def _borders(starts: list[np.ndarray], total: int) -> ListedBorders:
    """An id that ends the last document is followed by no other."""
    positions = np.concatenate(starts)
    return ListedBorders(positions[positions < total])
