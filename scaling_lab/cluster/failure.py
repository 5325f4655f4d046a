"""Which of several failures was the cause, and what a user is told of it. Knows texts and signals; watches and ends nothing."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scaling_lab.errors import WorkerError

TAIL_LINES = 15
_TAIL_BYTES = 16384

#: What a process says when another one has gone: true, and not the cause.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|peer closed|broken pipe|socket closed|timed out waiting"
    r"|pair closure|remote process exited|communicator was aborted|coordination service|heartbeat timeout",
    re.IGNORECASE,
)
#: How faulthandler begins the stack of the thread that matters, and what may follow: frames, other threads, loaded modules.
_STACK = re.compile(r"(Stack|Current thread 0x\w+.*) \(most recent call first\):")
_OF_STACK = re.compile(r'  File "|  \.\.\.|Thread 0x\w+.* \(most recent call first\):|Extension modules: |$')
_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How one process failed. who: in words; what: how it ended; log: its file, shown in part unless `explained`.

    consequence: probably that of another failure; time: unix seconds
    """

    time: float
    who: str
    what: str
    log: Path
    kind: str = "worker"
    explained: bool = False
    consequence: bool = False


def raised(time: float, who: str, place: str, log: Path, record: dict[str, object]) -> Failure:
    """The failure that a process told itself, with its `error` record."""
    message, explained = str(record["message"]), bool(record["explained"])
    what = message if explained else f"raised {message} ({place})"
    kind = str(record["error_kind"])
    return Failure(time, who, what, log, kind, explained, kind == "worker" and is_consequence(message))


def exited(time: float, who: str, place: str, log: Path, code: int) -> Failure:
    """The failure of a process that ended without a word. code: as subprocess gives it, negative for a signal."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (by someone, or by the kernel for want of memory)" if name == "SIGKILL" else ""
        return Failure(time, who, f"was killed by {name}{hint} {place}", log, consequence=name == "SIGABRT")
    how = f"exited with code {code}" if code else "exited before its work was done"
    return Failure(time, who, f"{how} {place}", log)


def is_consequence(message: str) -> bool:
    """Whether an error's text speaks of another process that has gone."""
    return bool(_CONSEQUENCE.search(message))


def is_address_in_use(failures: Iterable[Failure]) -> bool:
    """Whether the port that was chosen for the processes to meet turned out to be taken."""
    return any(_ADDRESS_IN_USE.search(f"{failure.what}\n{tail(failure.log)}") for failure in failures)


def cause(failures: Iterable[Failure]) -> Failure:
    """The first failure that is not the consequence of another, or the first of all."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def error_from(failure: Failure) -> WorkerError:
    """One message: who, how, the last lines of the log where they can help, and where the log is."""
    if failure.explained:
        return WorkerError(f"{failure.what}\n({failure.who}; log: {failure.log})", failure.kind)
    if stack := innermost(failure.log):
        shown = f"where it was, innermost first, from {failure.log}:\n{stack}"
    elif lines := tail(failure.log):
        shown = f"the last lines of {failure.log}:\n{lines}"
    else:
        shown = f"its log {failure.log} is empty"
    return WorkerError(f"{failure.who} {failure.what}; {shown}", failure.kind)


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    return _indented(_end(log)[-TAIL_LINES:])


def innermost(log: Path) -> str:
    """The first lines of the stack that a log ends with, indented; empty where it ends otherwise.

    faulthandler writes the innermost frame first, so that the last lines of it say only how the process was started.
    """
    lines = _end(log)
    begins = [place for place, line in enumerate(lines) if _STACK.match(line)]
    if not begins or not all(_OF_STACK.match(line) for line in lines[begins[-1] + 1 :]):
        return ""
    return _indented(lines[begins[-1] + 1 :][:TAIL_LINES])


def _end(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
