"""Ctrl-C, SIGTERM and a closed terminal at the coordinator, turned into something it can wait for beside its pipes. Ends nothing itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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


@contextmanager
def heard() -> Iterator[Interrupts]:
    """Collect the signals while the block runs, and put the handlers of before back. Hears nothing outside the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interrupts = Interrupts(reader)

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.signals.append(signal.Signals(number))
        if len(interrupts.signals) == 1:
            os.write(writer, b"!")

    in_main = threading.current_thread() is threading.main_thread()
    # A signal that is ignored stays so: `nohup` means that a closed terminal is to be survived.
    heeded = [number for number in KINDS if signal.getsignal(number) != signal.SIG_IGN] if in_main else []
    before = {number: signal.signal(number, note) for number in heeded}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
