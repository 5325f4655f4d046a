"""Records: what was appended is on disk at once, and is read back as it was."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scaling_lab.errors import LabError
from scaling_lab.results.records import RecordFile, read_records


def test_records_are_read_back_as_they_were_appended(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "records.jsonl")
    told = [{"kind": "step", "step": 1, "loss": 5.5, "samples": [3, 1]}, {"kind": "event", "message": "naïve ☃"}]
    for record in told:
        file.append(record)
    file.close()
    file.close()
    assert read_records(tmp_path / "records.jsonl") == told


def test_a_record_is_there_before_the_next_one_also_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path; from scaling_lab.results.records import RecordFile\n"
        "file = RecordFile(Path(sys.argv[1])); file.append({'kind': 'step', 'step': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read_records(path) == [{"kind": "step", "step": 1}]


def test_a_torn_last_line_is_left_out_and_spoils_no_later_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind":"step","step":1}\n{"kind":"step","st')
    assert read_records(path) == [{"kind": "step", "step": 1}]
    file = RecordFile(path)
    file.append({"kind": "step", "step": 2})
    file.close()
    assert [record["step"] for record in read_records(path)] == [1, 2]


def test_a_loss_that_is_not_a_number_makes_a_valid_json_line_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.append({"kind": "step", "step": 1, "loss": math.nan, "grad_norm": math.inf})
    file.close()
    line = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert line["loss"] is None
    assert line["nonfinite"] == {"loss": "nan", "grad_norm": "inf"}
    (record,) = read_records(path)
    assert math.isnan(record["loss"])
    assert record["grad_norm"] == math.inf
    assert "nonfinite" not in record


def test_a_full_disk_is_one_message_that_names_the_file() -> None:
    file = RecordFile(Path("/dev/full"))
    with pytest.raises(LabError, match=r"cannot write /dev/full: No space left on device"):
        file.append({"kind": "step"})
    file._file.close()


def test_a_file_that_was_never_written_has_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == []
