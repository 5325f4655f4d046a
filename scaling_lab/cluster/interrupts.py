"""Ctrl-C, SIGTERM and a closed terminal at the coordinator: heard beside its pipes, obeyed elsewhere, and held back while a result
is written. Ends nothing itself. Hears nothing outside the main thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

#: Signal -> kind of the WorkerError that it ends a job with.
KINDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "preempted", signal.SIGHUP: "interrupted"}


@dataclass(frozen=True)
class Interrupts:
    """pipe: readable as soon as a signal has arrived; signals: those that did, in order."""

    pipe: int
    signals: list[signal.Signals] = field(default_factory=list)

    @property
    def insistent(self) -> bool:
        """Whether someone asked more than once: then there is no grace."""
        return len(self.signals) > 1


class Interrupted(KeyboardInterrupt):
    """A signal that asked the coordinator to stop while it was not watching a job. kind: as `WorkerError` has it."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.kind = KINDS[signal.Signals(number)]


Handler = Callable[[int, FrameType | None], None]


@contextmanager
def obeyed() -> Iterator[None]:
    """Raise Interrupted where a signal arrives while the block runs, so that what is open is closed and what is known is kept.

    A block that ended with an error leaves the signals ignored: the process is ending, and its exit code is to say why.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    with _handled(stop):
        try:
            yield
        except BaseException:
            for number in _heeded():
                signal.signal(number, signal.SIG_IGN)
            raise


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait while the block runs: the last of them is delivered at its end."""
    arrived: list[int] = []
    try:
        with _handled(lambda number, frame: arrived.append(number)):
            yield
    finally:
        if arrived:
            os.kill(os.getpid(), arrived[-1])


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """The handler for each signal that is not ignored (`nohup` means that a closed terminal is to be survived), then those of before."""
    before = {number: signal.signal(number, handler) for number in _heeded()}
    try:
        yield
    finally:
        for number, old in before.items():
            if signal.getsignal(number) is handler:  # else someone inside has decided otherwise, for good
                signal.signal(number, old)


def _heeded() -> list[signal.Signals]:
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in KINDS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def heard() -> Iterator[Interrupts]:
    """Collect the signals while the block runs."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interrupts = Interrupts(reader)

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.signals.append(signal.Signals(number))
        if len(interrupts.signals) == 1:
            os.write(writer, b"!")

    try:
        with _handled(note):
            yield interrupts
    finally:
        os.close(reader)
        os.close(writer)
