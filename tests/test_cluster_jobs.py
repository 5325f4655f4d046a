"""Whole jobs with the real backends: they finish, and however they are made to fail, nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from experiments import experiment, plain
from faults.leftovers import MARK, marked, until

from scaling_lab.cluster import local
from scaling_lab.cluster.found import find
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import make_plan

FAULTS = Path(__file__).parent / "faults"
ROOT = Path(__file__).parent.parent
START_LIMIT_S = 240.0


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks what a test starts. Whatever is still there afterwards is ended, after the test has failed for it."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(MARK, name)
    yield name
    for process in marked(name):
        process.kill()


def keys_of(backend: str, **keys: Any) -> dict[str, Any]:
    """A small Llama-like model over 4 torch or 2 JAX devices, endless unless said otherwise."""
    return {
        "backend": backend,
        "data": "synthetic",
        "model.layers": 1,
        "model.embed": 32,
        "model.mlp": 64,
        "model.head_dim": 8,
        "mesh.devices": 4 if backend == "torch" else 2,
        "workload.global_batch": 4,
        "workload.sequence": 16,
        "workload.steps": 10**7,
        "workload.untimed_steps": 1,
        "workload.optimizer.schedule": "constant",
        "workload.evaluation": {"every": 0, "batches": None},
        **keys,
    }


def run(folder: Path, act: Callable[[list[dict[str, Any]]], None] | None = None, **keys: Any) -> list[dict[str, Any]]:
    """Run a job here; act is called once with the records so far, at step 3. Gives its `done` records."""
    asked = experiment(**keys)
    records: list[dict[str, Any]] = []

    def take(record: dict[str, Any]) -> None:
        records.append(record)
        if act and record["kind"] == "step" and record["step"] == 3:
            act(records)

    return local.run(asked, make_plan(asked, find(asked)), folder, take)


def pids_of(records: list[dict[str, Any]]) -> list[int]:
    return next(record["pids"] for record in records if record["kind"] == "processes")


@pytest.mark.parametrize(
    ("backend", "keys"),
    [
        ("jax", {"mesh.devices": 8}),
        ("jax", {"mesh.devices": 4, "mesh.hosts": 2}),
        ("torch", {"mesh.devices": 8}),
        ("torch", {"mesh.hosts": 2}),
    ],
)
def test_a_job_finishes_with_every_process_done_and_nothing_left(tmp_path, mark, backend, keys):
    evaluation = {"workload.evaluation": {"every": 2, "batches": 2}}
    done = run(tmp_path, **keys_of(backend, **{"workload.steps": 4, **evaluation, **keys}))
    assert [record["process"] for record in done] == list(range(len(done)))
    assert all(record["layouts_equal_plan"] for record in done)
    for record in done:
        assert sum(record["time_parts_s"].values()) == pytest.approx(record["wall_time_s"], rel=0.01)
    assert marked(mark) == []


@pytest.mark.parametrize(("backend", "victim"), [("jax", 0), ("torch", 2)])
def test_a_killed_process_ends_the_job_within_seconds_and_is_named(tmp_path, mark, backend, victim):
    def kill(records: list[dict[str, Any]]) -> None:
        os.kill(pids_of(records)[victim], signal.SIGKILL)

    with pytest.raises(WorkerError, match=rf"process {victim} of \d \(pid \d+, host 0\) was killed by SIGKILL"):
        run(tmp_path, kill, **keys_of(backend, **{"cluster.grace_s": 2.0}))
    assert marked(mark) == []


def test_a_killed_simulated_host_ends_the_job_though_jax_would_wait_for_it(tmp_path, mark):
    def kill(records: list[dict[str, Any]]) -> None:
        os.kill(pids_of(records)[1], signal.SIGKILL)

    with pytest.raises(WorkerError, match=r"process 1 of 2 \(pid \d+, host 1\) was killed by SIGKILL"):
        run(tmp_path, kill, **keys_of("jax", **{"mesh.hosts": 2, "cluster.grace_s": 2.0}))
    assert marked(mark) == []


def test_a_stopped_torch_process_is_found_and_named(tmp_path, mark):
    def stop(records: list[dict[str, Any]]) -> None:
        os.kill(pids_of(records)[1], signal.SIGSTOP)

    with pytest.raises(WorkerError, match=r"process 1 of 4 \(pid \d+, host 0\) has been silent for") as caught:
        run(tmp_path, stop, **keys_of("torch", **{"cluster.step_limit_s": 8.0, "cluster.grace_s": 1.0}))
    assert caught.value.kind == "stuck"
    assert marked(mark) == []


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_diverging_job_fails_naming_the_step(tmp_path, mark, backend):
    values = {"name": "sgd", "lr": 1e30, "warmup_steps": 0, "clip": None}
    optimizer = {f"workload.optimizer.{key}": value for key, value in values.items()}
    with pytest.raises(WorkerError, match=r"training diverged: .* at step \d+") as caught:
        run(tmp_path, **keys_of(backend, **optimizer))
    assert caught.value.kind == "diverged"
    assert marked(mark) == []


class Coordinator:
    """A coordinator in a process of its own; records are read as they come."""

    def __init__(self, folder: Path, **keys: Any):
        command = [sys.executable, str(FAULTS / "coordinator.py"), json.dumps(plain(**keys)), str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        self.records: list[dict[str, Any]] = []

    def until(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            if self.records[-1]["kind"] == kind:
                return self.records[-1]
        raise AssertionError(f"no {kind}; the last records: {self.records[-3:]}")

    def ended(self, limit_s: float) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(limit_s)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("moment", ["processes", "step"])
def test_the_kernel_killing_the_coordinator_leaves_nothing_behind(tmp_path, mark, backend, moment):
    coordinator = Coordinator(tmp_path, **keys_of(backend))
    coordinator.until(moment)
    assert len(marked(mark)) > 1
    coordinator.process.kill()
    assert coordinator.ended(10) == -signal.SIGKILL
    assert until(lambda: marked(mark) == [], 10), marked(mark)


@pytest.mark.parametrize(
    ("backend", "number", "kind"), [("jax", signal.SIGINT, "interrupted"), ("torch", signal.SIGTERM, "preempted")]
)
def test_a_signal_to_the_coordinator_ends_the_job_with_exit_code_1(tmp_path, mark, backend, number, kind):
    coordinator = Coordinator(tmp_path, **keys_of(backend))
    coordinator.until("step")
    coordinator.process.send_signal(number)
    assert coordinator.until("end")["error"] == kind
    assert coordinator.ended(10) == 1
    assert marked(mark) == []
