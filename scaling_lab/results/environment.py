"""Where a run took place: versions, machine, code, command. Owns gathering facts; imports no library that it names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from scaling_lab.plan.plan import Plan
from scaling_lab.predict.peak import cpu_model
from scaling_lab.results.records import Record

DISTRIBUTIONS = ("scaling_lab", "jax", "jaxlib", "flax", "equinox", "optax", "torch", "numpy", "hydra-core", "wandb")
GIT_LIMIT_S = 3.0


def environment(
    *, command: str, worker_environment: Mapping[str, str], plan: Plan | None, records: Sequence[Record], folder: Path
) -> dict[str, Any]:
    """The `environment` of a result.

    worker_environment: the variables that the workers were started with beyond the coordinator's own
    records: those of the job; its workers say there which devices they really found
    folder: the working directory, whose git commit is noted if it is in a repository
    """
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))},
        "devices": _devices(records),
        "simulated": None if plan is None else plan.simulated,
        "git": git_state(folder),
        "command": command,
        "arguments": list(sys.argv),
        "working_directory": str(folder),
        "worker_environment": dict(worker_environment),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices(records: Sequence[Record]) -> dict[str, Any] | None:
    """What every process found: platforms and kinds (one of each, unless the processes differ) and the devices' number."""
    facts = {
        r.get("process"): r["device_facts"] for r in records if r.get("kind") in ("start", "done") and r.get("device_facts")
    }
    if not facts:
        return None
    counts = [fact.get("count") for fact in facts.values()]
    return {
        "platform": _one(fact.get("platform") for fact in facts.values()),
        "kind": _one(fact.get("kind") for fact in facts.values()),
        "count": sum(counts) if None not in counts else None,
        "processes": [{"process": process, **fact} for process, fact in sorted(facts.items(), key=lambda item: str(item[0]))],
    }


def _one(found: Any) -> str:
    return ", ".join(sorted({str(value) for value in found}))


def git_state(folder: Path) -> dict[str, Any] | None:
    """`commit` and `dirty` (tracked files changed) of the repository a folder is in; None where there is none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None. It never prompts, starts no monitor, takes no lock, and is given up after seconds."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=GIT_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
