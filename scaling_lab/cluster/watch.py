"""Watching a started job: collects what its processes tell, sees who is dead or stuck, and says who was the cause.

Owns liveness and progress. Starts and ends nothing, and does not know what a record means beyond its kind, phase and step.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling_lab.cluster import failure as failures
from scaling_lab.cluster.failure import Failure
from scaling_lab.cluster.hosts import Host, exit_code
from scaling_lab.cluster.interrupts import KINDS, Interrupts
from scaling_lab.cluster.messages import HEARTBEAT_S, split_lines
from scaling_lab.errors import WorkerError
from scaling_lab.plan.experiment import ClusterConfig

#: How long other failures may follow the first one, before the cause is looked for among them.
GATHER_S = 0.5
#: Without a heartbeat for so long, a process is not merely slow: it is stopped, or its machine is.
SILENT_S = 5 * HEARTBEAT_S
SILENT_LIMIT_S = 60.0
_TURN_S = 0.25
_STACK_S = 0.2

OnRecord = Callable[[dict[str, Any]], None]
#: Between the processes and this module only.
_PRIVATE = ("hello", "heartbeat", "progress", "exit")


@dataclass
class Rank:
    """What is known of one process of the job. heard, moved: monotonic times of its last message and its last progress."""

    process: int
    host: int
    log: Path
    heard: float
    moved: float
    pid: int | None = None
    phase: str = "start"
    step: int = 0
    progress: int = -1
    done: dict[str, Any] | None = None
    ended: bool = False
    rest: bytes = b""


@dataclass
class Watch:
    """The state of a job under watch. started: monotonic time of its start."""

    hosts: list[Host]
    ranks: dict[int, Rank]
    config: ClusterConfig
    on_record: OnRecord
    interrupts: Interrupts
    started: float
    failures: list[Failure] = field(default_factory=list)
    ended_hosts: set[int] = field(default_factory=set)
    announced: bool = False


def new_watch(hosts: list[Host], folder: Path, config: ClusterConfig, on_record: OnRecord, interrupts: Interrupts) -> Watch:
    """The watch over hosts that were started just now."""
    now = time.monotonic()
    ranks = {p: Rank(p, host.index, folder / f"worker-{p}.log", now, now) for host in hosts for p in host.pipes}
    return Watch(hosts, ranks, config, on_record, interrupts, now)


def watch(state: Watch) -> list[dict[str, Any]]:
    """Until every process is done: their `done` records. Raises WorkerError naming the process that failed, and how."""
    with selectors.DefaultSelector() as selector:
        _register(selector, state)
        last_turn, deadline = time.monotonic(), float("inf")
        while not _finished(state):
            for key, _ in selector.select(_TURN_S):
                if not key.data(key.fd):
                    selector.unregister(key.fd)
            now = time.monotonic()
            _forgive(state, now - last_turn - _TURN_S)
            last_turn = now
            _check_interrupts(state)
            if not state.failures and (stuck := _stuck(state, now)):
                state.failures.append(stuck)
                break
            if state.failures:
                deadline = min(deadline, now + GATHER_S)
            if now >= deadline:
                break
    if state.failures:
        raise _error(state)
    return [rank.done for rank in state.ranks.values() if rank.done]


def living(state: Watch) -> list[int]:
    """The pids of the processes that have not been seen to end."""
    return [rank.pid for rank in state.ranks.values() if rank.pid and not rank.ended]


def _register(selector: selectors.BaseSelector, state: Watch) -> None:
    """With each descriptor, what to do when it is readable; false when there will be no more of it."""
    for host in state.hosts:
        selector.register(host.pidfd, selectors.EVENT_READ, lambda _, host=host: _host_ended(state, host))
        selector.register(host.pipe, selectors.EVENT_READ, lambda pipe: _read_exits(state, pipe))
        for process, pipe in host.pipes.items():
            rank = state.ranks[process]
            selector.register(pipe, selectors.EVENT_READ, lambda pipe, rank=rank: _read(state, rank, pipe))
    selector.register(state.interrupts.pipe, selectors.EVENT_READ, lambda _: False)


def _finished(state: Watch) -> bool:
    return len(state.ended_hosts) == len(state.hosts) and all(rank.done for rank in state.ranks.values())


def _read(state: Watch, rank: Rank, pipe: int) -> bool:
    """Take what a process has told. False when there is nothing more: at the end, or for now."""
    try:
        data = os.read(pipe, 1 << 20)
    except BlockingIOError:
        return False
    records, rank.rest = split_lines(rank.rest + data)
    for record in records:
        _take(state, rank, record)
    return bool(data)


def _take(state: Watch, rank: Rank, record: dict[str, Any]) -> None:
    kind = record["kind"]
    rank.heard = time.monotonic()
    rank.phase, rank.step = record.get("phase", rank.phase), max(rank.step, record.get("step", 0))
    if record.get("progress", rank.progress) != rank.progress or kind not in _PRIVATE:
        rank.progress, rank.moved = record.get("progress", rank.progress), rank.heard
    if kind == "hello":
        rank.pid = record["pid"]
        _announce(state)
    elif kind == "error":
        state.failures.append(failures.raised(record["time"], _who(state, rank), _place(rank), rank.log, record))
    elif kind == "done":
        rank.done = record
    if kind == "error" or (rank.process == 0 and kind not in _PRIVATE):
        state.on_record(record)


def _announce(state: Watch) -> None:
    """One record with the pid of every process, once all have said hello."""
    pids = {rank.process: rank.pid for rank in state.ranks.values()}
    if not state.announced and all(pids.values()):
        state.announced = True
        state.on_record({"kind": "processes", "time": time.time(), "pids": [pids[process] for process in sorted(pids)]})


def _read_exits(state: Watch, pipe: int) -> bool:
    """The exits that a host's forking process reports; each fits a pipe's atomic write, so lines come whole."""
    data = os.read(pipe, 1 << 16)
    for record in split_lines(data)[0]:
        _ended(state, state.ranks[record["process"]], record["code"])
    return bool(data)


def _host_ended(state: Watch, host: Host) -> bool:
    code = exit_code(host) or 0
    state.ended_hosts.add(host.index)
    if len(host.pipes) == 1:
        _ended(state, state.ranks[next(iter(host.pipes))], code)
    elif code:
        log = state.ranks[min(host.pipes)].log
        who = f"the process of host {host.index} that started processes {min(host.pipes)} to {max(host.pipes)}"
        state.failures.append(failures.exited(time.time(), f"{who} (pid {host.child.pid})", "", log, code))
    return False


def _ended(state: Watch, rank: Rank, code: int) -> None:
    """A process has ended: fine when it is done, known when it told an error, else a failure. What it last told comes first."""
    rank.ended = True
    pipe = state.hosts[rank.host].pipes[rank.process]
    os.set_blocking(pipe, False)  # something that it started may still hold the pipe
    while _read(state, rank, pipe):
        pass
    told = any(failure.log == rank.log for failure in state.failures)
    if rank.done is None and not (told and code > 0):
        state.failures.append(failures.exited(time.time(), _who(state, rank), _place(rank), rank.log, code))


def _forgive(state: Watch, late_s: float) -> None:
    """Time in which this process itself did not run (Ctrl-Z, a slow disk) is nobody's fault."""
    if late_s > HEARTBEAT_S:
        state.started += late_s
        for rank in state.ranks.values():
            rank.heard, rank.moved = rank.heard + late_s, rank.moved + late_s


