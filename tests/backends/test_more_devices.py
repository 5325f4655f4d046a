"""Products of three and more axes on 16 and 32 simulated devices, compiled only: XLA takes them, and they lie as planned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import choices
from experiments import experiment

from scaling_lab.plan.plan import Found, make_plan

HERE = Path(__file__).parent
STAGES = {"sharding.weights.layers": ["pipeline"]}
#: Table, model, mesh, keys.
COMBINATIONS = {
    "fsdp x tensor x context": ("fsdp_tensor_context", "tiny", {"fsdp": 4, "context": 2, "tensor": 2}, {}),
    "data x fsdp x tensor": ("fsdp_tensor", "tiny", {"data": 4, "fsdp": 4, "tensor": 2}, {}),
    "pipeline x fsdp x tensor x context": (
        "fsdp_tensor_context",
        "tiny",
        {"pipeline": 4, "fsdp": 2, "context": 2, "tensor": 2},
        {**STAGES, "model.layers": 6, "workload.context.strategy": "ring"},
    ),
    "pipeline x data x fsdp x expert": (
        "fsdp_expert",
        "tiny_moe",
        {"pipeline": 2, "data": 2, "fsdp": 2, "expert": 2},
        {**STAGES, "workload.pipeline.schedule": "interleaved", "model.layers": 4},
    ),
}


def keys(name):
    table, model, mesh, changes = COMBINATIONS[name]
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    workload = {"workload.global_batch": 32, "workload.optimizer.name": "adamw", "model": model}
    return {**choices("llama", table, "jax"), "mesh": "one", **workload, **sizes, **changes}


@pytest.fixture(scope="module")
def compiled():
    flags = "--xla_force_host_platform_device_count=32 --xla_backend_optimization_level=0"
    path = os.pathsep.join(str(folder) for folder in (HERE.parent.parent, HERE.parent, HERE))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
    lines = "\n".join(json.dumps(keys(name)) for name in COMBINATIONS)
    command = [sys.executable, str(HERE / "jax_compile.py")]
    done = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(COMBINATIONS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.xdist_group("more_devices")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_product_of_axes_compiles_and_lies_as_planned(name, compiled):
    found, plan = compiled[name], make_plan(experiment(**keys(name)), Found("cpu", 32, True, 24 << 30))
    assert (found["devices"], found["layouts"]) == (plan.mesh.devices, True)
    planned = plan.bytes_per_device
    counter = 4  # of steps, an int32 that Adam keeps
    assert found["held"] == {"parameters": planned["parameters"], "optimizer": planned["optimizer"] + counter}
    assert ("collective-permute" in found["collectives"]) == (plan.pipeline.stages > 1)
