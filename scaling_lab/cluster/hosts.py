"""Starting a host's worker process and ending all of them. Owns process groups, pipes and signals; judges nobody."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from scaling_lab.cluster.host import Task

#: How a host's worker process is started.
COMMAND = (sys.executable, "-m", "scaling_lab.cluster.host")

_POLL_S = 0.02
_KILL_LIMIT_S = 10.0
_ORPHANS_LIMIT_S = 2.0


@dataclass(frozen=True)
class Host:
    """A started worker process. pipes: process -> read end of its records; pipe: of its own; pidfd: readable at its end."""

    index: int
    child: subprocess.Popen[bytes]
    pidfd: int
    pipe: int
    pipes: dict[int, int]


def start(index: int, processes: range, task: Task, command: Iterable[str], environment: Mapping[str, str]) -> Host:
    """Start one host's worker process, in a session of its own. task: without its pipes, which are made here."""
    readers, writers = zip(*(os.pipe() for _ in range(len(processes) + 1)), strict=True)
    pipes = dict(zip(processes, writers[1:], strict=True))
    line = json.dumps(asdict(task) | {"pipes": pipes, "host_pipe": writers[0]}).encode() + b"\n"
    try:
        with Path(task.folder, f"worker-{processes[0]}.log").open("ab") as log:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(environment),
                pass_fds=writers,
                start_new_session=True,
            )
    finally:
        for writer in writers:
            os.close(writer)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already: whoever watches will see that
        child.stdin.write(line)
        child.stdin.flush()
    return Host(index, child, os.pidfd_open(child.pid), readers[0], dict(zip(processes, readers[1:], strict=True)))


def end(hosts: Iterable[Host], pids: Iterable[int], grace_s: float, hurry: Callable[[], bool]) -> None:
    """End every process of these hosts: SIGTERM to the groups, SIGKILL after the grace, until none is left.

    pids: of the processes known to live, killed before the ones that forked them, so that these reap them.
    hurry: asked meanwhile; once true, there is no more grace.
    """
    hosts = tuple(hosts)
    for host in hosts:
        _signal_group(host, signal.SIGTERM)
        _signal_group(host, signal.SIGCONT)  # a stopped process could not end
    _wait(hosts, grace_s, hurry)
    if any(map(_lives, hosts)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _wait(hosts, min(1.0, grace_s), lambda: False)
    for host in hosts:
        _signal_group(host, signal.SIGKILL)
    _wait(hosts, _KILL_LIMIT_S, lambda: False)
    for host in hosts:
        _forget(host)


def _signal_group(host: Host, number: signal.Signals) -> None:
    """The group's number is not given to anyone else before its first process has been waited for, in `_forget`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(host.child.pid, number)


def _has_group(host: Host) -> bool:
    try:
        os.killpg(host.child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _lives(host: Host) -> bool:
    return os.waitid(os.P_PID, host.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _wait(hosts: tuple[Host, ...], limit_s: float, hurry: Callable[[], bool]) -> None:
    deadline = time.monotonic() + limit_s
    while any(map(_lives, hosts)) and time.monotonic() < deadline and not hurry():
        time.sleep(_POLL_S)


def exit_code(host: Host) -> int | None:
    """How the worker process of a host ended, negative for a signal; None while it lives. It is not waited for."""
    info = os.waitid(os.P_PID, host.child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _forget(host: Host) -> None:
    host.child.wait()
    deadline = time.monotonic() + _ORPHANS_LIMIT_S
    while _has_group(host) and time.monotonic() < deadline:  # killed orphans are for the system's first process to reap
        time.sleep(_POLL_S)
    with contextlib.suppress(BrokenPipeError):
        assert host.child.stdin is not None
        host.child.stdin.close()
    for pipe in (host.pidfd, host.pipe, *host.pipes.values()):
        os.close(pipe)
