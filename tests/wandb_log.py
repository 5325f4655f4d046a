"""Reads a .wandb file back: LevelDB's log framing after W&B's own 7-byte header, a protobuf record in each entry."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32_768
WHOLE, FIRST, LAST = 1, 2, 4


def read(path: Path) -> dict[str, Any]:
    """`history` (a row per step), `summary`, `config`, `run` (project, group, ...) and `exit_code` (None: not finished)."""
    found: dict[str, Any] = {"history": [], "summary": {}, "config": {}, "run": {}, "exit_code": None}
    for record in _records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(_items(record.history.item))
        elif kind == "summary":
            found["summary"] |= _items(record.summary.update)
        elif kind == "config":
            found["config"] |= _items(record.config.update)
        elif kind == "run":
            run = record.run
            found["run"] = {"project": run.project, "group": run.run_group, "name": run.display_name, "tags": list(run.tags)}
            found["config"] |= _items(run.config.update)
        elif kind == "exit":
            found["exit_code"] = record.exit.exit_code
    return found


def only(folder: Path) -> dict[str, Any]:
    """The one W&B run of a run folder."""
    (path,) = folder.glob("wandb/*run-*/*.wandb")
    return read(path)


def _records(data: bytes) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    assert data[:4] == b":W&B"
    place, entry = 7, b""
    while place + 7 <= len(data):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        checksum, length, kind = struct.unpack("<IHB", data[place : place + 7])
        chunk = data[place + 7 : place + 7 + length]
        if (kind, length) == (0, 0) or len(chunk) < length:
            return  # the rest was never written
        assert zlib.crc32(bytes([kind]) + chunk) == checksum
        place += 7 + length
        entry = chunk if kind in (WHOLE, FIRST) else entry + chunk
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(entry)
            yield record


def _items(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
