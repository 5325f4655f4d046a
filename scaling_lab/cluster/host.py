"""The worker side of a start: one such process per host imports the backend once, then is, or forks, the job's processes.

Owns the life of a worker process: its log, its signals, its end when the coordinator ends, and the telling of its errors.
Must not know what a job computes. Reads its task from standard input, which stays open as long as the coordinator lives.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from scaling_lab.cluster.messages import Reporter
from scaling_lab.errors import LabError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What one host is told. pipes: process -> file descriptor of its records; host_pipe: of this process's own.

    coordinator: pid; started: unix time at which the coordinator started this process; cache: folder for built corpora
    """

    experiment: dict[str, Any]
    plan: str
    folder: str
    cache: str
    address: str
    pipes: dict[int, int]
    host_pipe: int
    coordinator: int
    started: float


def main(load_backend: Callable[[str], Any] | None = None) -> NoReturn:
    """Do one host's part of a job, and exit. load_backend: name -> module with `open_session`; only tests replace it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the coordinator's to hear
    task = read_task()
    die_with(task.coordinator)
    first = min(task.pipes)
    if len(task.pipes) == 1:
        os.close(task.host_pipe)
        reporter = enter(task, first)
        leave(reporter, partial(_single, task, reporter, load_backend or import_backend))
    try:
        run = prepare(task, load_backend or import_backend)
    except BaseException as error:
        reporter = Reporter(task.pipes[first], first)
        report_error(reporter, error)
        os._exit(1)
    fork_all(task, run)


def import_backend(name: str) -> Any:
    """The training module of a backend."""
    return importlib.import_module(f"scaling_lab.backends.{name}.train")


def read_task() -> Task:
    """The first line of standard input. Read byte by byte, so that nothing waits in a buffer when the process forks."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            sys.exit("standard input ended before the task: this program is started by scaling_lab, not by hand")
        line += part
    plain = json.loads(line)
    plain["pipes"] = {int(process): pipe for process, pipe in plain["pipes"].items()}
    return Task(**plain)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens; at once if it has already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def prepare(task: Task, load_backend: Callable[[str], Any]) -> Callable[[int, Reporter], None]:
    """Import the backend while the data is opened beside it. Gives what each process then runs: (process, reporter)."""
    opened: list[Any] = []
    experiment, data = _experiment(task), importlib.import_module("scaling_lab.data")

    def open_data() -> None:
        try:
            model, sequence = experiment.model, experiment.workload.sequence
            opened.append(data.open_source(experiment.data, model.vocab, sequence, Path(task.cache)))
        except Exception as error:
            opened.append(error)

    thread = threading.Thread(target=open_data, name="data")
    thread.start()
    try:
        backend = load_backend(experiment.backend.name)
        from scaling_lab import worker
        from scaling_lab.backends.contract import Job
        from scaling_lab.config import plan_from

        plan = plan_from(task.plan)
    finally:
        thread.join()  # no thread of ours may be running at a fork
    if isinstance(opened[0], Exception):
        raise opened[0]

    def run(process: int, reporter: Reporter) -> None:
        job = Job(experiment, plan, process, task.address)
        worker.run(job, opened[0], backend.open_session, reporter.tell, task.started)

    return run


def _experiment(task: Task) -> Any:
    from scaling_lab.config import experiment_from

    return experiment_from(task.experiment)


def _single(task: Task, reporter: Reporter, load_backend: Callable[[str], Any]) -> None:
    prepare(task, load_backend)(reporter.process, reporter)


def fork_all(task: Task, run: Callable[[int, Reporter], None]) -> NoReturn:
    """Fork one process for each of the host's, tell the coordinator how each ended, and exit when all have."""
    # A signal to the group ends the children; this process stays to reap them, so that none is left to anyone else.
    signal.signal(signal.SIGTERM, lambda *_: None)
    own, children = os.getpid(), {}
    for process in task.pipes:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(own)
            os.close(task.host_pipe)
            reporter = enter(task, process)
            leave(reporter, partial(run, process, reporter))
        children[pid] = process
    for pipe in task.pipes.values():
        os.close(pipe)
    while children:
        pid, status = os.waitpid(-1, 0)
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            line = json.dumps({"kind": "exit", "process": children.pop(pid), "pid": pid, "code": code})
            os.write(task.host_pipe, line.encode() + b"\n")
    os._exit(0)


def enter(task: Task, process: int) -> Reporter:
    """Make this process the job's process of that number: its own log and pipe, and an end when the coordinator ends."""
    for other, pipe in task.pipes.items():
        if other != process:
            os.close(pipe)
    log = os.open(Path(task.folder, f"worker-{process}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the coordinator asks a process that hangs where it is
    threading.Thread(target=_wait_for_coordinator, daemon=True, name="coordinator").start()
    return Reporter(task.pipes[process], process)


def _wait_for_coordinator() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def leave(reporter: Reporter, work: Callable[[], None]) -> NoReturn:
    """Do the work, tell an error, and exit without waiting for any thread or library that would hold the process."""
    try:
        work()
        code = 0
    except BaseException as error:
        report_error(reporter, error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_error(reporter: Reporter, error: BaseException) -> None:
    """Tell the coordinator, and leave the traceback in the log. An error of the lab explains itself: without type name."""
    traceback.print_exception(error)
    explained = isinstance(error, LabError)
    message = str(error) if explained else f"{type(error).__name__}: {error}"
    kind = error.kind if isinstance(error, LabError) else "worker"
    record = {**reporter.state, "error_kind": kind, "message": message, "explained": explained}
    reporter.send({"kind": "error", **record, "traceback": "".join(traceback.format_exception(error))})


if __name__ == "__main__":
    main()
