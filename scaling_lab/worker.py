"""The one timed loop, shared by both backends: what a process of a job does from its first batch to its last record.

Owns the order of the work, the clock and the records. Must not know frameworks, how processes start or are watched, nor
what becomes of a record: it hands each to `tell`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scaling_lab.backends.contract import Batch, Job, Pending, Session
from scaling_lab.backends.rows import stored_batch
from scaling_lab.data import Rows, Source, no_validation
from scaling_lab.errors import WorkerError
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import Plan

#: Takes a record: a dict with `kind` (phase, start, prepared, step, progress, evaluation, done), to which it may add.
Tell = Callable[[dict[str, Any]], None]

PARTS = ("startup", "compile", "untimed_steps", "timed_steps", "evaluation", "checkpoint", "other")


@dataclass
class Clock:
    """Where the wall time went, in seconds by part. Every moment since `started` (unix time) is charged exactly once."""

    started: float
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    charged: float = 0.0

    def __post_init__(self) -> None:
        self.offset = time.time() - self.started - time.perf_counter()

    def charge(self, part: str) -> float:
        """Charge the time since the last charge to a part; returns it, in seconds."""
        passed = self.offset + time.perf_counter() - self.charged
        self.charged += passed
        self.parts[part] = self.parts.get(part, 0.0) + passed
        return passed

    def move(self, seconds: float, source: str, target: str) -> None:
        """Charge some seconds of one part to another instead."""
        self.parts[source] -= seconds
        self.parts[target] = self.parts.get(target, 0.0) + seconds


@dataclass(frozen=True)
class Flight:
    """A step handed to the device: its number (1 for the first), the pending result, and the ids of its samples."""

    step: int
    pending: Pending
    samples: list[int] | None


@dataclass
class Run:
    """What the functions of the loop share.

    cpu_s: processor time of this process when the last step was done; timed_cpu_s: what each timed step took of it
    """

    job: Job
    source: Source
    session: Session
    tell: Tell
    clock: Clock
    cpu_s: float = 0.0
    timed_cpu_s: list[float] = field(default_factory=list)


def run(job: Job, source: Source, open_session: Callable[[Job], Session], tell: Tell, started: float) -> None:
    """Train as the plan says, telling each record; the last one is `done`.

    started: unix time at which the coordinator started this process. Raises WorkerError (kinds `layout`, `diverged`,
    `recompiled`), ConfigError where there is nothing to evaluate on, and whatever the backend raises.
    """
    clock = Clock(started)
    tell({"kind": "phase", "phase": "startup"})
    _check_validation(job, source)
    session = open_session(job)
    state = Run(job, source, session, tell, clock)
    facts = session.device_facts()
    tell({"kind": "start", "device_facts": facts})
    _prepare(state)
    layouts = session.layouts()
    differences = layout_differences(job.plan, layouts)
    if differences:
        raise WorkerError("weights do not lie as planned:\n" + "\n".join(f"  {line}" for line in differences), "layout")
    _train(state, ahead=facts.get("asynchronous", True))
    compilations = session.compilations()
    if compilations not in (None, 1) and job.experiment.workload.steps:
        raise WorkerError(
            f"the train step was compiled {compilations} times, not once: its inputs changed shape or layout.", "recompiled"
        )
    results = {"bytes_per_device": session.bytes_per_device(), "compilations": compilations, "device_facts": facts}
    tell({"kind": "phase", "phase": "closing"})
    session.close()
    clock.charge("other")
    tell({"kind": "done", **results, **_layout_record(layouts), **_facts(state)})


def _check_validation(job: Job, source: Source) -> None:
    every = job.experiment.workload.evaluation.every
    if every and not source.validation_batches(job.experiment.workload.global_batch):
        raise no_validation(job.experiment.data, every)


def _prepare(state: Run) -> None:
    state.tell({"kind": "phase", "phase": "compile"})
    compile_s = state.session.prepare(_batch(state.job, state.source, 1))
    state.clock.charge("startup")
    state.clock.move(compile_s, "startup", "compile")
    parts = state.clock.parts
    state.tell({"kind": "prepared", "startup_s": parts["startup"], "compile_s": parts["compile"]})


def _train(state: Run, ahead: bool) -> None:
    """Every step. ahead: a step's dispatch returns before the device is done, so the next one is dispatched meanwhile."""
    steps = state.job.experiment.workload.steps
    state.tell({"kind": "phase", "phase": "train"})
    batch = _batch(state.job, state.source, 1) if steps else None
    flight: Flight | None = None
    drained = True
    for step in range(1, steps + 1):
        assert batch is not None
        if drained:  # otherwise a step's time begins when the one before it is done
            state.clock.charge("other")
            state.cpu_s = time.process_time()
        dispatched = Flight(step, state.session.step(batch), _samples(state, step))
        _finish(state, flight)
        flight = dispatched
        drained = _evaluates(state, step)
        if drained or not ahead:
            _finish(state, flight)
            flight = None
        batch = _batch(state.job, state.source, step + 1) if step < steps else None
        if drained:
            _evaluate(state, step)
    _finish(state, flight)


