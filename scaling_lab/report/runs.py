"""The runs under some folders, as they are found on disk: with a result, or with the reason why there is none."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling_lab.errors import ConfigError
from scaling_lab.results import folder as names
from scaling_lab.results.metrics import Result, at

#: Files by which a folder is known as a run's, also when it has no result.
MARKS = frozenset((names.RESULT, names.RECORDS, names.PLAN, names.EXPERIMENT))

NO_RESULT = "no result"


@dataclass(frozen=True)
class Run:
    """One run as found on disk. result: None where there is none; problem: why."""

    folder: Path
    result: Result | None
    problem: str = ""

    @property
    def status(self) -> str:
        """`ok`, `failed`, `infeasible` or `no result`."""
        return NO_RESULT if self.result is None else self.result["status"]

    @property
    def reason(self) -> str:
        """Why it is not ok: the whole message; empty where it is."""
        if self.result is None:
            return self.problem
        return at(self.result, "error.message") or ""


def load_results(paths: Sequence[Path]) -> list[Run]:
    """The runs under these paths (run folders, sweep folders or result.json files), each once, in the order of their names.

    A folder that vanishes meanwhile is passed over, one that may not be read is listed with the reason. Raises ConfigError
    for a path that does not exist, and where there is no run at all.
    """
    missing = [str(path) for path in paths if not os.path.exists(path)]
    if missing:
        raise ConfigError(f"no such path: {', '.join(missing)}. Give run folders or sweep folders.")
    found: dict[Path, Run] = {}
    for path in paths:
        for run in sorted(_under(path), key=lambda run: _natural(run.folder)):
            found.setdefault(run.folder, run)
    if not found:
        raise ConfigError(f"no run under {', '.join(map(str, paths))}: a run folder holds {names.RESULT} or {names.RECORDS}.")
    return list(found.values())


def _under(path: Path) -> Iterator[Run]:
    if os.path.isfile(path):
        yield from _load(path.parent.absolute())
        return
    unread: list[OSError] = []
    for folder, _, files in os.walk(path.absolute(), onerror=unread.append):
        if not MARKS.isdisjoint(files):
            yield from _load(Path(folder))
    for error in unread:
        if not isinstance(error, FileNotFoundError):  # that one has vanished
            yield Run(Path(error.filename), None, f"the folder cannot be read: {error.strerror}")


def _natural(path: Path) -> list[Any]:
    """Sorts 2-x before 10-x."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def _load(folder: Path) -> Iterator[Run]:
    """The run of a folder; nothing where the folder has vanished."""
    try:
        result = json.loads((folder / names.RESULT).read_text())
    except FileNotFoundError:
        if os.path.isdir(folder):
            yield Run(folder, None, "it has not ended, or was killed before it could write one")
        return
    except (OSError, ValueError) as error:
        yield Run(folder, None, f"{names.RESULT} cannot be read: {error}")
        return
    if isinstance(result, dict) and "schema_version" in result:
        yield Run(folder, result)
    else:
        yield Run(folder, None, f"{names.RESULT} is not a result of this lab")
