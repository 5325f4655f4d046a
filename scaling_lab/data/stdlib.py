"""Texts that every Python has: its standard library's own source, and the English of its language reference.

Owns which files belong to them. Both vary with the Python version: their hash is recorded.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from scaling_lab.data.cache import load_or_build, signature_of
from scaling_lab.data.corpus import Corpus, byte_corpus
from scaling_lab.errors import ConfigError

#: Not read: what pip installed, test suites, and parts that distributions leave out or package apart; with them the corpus
#: would depend on how Python was installed and not only on its version.
LEFT_OUT_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "tkinter", "turtledemo"}
    | {"lib2to3", "distutils", "ensurepip"}
)
#: Not read: written by the build, with the builder's paths in them.
LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-")


def stdlib_corpus(cache_folder: Path | None) -> Corpus:
    """Byte tokens of every .py file of the standard library, by sorted relative path, joined by a newline; each is a document.

    Raises ConfigError where this Python came without its sources.
    """
    root = sysconfig.get_path("stdlib")
    files = sorted(_sources(root, ""))
    if not files:
        raise ConfigError(f"data.source=stdlib: no .py files under {root}; use data=text data.path=FILE")
    signature = signature_of([sys.version, *files])
    return load_or_build(
        cache_folder, f"stdlib-{signature_of([root])[:16]}", signature, lambda: _joined(root, [file[0] for file in files])
    )


def _sources(root: str, relative: str) -> Iterator[tuple[str, int, int]]:
    """(relative path, size in bytes, modification time in ns) of each source file; one directory scan, no file opened."""
    with os.scandir(os.path.join(root, relative)) as entries:
        for entry in entries:
            name = f"{relative}/{entry.name}" if relative else entry.name
            if entry.name.startswith(LEFT_OUT_PREFIXES):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in LEFT_OUT_FOLDERS:
                    yield from _sources(root, name)
            elif entry.name.endswith(".py") and entry.is_file():
                stat = entry.stat()
                yield name, stat.st_size, stat.st_mtime_ns


def _joined(root: str, names: list[str]) -> Corpus:
    return byte_corpus([Path(root, name).read_bytes() for name in names], len(names))


def english_corpus() -> Corpus:
    """Byte tokens of pydoc's topics in their order, joined by a newline; each is a document.

    They are the language reference: several hundred kB of English.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("data.source=english: this Python has no pydoc_data; use data=text data.path=FILE") from None
    return byte_corpus([topic.encode() for topic in topics.values()], 1)