def _evaluates(state: Run, step: int) -> bool:
    workload = state.job.experiment.workload
    every = workload.evaluation.every
    return bool(every) and (step % every == 0 or step == workload.steps)


def _finish(state: Run, flight: Flight | None) -> None:
    """Wait until a step is done, and record it. Its time: since the step before it was done, or since its own dispatch."""
    if flight is None:
        return
    result = flight.pending.result()
    workload = state.job.experiment.workload
    timed = flight.step > workload.untimed_steps
    step_time_s = state.clock.charge("timed_steps" if timed else "untimed_steps")
    before_s, state.cpu_s = state.cpu_s, time.process_time()
    cpu_time_s = state.cpu_s - before_s
    if timed:
        state.timed_cpu_s.append(cpu_time_s)
    tokens = workload.global_batch * workload.sequence
    record = {
        "kind": "step",
        "step": flight.step,
        **{name: result[name] for name in ("loss", "grad_norm", "lr")},
        "valid_tokens": round(result["valid_tokens"]),
        **_special_record(result),
        "step_time_s": step_time_s,
        "timed": timed,
        "tokens": tokens,
        "tokens_seen": tokens * flight.step,
        "cpu_time_s": cpu_time_s,
    }
    state.tell(record if flight.samples is None else {**record, "samples": flight.samples})
    _check_finite({name: result[name] for name in ("loss", "grad_norm")}, flight.step)


def _special_record(result: dict[str, float]) -> dict[str, float]:
    """What the routers of a model with experts report, and the bubble of a pipeline."""
    found = {name: result[name] for name in ("balance_loss", "z_loss", "bubble_share") if name in result}
    return found | {name: round(result[name]) for name in ("dropped_tokens",) if name in result}


def _check_finite(values: dict[str, float], step: int) -> None:
    """Stop a run that has diverged. Values are the same in every process, so all of them stop at the same step."""
    wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
    if wrong:
        named = " and ".join(f"{name} is {value}" for name, value in wrong.items())
        raise WorkerError(
            f"training diverged: {named} at step {step}. Try a smaller workload.optimizer.lr, more "
            f"workload.optimizer.warmup_steps, or a wider dtype in workload.precision.",
            "diverged",
        )


def _evaluate(state: Run, step: int) -> None:
    """Loss over the validation batches, each token counted once: the sum of their sums over the sum of their counts."""
    session, workload = state.session, state.job.experiment.workload
    state.tell({"kind": "phase", "phase": "evaluation"})
    state.clock.charge("other")
    available = state.source.validation_batches(workload.global_batch)
    batches = min(workload.evaluation.batches or available, available)
    loss_sum = tokens = compile_s = 0.0
    for index, batch in enumerate(_validation(state, batches)):
        if index == 0 and (compile_s := session.prepare_evaluation(batch)):
            state.clock.charge("evaluation")
            state.clock.move(compile_s, "evaluation", "evaluation_compile")
        result = session.evaluate(batch).result()
        loss_sum, tokens = loss_sum + result["loss_sum"], tokens + result["valid_tokens"]
        state.tell({"kind": "progress", "batch": index + 1})
    loss = loss_sum / tokens if tokens else 0.0
    record = {"kind": "evaluation", "step": step, "loss": loss, "tokens": round(tokens), "batches": batches}
    state.tell({**record, "time_s": state.clock.charge("evaluation")})
    _check_finite({"validation loss": loss}, step)
    state.tell({"kind": "phase", "phase": "train"})


