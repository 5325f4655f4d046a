"""Every run and every sweep has a folder of its own, also where two begin in the same second."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

import pytest
from finished_runs import result
from test_command_line import scaling_lab

from scaling_lab.errors import ConfigError
from scaling_lab.results.folder import RunFolder
from scaling_lab.sweep import names

#: Seconds from now on whose default folders are taken before a command is started.
TAKEN_S = 60

INFEASIBLE = ("model.vocab=257", "tracking=disabled")


def default_folders(root: Path, ending: str) -> list[Path]:
    """The folders that a command started within the next minute gets by default."""
    moments = [time.localtime(time.time() + second) for second in range(TAKEN_S)]
    return [root / time.strftime(f"runs/%Y-%m-%d/%H-%M-%S-{ending}", moment) for moment in moments]


def test_a_folder_that_a_run_is_using_gives_way_to_the_next_free_one(tmp_path: Path) -> None:
    first, second, third = (RunFolder.create(tmp_path / "run", named=False) for _ in range(3))
    assert [folder.path.name for folder in (first, second, third)] == ["run", "run-2", "run-3"]


def test_a_folder_that_somebody_named_and_a_run_is_using_is_refused(tmp_path: Path) -> None:
    running = RunFolder.create(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run belongs to a run that is going on: .* hydra.run.dir=FOLDER"):
        RunFolder.create(tmp_path / "run")
    running.release()
    assert RunFolder.create(tmp_path / "run").path == tmp_path / "run"


def test_a_folder_with_a_result_gives_way_unless_somebody_named_it(tmp_path: Path) -> None:
    finished = RunFolder.create(tmp_path / "run")
    finished.write_result(result())
    finished.release()
    assert RunFolder.create(tmp_path / "run", named=False).path.name == "run-2"


def test_the_records_of_a_run_that_is_going_on_are_left_alone(tmp_path: Path) -> None:
    running = RunFolder.create(tmp_path)
    records = running.open_records()
    records.append({"kind": "step", "step": 1})
    with pytest.raises(ConfigError):
        RunFolder.create(tmp_path)
    records.close()
    assert json.loads((tmp_path / "records.jsonl").read_text())["step"] == 1


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([], False),
        (["hydra.job.chdir=false"], False),
        (["hydra.run.dir=here"], True),
        (["++hydra.run.dir=here"], True),
        (["hydra.run={dir: here}"], True),
    ],
)
def test_a_folder_is_named_by_the_command_line_alone(overrides: list[str], named: bool) -> None:
    assert names(overrides, "hydra.run.dir") is named


def test_a_run_whose_default_folder_is_taken_goes_to_the_next_one(tmp_path: Path) -> None:
    for folder in default_folders(tmp_path, "jax-fsdp_tensor"):
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
    done = scaling_lab("run", *INFEASIBLE, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "vocab 257 over 2" in done.stderr
    (own,) = tmp_path.glob("runs/*/*-2/result.json")
    assert "-jax-fsdp_tensor-2-" in json.loads(own.read_text())["run_id"]


def test_a_sweep_whose_default_folder_is_taken_goes_to_the_next_one_with_all_its_jobs(tmp_path: Path) -> None:
    for folder in default_folders(tmp_path, "sweep"):
        folder.mkdir(parents=True)
    own_name = "hydra.job.name=${backend.name}"  # not to be looked up before there is a backend
    done = scaling_lab("run", "-m", "backend=jax,torch", own_name, *INFEASIBLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (own,) = tmp_path.glob("runs/*/*-sweep-2")
    rows = list(csv.DictReader((own / "sweep.csv").read_text().splitlines()))
    assert [(row["run"], row["status"]) for row in rows] == [
        ("0-jax-fsdp_tensor", "infeasible"),
        ("1-torch-fsdp_tensor", "infeasible"),
    ]
    assert not list(tmp_path.glob("runs/*/*-sweep/*")), "nothing is written into the other sweeps' folders"


def test_a_folder_that_somebody_named_is_refused_where_it_is_taken(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").write_result(result())
    done = scaling_lab("run", *INFEASIBLE, f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "already holds a finished run" in done.stderr
