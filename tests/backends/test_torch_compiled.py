"""torch.compile of each layer under every way to hold weights: the numbers of one device that compiles nothing.

Two ranks and one layer, since compiling takes most of the time, and no case of one device, whose rows have another shape to compile
for: with DDP each rank computes a whole model. With experts: `test_moe_torch`.
"""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
from cases import Outcome, choices, differences, outcome_over, ragged_batches, run_session
from experiments import FOUND, plain

from scaling_lab.backends.contract import Job
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

pytestmark = [
    pytest.mark.xdist_group("torch_parity"),
    pytest.mark.compiler,
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile on CPU needs a C++ compiler"),
]

#: table, keys
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DDP": ("data", {"backend.data_parallel": "ddp"}),
    "FSDP of the whole": ("data", {"backend.data_parallel": "fully_shard"}),
    "FSDP": ("fsdp", {}),
    "tensor": ("tensor", {}),
    "stages": ("pipeline", {"model.layers": 2, "workload.pipeline.schedule": "1f1b"}),
}


def config(table: str, **keys: Any) -> dict[str, Any]:
    return plain(**choices("llama", table, "torch", **{"model.layers": 1, **keys}))


@functools.cache
def alone(layers: int) -> Outcome:
    experiment = experiment_from(config("single", **{"model.layers": layers}))
    job = Job(experiment, make_plan(experiment, FOUND), 0, "")
    return run_session(open_session(job), job, ragged_batches())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_layers_give_the_numbers_of_one_device(layout, torch_pair):
    table, keys = LAYOUTS[layout]
    asked = config(table, **keys, **{"mesh.devices": 2, "backend.compile": True})
    assert differences(outcome_over(torch_pair, asked, ragged_batches()), alone(asked["model"]["layers"])) == []