def _validation(state: Run, batches: int) -> Iterator[Batch]:
    """This process's rows of the first validation batches: global batches, so that accumulation does not change what is read.

    Each comes in the microbatches of a step, since no more fits a device; those past the end of the split are left out.
    """
    job, source, microbatch = state.job, state.source, state.job.plan.batch.microbatch
    global_batch = job.experiment.workload.global_batch
    for index in range(batches):
        for first in range(0, min(global_batch, source.num_validation_samples - index * global_batch), microbatch):
            rows = [first + row for row in job.rows]
            yield _shaped(job, source.validation_rows(index, rows, global_batch), 1)


def _batch(job: Job, source: Source, step: int) -> Batch:
    """This process's rows of a step (1 for the first): row r of microbatch m is row m x microbatch + r of the global batch."""
    split = job.plan.batch
    rows = [m * split.microbatch + row for m in range(split.accumulation) for row in job.rows]
    return _shaped(job, source.train_rows(step - 1, rows, job.experiment.workload.global_batch), split.accumulation)


def _shaped(job: Job, rows: Rows, accumulation: int) -> Batch:
    shape = (accumulation, len(rows.tokens) // accumulation, rows.tokens.shape[1])
    documents = None if rows.documents is None else rows.documents.reshape(shape)
    return stored_batch(job, rows.tokens.reshape(shape), rows.labels.reshape(shape), documents)


def _samples(state: Run, step: int) -> list[int] | None:
    """Ids of all rows of the global batch, where asked for; every process has the same answer, the first one's is kept."""
    if not state.job.experiment.data.record_samples or state.job.process:
        return None
    batch = state.job.experiment.workload.global_batch
    return [int(sample) for sample in state.source.train_rows(step - 1, range(batch), batch).samples]


def layout_differences(plan: Plan, found: dict[str, Layout]) -> list[str]:
    """One line for each weight that lies otherwise than planned. The order of axes within a dim is free: torch strides."""
    lines = []
    for planned in plan.parameters:
        name, wanted = planned.parameter.name, planned.weights
        real = found.get(name)
        if real is None:
            lines.append(f"{name}: planned {_words(wanted)}, but the backend does not report it")
        elif [sorted(axes) for axes in real.dims] != [sorted(axes) for axes in wanted.dims]:
            lines.append(f"{name}: planned {_words(wanted)}, found {_words(real)}")
    known = {planned.parameter.name for planned in plan.parameters}
    return lines + [f"{name}: found, but not in the plan" for name in found if name not in known]


def _words(layout: Layout) -> str:
    return "[" + ", ".join("+".join(axes) or "whole" for axes in layout.dims) + "]"


def _layout_record(layouts: dict[str, Layout]) -> dict[str, Any]:
    plain = {name: [list(axes) for axes in layout.dims] for name, layout in layouts.items()}
    return {"layouts": plain, "layouts_equal_plan": True}


def _facts(state: Run) -> dict[str, Any]:
    clock, timed = state.clock, state.timed_cpu_s
    return {
        "corpus": state.source.corpus,
        "cpu_time_per_step_s": statistics.median(timed) if timed else None,
        "resident_bytes": peak_resident_bytes(),
        "wall_start": clock.started,
        "wall_time_s": clock.charged,
        "time_parts_s": clock.parts,
    }


def peak_resident_bytes() -> int | None:
    """Most memory that this process had resident. Not `ru_maxrss`, which a process inherits from the one that started it."""
    with open("/proc/self/status") as status:
        line = next((line for line in status if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024
