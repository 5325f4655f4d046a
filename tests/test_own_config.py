"""Running a config of one's own, above all a run folder's experiment.yaml: how it is found, and what can be changed of it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from experiments import CONF, experiment
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from test_command_line import scaling_lab

from scaling_lab.config import experiment_from
from scaling_lab.errors import ConfigError
from scaling_lab.own_config import check_presets, with_absolute_path
from scaling_lab.plan.experiment import Experiment
from scaling_lab.results.folder import HYDRA, RunFolder


def written(folder: Path, **choices: str) -> Path:
    RunFolder.create(folder).write_experiment(experiment(**choices))
    return folder


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_presets(["--config-path", str(folder), "--config-name", "experiment", *overrides], CONF)
    return str(caught.value)


def composed(folder: Path, overrides: list[str]) -> Experiment:
    with initialize_config_dir(str(folder.absolute()), version_base="1.3"):
        plain = OmegaConf.to_container(compose("experiment", overrides), resolve=True)
    assert isinstance(plain, dict)
    return experiment_from({str(key): value for key, value in plain.items()})


@pytest.mark.parametrize(
    "flags",
    [
        ["--config-path", "here", "--config-name", "experiment"],
        ["--config-path=here", "--config-name=experiment.yaml"],
        ["-cp", "here", "-cn", "experiment"],
    ],
)
def test_a_run_is_planned_again_from_a_relative_folder(tmp_path: Path, flags: list[str]) -> None:
    written(tmp_path / "here", sharding="fsdp")
    done = scaling_lab("draw", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "table fsdp" in done.stdout


def test_only_a_folder_that_exists_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert with_absolute_path(["-cp=here", "x=here"]) == [f"-cp={tmp_path}/here", "x=here"]
    assert with_absolute_path(["--config-path", "pkg://some.where"]) == ["--config-path", "pkg://some.where"]
    assert with_absolute_path(["here", "--config-path"]) == ["here", "--config-path"]


def test_the_folders_of_its_runs_and_sweeps_are_named_as_those_of_the_shipped_config() -> None:
    shipped = yaml.safe_load((CONF / "config.yaml").read_text())["hydra"]
    assert shipped == HYDRA


def test_a_run_again_in_the_other_framework_is_named_after_it(tmp_path: Path) -> None:
    written(tmp_path)
    changed = refusal(tmp_path, "backend=torch").partition("Set instead: ")[2]
    asked = [
        "run",
        "--config-path",
        str(tmp_path),
        "--config-name",
        "experiment",
        *shlex.split(changed),
        "tracking.mode=disabled",
    ]
    # Refused while planning, so that no worker starts.
    done = scaling_lab(*asked, "model.vocab=257", "sharding.name=odd", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (own,) = tmp_path.glob("runs/*/*/result.json")
    assert own.parent.name.endswith("-torch-odd")


def test_its_head_says_that_it_has_no_presets(tmp_path: Path) -> None:
    head = (written(tmp_path) / "experiment.yaml").read_text().splitlines()[2]
    assert "KEY=VALUE changes one, GROUP=NAME has no presets here" in head


@pytest.mark.parametrize(
    ("group", "name"), [("backend", "torch"), ("sharding", "zero2"), ("model", "tiny_gpt2"), ("workload", "llama3")]
)
def test_a_preset_is_answered_with_the_keys_that_make_the_same_experiment(tmp_path: Path, group: str, name: str) -> None:
    message = refusal(written(tmp_path), f"{group}={name}")
    assert message.startswith(f"{group}={name}: {tmp_path}/experiment.yaml has no presets")
    overrides = shlex.split(message.partition("Set instead: ")[2])
    assert composed(tmp_path, overrides) == experiment(**{group: name})


def test_rows_that_the_preset_does_not_have_are_taken_away(tmp_path: Path) -> None:
    message = refusal(written(tmp_path, sharding="zero2"), "sharding=fsdp_tensor")
    assert composed(tmp_path, shlex.split(message.partition("Set instead: ")[2])) == experiment(sharding="fsdp_tensor")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend=trch", "such as backend.name=VALUE (did you mean torch?)"),
        ("backend=jax,torch", "Set its keys one by one, such as backend.name=VALUE."),
        ("data=stdlib", "They are those of data=stdlib already: leave it out."),
        ("experiment=bf16", "Set one by one the keys that it sets."),
    ],
)
def test_what_is_no_single_preset_is_answered_too(tmp_path: Path, override: str, words: str) -> None:
    assert words in refusal(written(tmp_path), override)


def test_groups_that_a_config_chooses_from_presets_are_left_to_hydra(tmp_path: Path) -> None:
    text = "defaults:\n- model: tiny\n- override /data: text\nmodel: {layers: 3}\nbackend: {name: jax}\n"
    (tmp_path / "mine.yaml").write_text(text)
    flags = [f"-cp={tmp_path}", "-cn=mine"]
    check_presets([*flags, "model=tiny_gpt2", "backend.name=torch"], CONF)
    with pytest.raises(ConfigError, match=re.escape("backend=torch: ")):
        check_presets([*flags, "backend=torch"], CONF)
    check_presets(["backend=torch"], CONF)
    check_presets(["-cp=/nowhere", "backend=torch"], CONF)


def test_a_table_of_ones_own_lies_where_one_likes_and_lists_every_logical_axis(tmp_path: Path) -> None:
    table = yaml.safe_load((CONF / "sharding/fsdp.yaml").read_text()) | {"name": "my_table"}
    (tmp_path / "mine/sharding").mkdir(parents=True)
    own = tmp_path / "mine/sharding/my_table.yaml"
    own.write_text(yaml.safe_dump(table))
    asked = ("draw", "--config-dir", "mine", "sharding=my_table")
    assert "table my_table" in scaling_lab(*asked, cwd=tmp_path).stdout
    del table["weights"]["experts"]
    own.write_text(yaml.safe_dump(table))
    done = scaling_lab(*asked, cwd=tmp_path)
    assert done.returncode == 2
    assert "sharding.weights: missing experts; write `[]` for replicated" in done.stderr
