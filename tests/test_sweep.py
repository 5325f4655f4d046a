"""Sweeps as a user types them: both frameworks in one table, failures and infeasible jobs told apart, exit codes."""

import csv
import json

import pytest
from test_command_line import scaling_lab

SMALL = [
    "model.layers=1",
    "model.embed=32",
    "model.head_dim=8",
    "model.mlp=64",
    "workload.sequence=16",
    "workload.steps=4",
    "workload.untimed_steps=1",
    "workload.evaluation.every=0",
    "data=synthetic",
    "tracking=disabled",
]


def rows_of(folder):
    with open(folder / "sweep.csv") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    asked = ["run", "-m", "backend=jax,torch", "sharding=data,fsdp_tensor", f"hydra.sweep.dir={folder}/both", *SMALL]
    return scaling_lab(*asked, cwd=folder, timeout=500), folder / "both"


def test_a_sweep_over_both_frameworks_ends_in_one_table_of_equal_losses(sweep):
    done, folder = sweep
    assert done.returncode == 0, done.stderr
    rows = rows_of(folder)
    assert {(row["backend"], row["sharding"], row["status"]) for row in rows} == {
        (backend, table, "ok") for backend in ("jax", "torch") for table in ("data", "fsdp_tensor")
    }
    results = [json.loads(path.read_text()) for path in folder.glob("*/result.json")]
    losses = [result["measured"]["loss"] for result in results]
    assert len(losses) == 4
    for steps in zip(*losses, strict=True):
        assert max(steps) == pytest.approx(min(steps), rel=1e-5)
    assert "yes, all 4 steps" in done.stdout
    assert (folder / "sweep.md").read_text().count("| fsdp_tensor") == 2


def test_a_job_alone_has_one_run_folder_with_everything(sweep):
    _, folder = sweep
    job = next(folder.glob("*jax-data*"))
    assert {"experiment.yaml", "plan.json", "records.jsonl", "result.json", "worker-0.log"} <= {p.name for p in job.iterdir()}
    kinds = [json.loads(line)["kind"] for line in (job / "records.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 4
    assert kinds[-1] == "done"


@pytest.mark.parametrize("wrong", ["backend=jaxx,torch", "model.layrs=1,2", "backend=jax,torch workload=none"])
def test_a_sweep_that_hydra_refuses_is_answered_as_a_single_job_is(tmp_path, wrong):
    done = scaling_lab("run", "-m", *wrong.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "did you mean" in done.stderr or "(one of " in done.stderr
    assert done.stderr.count("scaling-lab:") == 1


def test_infeasible_jobs_alone_are_no_failure_and_the_others_run(tmp_path):
    asked = ["run", "-m", "backend=jax", "model.vocab=256,257", f"hydra.sweep.dir={tmp_path}/s", *SMALL]
    done = scaling_lab(*asked, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows_of(tmp_path / "s")] == ["ok", "infeasible"]
    assert "vocab 257 over 2" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_failed_job_makes_the_sweep_fail_and_the_others_run(tmp_path):
    diverging = "workload.optimizer.lr=0.001,1e30"
    asked = ["run", "-m", "backend=jax", diverging, "workload.optimizer.clip=null", f"hydra.sweep.dir={tmp_path}/s", *SMALL]
    done = scaling_lab(*asked, cwd=tmp_path, timeout=300)
    assert done.returncode == 1
    rows = rows_of(tmp_path / "s")
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert "Traceback" not in done.stdout
    failed = next(json.loads(p.read_text()) for p in (tmp_path / "s").glob("1-*/result.json"))
    assert failed["error"]["kind"] == "diverged"
