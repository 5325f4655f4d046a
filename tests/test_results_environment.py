"""The environment of a result: facts gathered without importing what they speak of, and without waiting for anything."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from experiments import FOUND, experiment
from finished_runs import done, records

from scaling_lab.plan.plan import make_plan
from scaling_lab.results.environment import environment, git_state


def gathered(folder: Path, told=()) -> dict:
    plan = make_plan(experiment(), FOUND)
    return environment(command="scaling-lab run", worker_environment={"A": "1"}, plan=plan, records=told, folder=folder)


def test_the_facts_of_this_machine_are_there(tmp_path: Path) -> None:
    facts = gathered(tmp_path)
    assert facts["python"] == platform.python_version()
    assert facts["versions"]["numpy"].count(".") == 2
    assert set(facts["versions"]) >= {
        "jax",
        "jaxlib",
        "flax",
        "equinox",
        "optax",
        "torch",
        "hydra-core",
        "wandb",
        "scaling_lab",
    }
    assert facts["cpu"]["model"]
    assert facts["cpu"]["usable_cores"] >= 1
    assert (facts["simulated"], facts["command"], facts["worker_environment"]) == (True, "scaling-lab run", {"A": "1"})
    assert facts["devices"] is None


def test_the_devices_are_those_that_every_process_really_found(tmp_path: Path) -> None:
    real = {"platform": "gpu", "kind": "H100", "count": 1}
    told = [*records(), {**done(1), "device_facts": real}]
    devices = gathered(tmp_path, told)["devices"]
    assert (devices["platform"], devices["kind"], devices["count"]) == ("cpu, gpu", "H100, cpu", 9)
    assert [process["process"] for process in devices["processes"]] == [0, 1]


def test_the_commit_is_that_of_the_working_directory_and_says_whether_it_was_changed(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    assert git_state(tmp_path / "nowhere") is None
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    git = ["git", "-C", str(tmp_path), *identity]
    (tmp_path / "file").write_text("one")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True, timeout=30)
    state = git_state(tmp_path)
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    (tmp_path / "file").write_text("two")
    assert git_state(tmp_path) == {"commit": state["commit"], "dirty": True}


def test_results_and_report_import_no_framework_and_no_wandb() -> None:
    code = (
        "import sys, scaling_lab.results.environment, scaling_lab.results.result, scaling_lab.results.tracker, "
        "scaling_lab.report.console, scaling_lab.predict.peak\n"
        "assert not {'jax', 'flax', 'equinox', 'optax', 'torch', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=True, timeout=60)
