"""What is shown of a log: its end, but the beginning of a stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling_lab.cluster.failure import innermost, tail

FRAMES = [f'  File "a.py", line {line} in f{line}' for line in range(40)]


@pytest.mark.parametrize("begin", ["Stack (most recent call first):", "Current thread 0x00007f1a (most recent call first):"])
def test_of_a_stack_at_the_end_the_first_frames_are_shown(tmp_path: Path, begin: str) -> None:
    log = tmp_path / "log"
    end = ["", "Thread 0x00007f1b (most recent call first):", *FRAMES[:3], "", "Extension modules: numpy.core (total: 1)"]
    log.write_text("\n".join(["said before", "Fatal Python error: Aborted", "", begin, *FRAMES, *end]) + "\n")
    assert innermost(log).splitlines() == [f"  {frame}" for frame in FRAMES[:15]]


def test_a_stack_that_more_was_written_after_is_not_what_the_log_ends_with(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(["Stack (most recent call first):", *FRAMES, "RuntimeError: later"]))
    assert innermost(log) == ""
    assert tail(log).endswith("RuntimeError: later")


def test_a_log_that_is_missing_or_empty_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        assert innermost(tmp_path / name) == tail(tmp_path / name) == ""
