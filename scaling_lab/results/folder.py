"""The run folder: what lies where, and how it gets there whole. Owns file names; knows no metric and no process."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shlex
import weakref
from pathlib import Path
from typing import Any

import yaml

from scaling_lab.config import experiment_from, to_plain
from scaling_lab.errors import ConfigError, LabError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan
from scaling_lab.results.records import RecordFile

EXPERIMENT, PLAN, RECORDS, RESULT = "experiment.yaml", "plan.json", "records.jsonl", "result.json"

#: Keys of experiment.yaml that speak to Hydra, so that the file alone is a config it can run.
FOR_HYDRA = ("defaults", "hydra")

#: Where its runs and sweeps go, as in conf/config.yaml. Hydra, not the lab, fills in the names: overrides may change them.
HYDRA = {
    "run": {"dir": "runs/${now:%Y-%m-%d}/${now:%H-%M-%S}-${backend.name}-${sharding.name}"},
    "sweep": {
        "dir": "runs/${now:%Y-%m-%d}/${now:%H-%M-%S}-sweep",
        "subdir": "${hydra.job.num}-${backend.name}-${sharding.name}",
    },
    "output_subdir": None,
    "job": {"chdir": False},
}


class RunFolder:
    """One run's folder, made and claimed by `create`. Every write is whole or not at all; a failing one is a LabError.

    The claim is a lock on the records that nobody else can have: `release` gives it up, as does the end of this process.
    """

    def __init__(self, path: Path, claim: int):
        self.path = path
        self.release = weakref.finalize(self, os.close, claim)

    @classmethod
    def create(cls, path: Path, *, named: bool = True) -> RunFolder:
        """Make the folder and claim it: no other run is going on in it, and none has finished in it.

        named: somebody asked for this very folder; else a taken one gives way to `path-2`, `path-3` and so on.
        Raises ConfigError where it cannot be written, or is taken and named.
        """
        path = Path(path).absolute()
        for number in itertools.count(1):
            folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
            claim, taken = _claim(folder)
            if claim is not None:
                return cls(folder, claim)
            if named:
                raise ConfigError(f"{folder} {taken}: choose another folder with hydra.run.dir=FOLDER.")
        raise AssertionError("the count has no end")

    def write_experiment(self, experiment: Experiment) -> None:
        """The resolved config, with the command that runs it again at its head."""
        write_whole(self.path / EXPERIMENT, _experiment_text(experiment, self.path))

    def write_plan(self, plan: Plan) -> None:
        """Every decision, as `config.plan_from` reads it."""
        write_whole(self.path / PLAN, json.dumps(to_plain(plan), indent=1) + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        """The result, once. Raises LabError where there is one already."""
        if (self.path / RESULT).exists():
            raise LabError(f"{self.path / RESULT} exists already: a result is written once.")
        write_whole(self.path / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")

    def open_records(self) -> RecordFile:
        """The file that records are appended to."""
        return RecordFile(self.path / RECORDS)


def _claim(folder: Path) -> tuple[int | None, str]:
    """Make a folder and lock its records, emptied of what a killed run left: the lock's descriptor, or None and why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        claim = os.open(folder / RECORDS, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write the run folder {folder}: {error.strerror or error}. Set hydra.run.dir=FOLDER."
        ) from None
    taken = ""
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        taken = "belongs to a run that is going on"
    except OSError:
        pass  # this file system has no locks: then only a result shows that a folder is taken
    if not taken and (folder / RESULT).exists():  # looked for under the lock: a run gives it up after its result
        taken = f"already holds a finished run ({RESULT})"
    if taken:
        os.close(claim)
        return None, taken
    os.truncate(claim, 0)
    return claim, ""


def read_experiment(path: Path) -> Experiment:
    """The experiment of a run folder, as `RunFolder.write_experiment` wrote it."""
    plain = yaml.safe_load((path / EXPERIMENT).read_text())
    return experiment_from(_unescape({key: value for key, value in plain.items() if key not in FOR_HYDRA}))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash, see all of it or nothing of it. Raises LabError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LabError(f"cannot write {path}: {error.strerror or error}.") from None


def _sync_folder(folder: Path) -> None:
    """Make the new name itself survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _experiment_text(experiment: Experiment, folder: Path) -> str:
    head = (
        "# For: running this experiment again exactly as it was resolved.\n"
        f"# Command: scaling-lab run --config-path {shlex.quote(str(folder))} --config-name {Path(EXPERIMENT).stem}\n"
        "# Expect: a new run folder under runs/. Values are written out: KEY=VALUE changes one, GROUP=NAME has no presets here.\n"
    )
    hydra = {"defaults": ["_self_", {"override hydra/job_logging": "disabled"}], "hydra": HYDRA}
    body = _escape(to_plain(experiment))
    return head + "".join(yaml.safe_dump(part, sort_keys=False, width=120, allow_unicode=True) for part in (body, hydra))


def _escape(value: Any) -> Any:
    """Text that OmegaConf would take for an interpolation, written so that it stays text."""
    return _each_text(value, lambda text: text.replace("${", "\\${"))


def _unescape(value: Any) -> Any:
    return _each_text(value, lambda text: text.replace("\\${", "${"))


def _each_text(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_each_text(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
