"""Runs a job on this machine: starts one worker process per (simulated) host, watches them, and leaves none behind."""

from __future__ import annotations

import json
import os
import random
import site
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scaling_lab.cluster import hosts as processes
from scaling_lab.cluster import watch as watching
from scaling_lab.cluster.environment import conflicts, host_devices, worker_environment
from scaling_lab.cluster.folders import cache_folder
from scaling_lab.cluster.host import Task
from scaling_lab.cluster.hosts import Host
from scaling_lab.cluster.interrupts import Interrupts, heard
from scaling_lab.cluster.watch import OnRecord
from scaling_lab.config import to_plain
from scaling_lab.errors import WorkerError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan

#: Below the ports that Linux gives to outgoing connections (from 32768), so that only a listener could take one meanwhile.
PORTS = range(20000, 32000)
START_ATTEMPTS = 3


def run(
    experiment: Experiment, plan: Plan, folder: Path, on_record: OnRecord, command: Iterable[str] = processes.COMMAND
) -> list[dict[str, Any]]:
    """Run the job to its end; gives the `done` record of each process, in order. Logs: `worker-*.log` in the folder.

    on_record gets process 0's records (phase, start, step, evaluation, done), `error` from any, `processes` (pids) and
    `event`. Raises WorkerError when a process raised, ended or stopped, or on SIGINT (kind `interrupted`) and SIGTERM
    (`preempted`). However it returns, no process of the job is left.
    """
    folder = folder.absolute()
    for sentence in conflicts(experiment, plan):
        _event(on_record, sentence)
    with heard() as interrupts:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return _attempt(experiment, plan, folder, on_record, interrupts, tuple(command))
            except WorkerError as error:
                if error.kind != "address_in_use" or attempt == START_ATTEMPTS:
                    raise
                _event(on_record, "the port for the processes to meet was taken meanwhile; starting again with another")
    raise AssertionError("every attempt returns or raises")


def _event(on_record: OnRecord, message: str) -> None:
    on_record({"kind": "event", "time": time.time(), "message": message})


def _attempt(
    experiment: Experiment, plan: Plan, folder: Path, on_record: OnRecord, interrupts: Interrupts, command: tuple[str, ...]
) -> list[dict[str, Any]]:
    started: list[Host] = []
    grace_s = experiment.cluster.grace_s
    state = None
    try:
        _start_hosts(experiment, plan, folder, command, started)
        state = watching.new_watch(started, folder, experiment.cluster, on_record, interrupts)
        return watching.watch(state)
    finally:
        processes.end(started, watching.living(state) if state else [], grace_s, lambda: interrupts.insistent)


def _start_hosts(experiment: Experiment, plan: Plan, folder: Path, command: tuple[str, ...], started: list[Host]) -> None:
    """Start each host's worker process; `started` has those that live, also when a later one cannot be started."""
    per_host = plan.processes // plan.mesh.hosts
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, **worker_environment(experiment, plan), **_import_path()}
    for index in range(plan.mesh.hosts):
        task = Task(
            experiment=to_plain(experiment),
            plan=_plan_text(plan),
            folder=str(folder),
            cache=str(cache_folder()),
            address=address,
            pipes={},
            host_pipe=-1,
            coordinator=os.getpid(),
            started=time.time(),
        )
        mine = range(index * per_host, (index + 1) * per_host)
        started.append(processes.start(index, mine, task, command, {**environment, **host_devices(plan, index)}))


def _plan_text(plan: Plan) -> str:
    return json.dumps(to_plain(plan))


def _import_path() -> dict[str, str]:
    """Where a worker finds this very package, however the coordinator came by it."""
    root = str(Path(__file__).parents[2])
    if root in site.getsitepackages():
        return {}
    present = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{root}{os.pathsep}{present}" if present else root}


def free_port() -> int:
    """A port of the loopback where nobody listens now. Someone may before it is used: then the start is tried again."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
