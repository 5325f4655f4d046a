"""What XLA's partitioner says in the workers' logs. Owns its words; judges nothing."""

from __future__ import annotations

from pathlib import Path

#: XLA says so where it found no way from one layout to another but to gather the whole tensor and cut it anew.
REMATERIALIZATION = b"Involuntary full rematerialization"


def rematerializations(folder: Path) -> int | None:
    """How often the partitioner gathered a whole tensor only to cut it anew; None without a log."""
    logs = sorted(folder.glob("worker-*.log"))
    return sum(log.read_bytes().count(REMATERIALIZATION) for log in logs) if logs else None
