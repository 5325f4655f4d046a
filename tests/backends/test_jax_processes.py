"""Two real processes of 4 devices each over gloo compute what one process of 8 does, each from its own rows."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import choices, ragged_batches
from experiments import FOUND, experiment

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.plan.plan import make_plan

HERE = Path(__file__).parent


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start(index: int, address: str, table: str, devices: int | None = None) -> subprocess.Popen:
    path = os.pathsep.join(str(folder) for folder in (HERE.parent.parent, HERE.parent, HERE))
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    if devices is not None:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, str(HERE / "jax_process.py"), str(index), address, table]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each."""
    try:
        said = [process.communicate(timeout=300) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def in_one_process(table):
    asked = experiment(**choices("llama", table, "jax", 2, mesh="auto"))
    job = Job(asked, make_plan(asked, FOUND), 0, "")
    session = open_session(job)
    metrics = [session.step(local_batch(job, tokens, labels)).result() for tokens, labels in ragged_batches()]
    return metrics, session.weights()


@pytest.mark.parametrize(("table", "rows"), [("fsdp_tensor", 4), ("tensor", 4)])
def test_two_processes_equal_one(table, rows):
    address = free_address()
    ended = finish([start(index, address, table) for index in (0, 1)])
    assert [code for code, _, _ in ended] == [0, 0], [errors[-2000:] for _, _, errors in ended]
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in ended)
    assert first["rows"] == list(range(rows))
    assert second["rows"] == list(range(rows, 2 * rows))
    assert (first["devices"], second["devices"]) == (4, 4)
    assert (first["compilations"], second["compilations"]) == (1, 1)
    for key in ("metrics", "weights", "evaluation"):
        assert first[key] == second[key], key
    assert all(second["digests"].get(key, digest) == digest for key, digest in first["digests"].items())
    metrics, weights = in_one_process(table)
    for got, wanted in zip(first["metrics"], metrics, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)
    for name, value in weights.items():
        assert first["weights"][name] == pytest.approx(np.abs(value, dtype=np.float64).sum(), rel=1e-5), name


def test_a_process_with_too_few_devices_ends_with_the_number_it_needs():
    address = free_address()
    ended = finish([start(index, address, "data", devices=2) for index in (0, 1)])
    for code, _, errors in ended:
        assert code == 1
        assert "needs 8 devices, but JAX found 4 in 2 process(es)" in errors
        assert "xla_force_host_platform_device_count=4" in errors


def test_the_rows_of_a_process_are_those_of_its_devices():
    asked = experiment(**choices("llama", "tensor", "jax", mesh="auto", **{"mesh.hosts": 2}))
    plan = make_plan(asked, FOUND)  # data 4 x tensor 2: 16 rows, 4 a device pair, 2 pairs a host
    assert [replace(Job(asked, plan, 0, ""), process=index).rows for index in (0, 1)] == [tuple(range(8)), tuple(range(8, 16))]
