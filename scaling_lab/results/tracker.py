"""The coordinator's side of tracking: one W&B run per job, fed from the job's records. Never imports wandb, never fails a run.

Owns the names of what is tracked and the life of the process that does it (`results.tracking`).
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from scaling_lab.config import to_plain
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan
from scaling_lab.results import metrics
from scaling_lab.results.metrics import Scale
from scaling_lab.results.records import Record
from scaling_lab.results.result import plan_summary
from scaling_lab.results.tracking import FINISH_LIMIT_S

#: Seconds beyond its own limit after which the tracking process is killed, and how long an online start may take.
PATIENCE_S = 2.0
START_LIMIT_S = 15.0


class Tracker:
    """Tracks one job. `record` hands a record over and returns at once; `finish` must be called however the job ends.

    say: shows the user a line; called at most once, when tracking is not what was asked for
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: Plan,
        folder: Path,
        *,
        run_id: str,
        sweep: str | None,
        scale: Scale,
        say: Callable[[str], None],
    ):
        self._scale = scale
        self._say = say
        self._last_step = 0
        self._log = folder / "wandb" / "tracking.log"
        self._info: dict[str, Any] = {"mode": experiment.tracking.mode, "folder": None, "url": None, "notice": None}
        self._process: subprocess.Popen[str] | None = None
        if experiment.tracking.mode != "disabled":
            self._start(_request(experiment, plan, folder, run_id, sweep))

    def record(self, record: Record) -> None:
        """Track what a record says: steps, evaluations, and the memory in `done`. Other records are passed over."""
        if self._process is None or record.get("process"):
            return
        kind = record.get("kind")
        if kind == "step":
            self._last_step = record["step"]
            self._send({"row": metrics.step_metrics(record, self._scale), "step": self._last_step})
        elif kind == "evaluation":
            self._send({"row": {"validation_loss": record["loss"]}, "step": record["step"]})
        elif kind == "done":
            memory = (record.get("bytes_per_device") or {}).get("total")
            row = {"memory_bytes_per_device": memory, "resident_bytes": record.get("resident_bytes")}
            self._send({"row": _known(row), "step": self._last_step})

    def finish(self, *, exit_code: int, result: metrics.Result | None = None) -> dict[str, Any]:
        """End the run and say how it was tracked: `mode`, `folder`, `url` and `notice`. Bounded; calling twice is harmless.

        result: its metrics, status and error become the run's summary
        """
        process, self._process = self._process, None
        if process is None:
            return self._info
        if result is not None:
            self._send({"summary": _known({**metrics.values(result), "status": result["status"]})})
        self._send({"exit_code": exit_code})
        self._outbox.put(None)
        limit_s = FINISH_LIMIT_S[self._info["mode"]] + PATIENCE_S + START_LIMIT_S
        try:
            if process.wait(limit_s):
                self._notice(f"W&B tracking ended early; see {self._log}")
        except subprocess.TimeoutExpired:
            self._notice(f"W&B tracking did not end within {limit_s:.0f} s and was stopped; see {self._log}")
        self._clean_up(process)
        return self._info

    def _start(self, request: dict[str, Any]) -> None:
        root = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.append({root!r}); from scaling_lab.results.tracking import main; main()"
        try:
            self._log.parent.mkdir(exist_ok=True)
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the job; and it can be ended with all its children
                )
        except OSError as error:
            self._notice(f"W&B tracking could not start: {error}")
            return
        self._outbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, args=(self._process,), daemon=True) for target in (self._write, self._listen)
        ]
        self._send(request)
        for thread in self._threads:
            thread.start()

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put(message)

    def _write(self, process: subprocess.Popen[str]) -> None:
        """Runs in a thread, so that a stopped tracking process cannot stop the job."""
        assert process.stdin
        with contextlib.suppress(OSError):  # its death shows in `finish`
            while (message := self._outbox.get()) is not None:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        with process.stdout:
            for line in process.stdout:
                answer = json.loads(line)
                if "notice" in answer:
                    self._notice(answer["notice"])
                self._info |= {key: answer[key] for key in ("mode", "folder", "url") if key in answer}

    def _notice(self, text: str) -> None:
        if self._info["notice"] is None:
            self._info["notice"] = text
            self._say(text)

    def _clean_up(self, process: subprocess.Popen[str]) -> None:
        """Nothing of the tracking process is left, nor of what it started; all its words have been heard."""
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)


def _request(experiment: Experiment, plan: Plan, folder: Path, run_id: str, sweep: str | None) -> dict[str, Any]:
    tracking = experiment.tracking
    config = {**to_plain(experiment), "plan": plan_summary(plan), "run_id": run_id, "run_folder": str(folder)}
    init = {
        "project": tracking.project,
        "entity": tracking.entity,
        "group": tracking.group or sweep,
        "name": tracking.run_name or folder.name,
        "tags": list(tracking.tags),
        "job_type": "run",
        "id": secrets.token_hex(4),
        "dir": str(folder),
        "config": config,
    }
    return {"mode": tracking.mode, "init": init}


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}
