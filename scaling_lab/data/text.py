"""UTF-8 text of the user's: a file, a folder or a glob, as bytes or through a tokenizer.json.

Owns which files a path means and how they are joined. The only file that imports `tokenizers`, and only where it is needed.
"""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from scaling_lab.data.cache import load_or_build, signature_of, state_of
from scaling_lab.data.corpus import Corpus, Facts, byte_corpus, smallest_dtype
from scaling_lab.data.documents import borders_of_lengths
from scaling_lab.errors import ConfigError


def text_corpus(path: str, key: str, tokenizer: str | None, cache_folder: Path | None) -> Corpus:
    """The tokens of the files that a path means (`files_of`). Each file is a document.

    Bytes: the files joined by a newline. With a tokenizer: each file encoded by itself, with the special tokens that the
    tokenizer adds to a text (such as a begin token), one after the other. key: the config key that gave the path.
    Raises ConfigError naming the file that is missing, not UTF-8, or no tokenizer.
    """
    files = files_of(path, key)
    check_tokenizer(tokenizer)
    states = [state_of(Path(file)) for file in ([tokenizer] if tokenizer else []) + files]
    name = f"text-{signature_of([path, tokenizer])[:16]}"
    return load_or_build(
        cache_folder, name, signature_of(states), lambda: _encoded(files, key, tokenizer) if tokenizer else _bytes(files, key)
    )


def check_tokenizer(tokenizer: str | None) -> None:
    """Raise ConfigError where a tokenizer is asked for and is no file."""
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise ConfigError(f"data.tokenizer={tokenizer}: no such file; give a tokenizer.json, or null for byte tokens")


def files_of(path: str, key: str) -> list[str]:
    """The files that a path means, sorted by name: itself; all files in a folder, at any depth, but hidden ones; a glob's.

    Nothing is left out by its suffix: a folder that holds other things than text is refused, and a glob says which to read.
    """
    if os.path.isfile(path):
        return [path]
    candidates = _in_folder(path) if os.path.isdir(path) else glob.glob(path, recursive=True)
    found = [file for file in candidates if os.path.isfile(file)]
    if found:
        return sorted(found)
    if os.path.isdir(path):
        raise ConfigError(f"{key}={path}: the folder holds no files")
    if glob.has_magic(path):
        raise ConfigError(f"{key}={path}: no file matches this glob (`**` goes into folders)")
    raise ConfigError(f"{key}={path}: no such file or folder")


def _in_folder(path: str) -> list[str]:
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".")]
    return found


def _bytes(files: list[str], key: str) -> Corpus:
    return byte_corpus([_utf8(file, key) for file in files], len(files))


def _utf8(file: str, key: str) -> bytes:
    """The bytes of a file, checked to be UTF-8."""
    data = _content(file, key)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{key}: {file} is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start}); convert it, or choose the "
            f"text files by a glob such as {key}='{os.path.dirname(file)}/*.txt'"
        ) from None
    return data


def _content(file: str, key: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {file}: {error.strerror}") from None


def _encoded(files: list[str], key: str, tokenizer: str) -> Corpus:
    encoder = _tokenizer(tokenizer)
    texts = [_utf8(file, key) for file in files]
    pieces = [np.array(encoder.encode(text.decode()).ids, np.uint32) for text in texts]
    largest = max((int(piece.max(initial=0)) for piece in pieces), default=0)
    tokens = np.concatenate(pieces).astype(smallest_dtype(largest))
    facts = Facts(hashlib.sha256(tokens.data).hexdigest(), sum(map(len, texts)), len(files), largest)
    return Corpus(tokens, facts, borders_of_lengths(map(len, pieces)))


def _tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("data.tokenizer needs the `tokenizers` library: pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError(f"data.tokenizer={path}: not a tokenizer.json that `tokenizers` can read: {error}") from None
