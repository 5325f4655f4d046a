"""Built corpora kept on disk between jobs: memory-mapped, written atomically, checked when read.

An entry is one file: a header of JSON padded to 1,024 bytes, where documents begin (int64), the token ids. Its name says what
was built, the signature in its header from which state of it, so a change overwrites an entry and never piles up. A damaged
entry is built again; a folder that cannot be written is no error. Must not know how a corpus is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from scaling_lab.data.corpus import Corpus, Facts
from scaling_lab.data.documents import ListedBorders

_FORMAT = 2
_HEADER_BYTES = 1024
_POSITION = np.dtype("<i8")
_CHECKED_BYTES = 32 * 2**20


def signature_of(parts: Iterable[object]) -> str:
    """One hash over what an entry depends on."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode("utf-8", "surrogateescape")).hexdigest()


def state_of(path: Path) -> tuple[str, int, int]:
    """What changes when a file does: its name, size in bytes and modification time in ns."""
    stat = path.stat()
    return str(path), stat.st_size, stat.st_mtime_ns


def load_or_build(folder: Path | None, name: str, signature: str, build: Callable[[], Corpus]) -> Corpus:
    """The cached corpus, memory-mapped, or else a freshly built one, which is then cached. folder None: no cache.

    Safe with several jobs at once: each replaces the entry whole, and an entry that is mapped stays as it was.
    """
    if folder is None:
        return build()
    path = folder / f"{name}.tokens"
    if (found := _read(path, signature)) is not None:
        return found
    built = build()
    _write(path, signature, built)
    return _read(path, signature) or built


def _read(path: Path, signature: str) -> Corpus | None:
    """The entry, or None where it is absent, of another state, truncated or damaged."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES))
            if header["format"] != _FORMAT or header["signature"] != signature:
                return None
            starts, tokens = _arrays(file, header["starts"] or 0, np.dtype(header["dtype"]), header["count"])
            if _checksum(starts, tokens) != header["crc32"]:
                return None
            return Corpus(tokens, Facts(**header["facts"]), None if header["starts"] is None else ListedBorders(starts))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _arrays(file: IO[bytes], starts: int, dtype: np.dtype[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """The starts come first, where 8 bytes are aligned: to bisect an unaligned array, NumPy would copy it whole each time."""
    border = _HEADER_BYTES + starts * _POSITION.itemsize
    if os.fstat(file.fileno()).st_size != border + count * dtype.itemsize:
        raise ValueError("truncated")
    return _map(file, _POSITION, _HEADER_BYTES, starts), _map(file, dtype, border, count)


def _map(file: IO[bytes], dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(file, dtype, "r", offset, (count,)))


def _checksum(*arrays: np.ndarray) -> int:
    """CRC of the arrays; of the first and last 32 MiB of one that is larger, so that a huge entry still opens at once."""
    crc = 0
    for array in arrays:
        data = array.view(np.uint8).data
        parts = [data] if len(data) <= 2 * _CHECKED_BYTES else [data[:_CHECKED_BYTES], data[-_CHECKED_BYTES:]]
        for part in parts:
            crc = zlib.crc32(part, crc)
    return crc


def _write(path: Path, signature: str, corpus: Corpus) -> None:
    assert corpus.borders is None or isinstance(corpus.borders, ListedBorders), "computed borders need no cache"
    starts = np.ascontiguousarray(corpus.borders.positions if corpus.borders else (), _POSITION)
    tokens = np.ascontiguousarray(corpus.tokens)
    header = {"format": _FORMAT, "signature": signature, "facts": dataclasses.asdict(corpus.facts)}
    header |= {
        "starts": corpus.borders and corpus.borders.count,
        "dtype": tokens.dtype.str,
        "count": len(tokens),
        "crc32": _checksum(starts, tokens),
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(header).encode().ljust(_HEADER_BYTES))
                file.write(starts.data)
                file.write(tokens.data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
