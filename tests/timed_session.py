"""A session whose device is a thread that sleeps: what the timed loop's tests time."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from scaling_lab.backends.contract import Batch, Job
from scaling_lab.plan.layout import Layout


@dataclass
class Device:
    """Does what it is handed in order, each piece taking a given time: what an accelerator is to its host."""

    seconds: float
    work: queue.Queue = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            done = self.work.get()
            threading.Event().wait(self.seconds)
            done.set()

    def hand(self) -> threading.Event:
        done = threading.Event()
        self.work.put(done)
        return done


@dataclass
class Pending:
    name: str
    calls: list[str]
    values: dict[str, float]
    done: threading.Event | None

    def result(self) -> dict[str, float]:
        if self.done:
            self.done.wait()
        self.calls.append(f"result {self.name}")
        return self.values


class Session:
    """A session that notes its calls. losses: of step 1, 2, ...; device: none for one that works inside `step`."""

    def __init__(self, job: Job, device: Device | None = None, losses: dict[int, float] | None = None):
        self.job, self.device, self.losses = job, device, losses or {}
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.evaluated: list[Batch] = []
        self.compiled: int | None = 1
        self.found = {planned.parameter.name: planned.weights for planned in job.plan.parameters}

    def prepare(self, batch: Batch) -> float:
        self.calls.append("prepare")
        threading.Event().wait(0.02)
        return 0.015

    def step(self, batch: Batch) -> Pending:
        self.batches.append(batch)
        step = len(self.batches)
        self.calls.append(f"step {step}")
        values = {"loss": self.losses.get(step, 2.0), "grad_norm": 1.0, "lr": 0.5, "valid_tokens": 7.0}
        return Pending(str(step), self.calls, values, self.device and self.device.hand())

    def prepare_evaluation(self, batch: Batch) -> float:
        return 0.0

    def evaluate(self, batch: Batch) -> Pending:
        """A token's loss is its label, so that sums can be checked by hand."""
        self.evaluated.append(batch)
        self.calls.append("evaluate")
        valid = batch.labels >= 0
        values = {"loss_sum": float(batch.labels[valid].sum()), "valid_tokens": float(valid.sum())}
        return Pending("evaluation", self.calls, values, None)

    def compilations(self) -> int | None:
        return self.compiled

    def layouts(self) -> dict[str, Layout]:
        return self.found

    def bytes_per_device(self) -> dict[str, int | None]:
        return {"total": None}

    def device_facts(self) -> dict[str, Any]:
        return {"platform": "cpu", "asynchronous": self.device is not None}

    def close(self) -> None:
        self.calls.append("close")
