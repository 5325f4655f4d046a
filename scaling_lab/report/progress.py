"""Progress of a running job: a bar on a terminal, an occasional plain line elsewhere. Fed with records; computes no metric."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from scaling_lab.plan.experiment import Experiment
from scaling_lab.report.units import count, decimal, seconds
from scaling_lab.results.metrics import Scale, step_metrics
from scaling_lab.results.records import Record

#: Steps whose median is the speed shown, and in how many lines a run without a terminal is told.
RECENT, LINES = 20, 10

#: What the user reads while a job is in a phase.
PHASES = {"startup": "starting", "compile": "compiling", "train": "training", "evaluation": "evaluating", "closing": "ending"}


class Progress:
    """Shows a job. `record` for every record as it comes, `close` however the job ends; `say` for a line in between."""

    def __init__(self, console: Console, experiment: Experiment, scale: Scale):
        self._console = console
        self._workload = experiment.workload
        self._compiles = experiment.backend.compile is not False  # null is JAX's, which always does
        self._scale = scale
        self._times: deque[float] = deque(maxlen=RECENT)
        self._evaluation_s: float | None = None
        self._step = 0
        self._bar: Bar | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._open_bar()

    def record(self, record: Record) -> None:
        """Show what a record says; records of other kinds, and of processes but the first, are passed over."""
        if record.get("process"):
            return
        kind = record.get("kind")
        if kind == "step":
            self._on_step(record)
        elif kind == "evaluation":
            self._evaluation_s = record.get("time_s")
            self.say(evaluation_line(record))
        elif kind == "event":
            self.say(record["message"])
        elif kind == "phase":
            self._on_phase(record["phase"])

    def say(self, text: str) -> None:
        """A line for the user, above the bar where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away. Closing twice is harmless."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def _on_phase(self, phase: str) -> None:
        """The longest silence without a bar is that of the compiler."""
        if self._bar:
            self._bar.update(self._task, description=PHASES.get(phase, phase))
        elif phase == "compile" and self._compiles:
            self.say("compiling the train step")

    def _on_step(self, record: Record) -> None:
        self._step = record["step"]
        if record.get("step_time_s"):
            self._times.append(record["step_time_s"])
        if self._bar:
            self._bar.update(self._task, completed=self._step, line=self._line(record))
        elif is_told(self._step, self._workload.steps):
            self.say(f"step {self._step:>{len(str(self._workload.steps))}}/{self._workload.steps}  " + self._line(record))

    def _line(self, record: Record) -> str:
        return step_line(record, self._row(record), self.left_s())

    def _row(self, record: Record) -> dict[str, Any]:
        """The step's metrics at the speed of the recent steps, which jumps less than one step's."""
        recent = {**record, "step_time_s": statistics.median(self._times)} if self._times else record
        return step_metrics(recent, self._scale)

    def left_s(self) -> float | None:
        """Seconds until the last step, at the recent speed, evaluations included; None where unknown, and after the last."""
        if not self._times or self._step >= self._workload.steps:
            return None
        steps, every = self._workload.steps, self._workload.evaluation.every
        left = (steps - self._step) * statistics.median(self._times)
        if every and self._evaluation_s:
            left += (math.ceil(steps / every) - self._step // every) * self._evaluation_s  # the last step is evaluated too
        return left

    def _open_bar(self) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        )
        self._bar = Bar(
            *columns,
            TextColumn("{task.fields[line]}", markup=False),
            console=self._console,
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=self._workload.steps, line="")
        self._bar.start()


def is_told(step: int, steps: int) -> bool:
    """Whether a run without a terminal says something at this step: the first, the last and about every tenth of the way."""
    return step in (1, steps) or step * LINES // steps > (step - 1) * LINES // steps


def step_line(record: Record, row: dict[str, Any], left_s: float | None) -> str:
    """One step in words: loss, speed, time left."""
    left = "" if left_s is None else f"  {seconds(left_s)} left"
    return f"loss {decimal(record.get('loss'), 4)}  {count(row.get('tokens_per_s'))} tokens/s{left}"


def evaluation_line(record: Record) -> str:
    """One evaluation in words."""
    took = f" in {seconds(record['time_s'])}" if record.get("time_s") else ""
    tokens = f" over {count(record['tokens'])} tokens" if record.get("tokens") else ""
    return f"step {record['step']}: validation loss {decimal(record['loss'], 4)}{tokens}{took}"
