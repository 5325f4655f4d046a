"""Finds the processes of a job by a mark in their environment, whoever their parent is by now."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

MARK = "SCALING_LAB_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """The running processes with this mark in their environment, but for the one that asks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process != psutil.Process()]


def until(true: Callable[[], bool], limit_s: float) -> bool:
    """Poll until something holds; false when it does not within the limit."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
