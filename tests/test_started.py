"""When this process began: the moment that a run's wall time counts from."""

from __future__ import annotations

import subprocess
import sys
import time


def test_the_start_of_a_process_is_known_to_hundredths_of_a_second() -> None:
    code = "from scaling_lab.lab import process_started; print(process_started())"
    offsets = []
    for _ in range(3):
        before = time.time()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        offsets.append(float(done.stdout) - before)
    # Dated back by a tick of 10 ms at most; and no later than the fork, which takes no tenth of a second each time.
    assert all(offset > -0.02 for offset in offsets), offsets
    assert min(offsets) < 0.1, offsets
