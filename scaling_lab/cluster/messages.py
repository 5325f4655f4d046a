"""What a process tells the coordinator: JSON lines on a pipe of its own, with a heartbeat. Knows no meaning of a record."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

HEARTBEAT_S = 1.0
#: A process whose steps nobody records tells of them by a heartbeat, but not more often than this.
STEP_BEAT_S = 0.05


class Reporter:
    """Writes one process's records to its pipe, and every second a heartbeat with the last phase, step and progress.

    Records of the run itself come from process 0 only; of the others, what concerns them alone.
    """

    OWN = ("phase", "progress", "done", "error")

    def __init__(self, pipe: int, process: int):
        self.pipe, self.process = pipe, process
        self.state: dict[str, Any] = {"phase": "startup", "step": 0, "progress": 0}
        self.lock, self.beaten = threading.Lock(), 0.0
        self.send({"kind": "hello", "pid": os.getpid()})
        threading.Thread(target=self._beat_on, daemon=True, name="heartbeat").start()

    def tell(self, record: dict[str, Any]) -> None:
        """Pass on a record, and remember how far this process has come."""
        self.state = {
            "phase": record.get("phase", self.state["phase"]),
            "step": record["step"] if record["kind"] == "step" else self.state["step"],
            "progress": self.state["progress"] + 1,
        }
        if self.process == 0 or record["kind"] in self.OWN:
            self.send(record)
        elif time.monotonic() - self.beaten > STEP_BEAT_S:
            self.beat()

    def send(self, record: dict[str, Any]) -> None:
        """Write one line. Whole, also when several threads write; a coordinator that is gone ends this process at once."""
        stamped = {"kind": record["kind"], "time": time.time(), "process": self.process, **record}
        line = json.dumps(stamped).encode() + b"\n"
        try:
            with self.lock:
                while line:
                    line = line[os.write(self.pipe, line) :]
        except BrokenPipeError:
            os._exit(1)

    def beat(self) -> None:
        """Tell how far this process has come."""
        self.beaten = time.monotonic()
        self.send({"kind": "heartbeat", **self.state})

    def _beat_on(self) -> None:
        while True:
            self.beat()
            time.sleep(HEARTBEAT_S)


def split_lines(buffer: bytes) -> tuple[list[dict[str, Any]], bytes]:
    """The whole records in what was read from a pipe, and the unfinished rest."""
    *lines, rest = buffer.split(b"\n")
    return [json.loads(line) for line in lines], rest
