"""Records of a run: one JSON line per step and event, written as it happens. Owns the file's form, no record's meaning."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scaling_lab.errors import LabError

Record = Mapping[str, Any]

#: Where a line keeps the numbers that JSON has no word for: key -> "nan", "inf" or "-inf".
NONFINITE = "nonfinite"


class RecordFile:
    """Appends records to a file, each handed to the operating system before `append` returns.

    So nothing is lost when this process is killed; `close` also waits for the disk. A last line torn by an earlier crash is
    ended first, so that it spoils nothing but itself. Raises LabError where the file cannot be written.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
            if _torn(path):
                self._file.write(b"\n")
        except OSError as error:
            raise _unwritable(path, error) from None

    def append(self, record: Record) -> None:
        """Write one record. Numbers that are not finite become null and are named under `nonfinite`."""
        line = json.dumps(encoded(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            while line:  # an unbuffered write may take only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def close(self) -> None:
        """Wait until the disk has everything. Closing twice is harmless."""
        if not self._file.closed:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise _unwritable(self._path, error) from None
            finally:
                self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order. A line torn by a crash is left out; a missing file has none."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(_decoded(record))
    return records


def encoded(record: Record) -> dict[str, Any]:
    """The record as valid JSON can hold it."""
    lost = {key: str(value) for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not lost:
        return dict(record)
    return {**{key: None if key in lost else value for key, value in record.items()}, NONFINITE: lost}


def _decoded(record: dict[str, Any]) -> dict[str, Any]:
    lost = record.pop(NONFINITE, {})
    return {**record, **{key: float(value) for key, value in lost.items()}}


def _torn(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _unwritable(path: Path, error: OSError) -> LabError:
    return LabError(f"cannot write {path}: {error.strerror or error}.")
