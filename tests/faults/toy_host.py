"""A worker process with a toy backend: the real host process, loop and pipes around a session that computes nothing.

Argument: JSON {process: {"how": ..., "step": n}}, the real fault that a process commits in that step. The loss of a step is
3 / step; a step takes no time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scaling_lab.cluster import host
from scaling_lab.errors import ConfigError


def fault(how: str, folder: Path) -> None:
    if how == "raise":
        raise RuntimeError("the toy broke")
    if how == "closed":  # what gloo says when another process has gone
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    if how == "explain":
        raise ConfigError("data.path=/gone: no such file")
    if how == "address":
        if not (folder / "taken").exists():
            (folder / "taken").touch()
            raise RuntimeError("The server socket has failed to listen: EADDRINUSE, address already in use")
        return
    if how == "exit":
        os._exit(7)
    if how == "quit":
        os._exit(0)
    if how == "abort":
        faulthandler._sigabrt()  # type: ignore[attr-defined]
    if how == "segv":
        faulthandler._sigsegv()  # type: ignore[attr-defined]
    if how == "thread":  # a library's thread that would hold the process
        threading.Thread(target=threading.Event().wait).start()
        raise RuntimeError("the toy broke")
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return
    if how == "children":
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            threading.Event().wait()
        raise RuntimeError("the toy broke")
    if how == "hang":
        where_it_hangs()
    if how == "deep":
        called_deeply(30)
    assert how in ("nan",), how


def where_it_hangs() -> None:
    threading.Event().wait()


def called_deeply(depth: int) -> None:
    if depth:
        called_deeply(depth - 1)
    where_it_hangs()


@dataclass
class Session:
    job: Any
    folder: Path
    fault: dict[str, Any]
    step_now: int = 0

    def prepare(self, batch: Any) -> float:
        return 0.0

    def step(self, batch: Any) -> Any:
        self.step_now += 1
        how = self.fault.get("how")
        if how and self.step_now == self.fault["step"]:
            fault(how, self.folder)
        loss = float("nan") if how == "nan" and self.step_now == self.fault["step"] else 3.0 / self.step_now
        metrics = {"loss": loss, "grad_norm": 1.0, "lr": 0.1, "valid_tokens": float((batch.labels >= 0).sum())}
        return SimpleNamespace(result=lambda: metrics)

    def prepare_evaluation(self, batch: Any) -> float:
        return 0.0

    def evaluate(self, batch: Any) -> Any:
        valid = float((batch.labels >= 0).sum())
        return SimpleNamespace(result=lambda: {"loss_sum": 2.0 * valid, "valid_tokens": valid})

    def compilations(self) -> int | None:
        return self.fault.get("compilations")

    def layouts(self) -> dict[str, Any]:
        return {planned.parameter.name: planned.weights for planned in self.job.plan.parameters}

    def bytes_per_device(self) -> dict[str, int | None]:
        return {"total": None}

    def device_facts(self) -> dict[str, Any]:
        return {"platform": "cpu", "kind": "toy", "count": self.job.plan.devices_per_process, "asynchronous": False}

    def close(self) -> None:
        pass


def load_backend(name: str) -> Any:
    faults = json.loads(sys.argv[1])
    folder = Path(sys.argv[2])
    if "import" in faults:
        raise ImportError("the toy cannot be imported")
    return SimpleNamespace(open_session=lambda job: Session(job, folder, faults.get(str(job.process), {})))


if __name__ == "__main__":
    host.main(load_backend)