def _check_interrupts(state: Watch) -> None:
    if state.interrupts.signals:
        number = state.interrupts.signals[0]
        reached = max(rank.step for rank in state.ranks.values())
        word = "interrupted" if number == signal.SIGINT else f"terminated by {number.name}"
        raise WorkerError(f"{word} after step {reached}; every process of the job has been ended.", KINDS[number])


def _stuck(state: Watch, now: float) -> Failure | None:
    """The process to blame where some process is over its limit: a silent one first, then the one that is furthest behind."""
    working = [rank for rank in state.ranks.values() if not rank.done and not rank.ended]
    over = [words for rank in working if (words := _over_limit(state, rank, now))]
    if not over:
        return None
    blamed = min(working, key=lambda rank: (now - rank.heard < SILENT_S, rank.step, rank.progress))
    if now - blamed.heard >= SILENT_S:
        what = f"has been silent for {_seconds(now - blamed.heard)}, it is stopped or its host is"
    else:
        _ask_for_stack(blamed)
        what = f"made no progress for {_seconds(now - blamed.moved)}"
    return Failure(time.time(), _who(state, blamed), f"{what} {_place(blamed)} ({over[0]})", blamed.log, "stuck")


def _over_limit(state: Watch, rank: Rank, now: float) -> str | None:
    config = state.config
    begun = any(other.step for other in state.ranks.values())  # they go in step
    if not begun and now - state.started > config.startup_limit_s:
        return f"no first step within cluster.startup_limit_s={config.startup_limit_s:g}"
    if begun and now - rank.moved > config.step_limit_s:
        return f"over cluster.step_limit_s={config.step_limit_s:g}"
    if rank.pid and now - rank.heard > SILENT_LIMIT_S:
        return f"no heartbeat for {SILENT_LIMIT_S:g} s"
    return None


def _ask_for_stack(rank: Rank) -> None:
    """Have a process write to its log where it is, and give it a moment to finish that."""
    if rank.pid:
        before = size = rank.log.stat().st_size
        os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline:
            time.sleep(_STACK_S / 10)
            last, size = size, rank.log.stat().st_size
            if size == last != before:
                break


def _error(state: Watch) -> WorkerError:
    """The error of the cause. Where all speak of another process, and one says nothing at all, it is the silent one."""
    if all(failure.consequence for failure in state.failures):
        now = time.monotonic()
        silent = [r for r in state.ranks.values() if not r.ended and not r.done and now - r.heard >= SILENT_S]
        for rank in silent[:1]:
            what = f"has been silent for {_seconds(now - rank.heard)} {_place(rank)}, and the others gave it up"
            return failures.error_from(Failure(0.0, _who(state, rank), what, rank.log, "stuck"))
    error = failures.error_from(failures.cause(state.failures))
    if not any(rank.step for rank in state.ranks.values()) and failures.is_address_in_use(state.failures):
        error.kind = "address_in_use"
    return error


def _who(state: Watch, rank: Rank) -> str:
    return f"process {rank.process} of {len(state.ranks)} (pid {rank.pid or 'unknown'}, host {rank.host})"


def _place(rank: Rank) -> str:
    return f"in phase {rank.phase} after step {rank.step}"


def _seconds(value: float) -> str:
    """Limits may be fractions of a second."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.2f} s"
