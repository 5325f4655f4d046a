"""The run folder: never reused silently, never half written, and enough to run again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from experiments import FOUND, experiment
from finished_runs import result

from scaling_lab.config import plan_from
from scaling_lab.errors import ConfigError, LabError
from scaling_lab.plan.plan import make_plan
from scaling_lab.results.folder import RunFolder, read_experiment, write_whole
from scaling_lab.results.records import read_records


def test_experiment_and_plan_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    asked = experiment(**{"backend.environment": {"A": "${b} and ${oc.env:HOME}"}, "workload.optimizer.lr": 1e-5})
    folder = RunFolder.create(tmp_path / "deep" / "run")
    folder.write_experiment(asked)
    folder.write_plan(make_plan(asked, FOUND))
    assert read_experiment(folder.path) == asked
    assert plan_from((folder.path / "plan.json").read_text()) == make_plan(asked, FOUND)


def test_hydra_composes_experiment_yaml_to_the_same_experiment(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from scaling_lab.config import experiment_from

    asked = experiment(sharding="fsdp_tensor", **{"backend.environment": {"A": "${b}"}})
    RunFolder.create(tmp_path).write_experiment(asked)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        composed = compose("experiment", overrides=["workload.steps=7"])
    plain = OmegaConf.to_container(composed, resolve=True)
    assert plain["workload"].pop("steps") == 7
    plain["workload"]["steps"] = asked.workload.steps
    assert experiment_from(plain) == asked


def test_the_head_of_experiment_yaml_is_the_command_that_runs_it_again(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a run")
    folder.write_experiment(experiment())
    command = (folder.path / "experiment.yaml").read_text().splitlines()[1]
    assert command == f"# Command: scaling-lab run --config-path '{tmp_path}/a run' --config-name experiment"


def test_a_folder_with_a_result_is_refused_and_the_key_to_change_is_named(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run").write_result(result())
    with pytest.raises(ConfigError, match=r"already holds a finished run .*hydra.run.dir=FOLDER"):
        RunFolder.create(tmp_path / "run")


def test_a_folder_whose_run_was_killed_starts_its_records_anew(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path).open_records()
    first.append({"kind": "step", "step": 1})
    first.close()
    second = RunFolder.create(tmp_path).open_records()
    second.append({"kind": "step", "step": 2})
    second.close()
    assert [record["step"] for record in read_records(tmp_path / "records.jsonl")] == [2]


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write the run folder .*file/run: .*Set hydra.run.dir=FOLDER"):
        RunFolder.create(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"cannot write the run folder /proc/run"):
        RunFolder.create(Path("/proc/run"))


def test_a_result_is_written_once_whole_and_as_strict_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_result(result())
    assert json.loads((tmp_path / "result.json").read_text()) == result()
    with pytest.raises(LabError, match="written once"):
        folder.write_result(result())
    assert sorted(os.listdir(tmp_path)) == ["records.jsonl", "result.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_partial_one(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    target.mkdir()  # os.replace cannot put a file over a folder
    with pytest.raises(LabError, match=r"cannot write .*result.json"):
        write_whole(target, "{}")
    assert os.listdir(tmp_path) == ["result.json"]
    assert target.is_dir()
