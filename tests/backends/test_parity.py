"""The parity matrix: every table x both backends x two models x accumulation 1 and 2 equals one device in JAX.

Float32, ragged rows, the design's tolerances. JAX runs in this process on 8 simulated devices, torch in a pool of 8 gloo ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from cases import Outcome, choices, differences, ragged_batches, run_session
from experiments import CONF, FOUND, plain

from scaling_lab.backends.contract import Job
from scaling_lab.config import experiment_from
from scaling_lab.errors import PlanError
from scaling_lab.plan.plan import make_plan

TABLES = sorted(path.stem for path in Path(CONF / "sharding").glob("*.yaml"))
#: Meshes on which a table's own automatic mesh would hide one of its axes.
MESHES = {"hsdp": "data2_fsdp4"}
MODELS = ("llama", "gpt2")
#: Tables that split neither the vocabulary, the mlp nor the sequence, and so take any size of those.
WHOLE_TABLES = ("single", "data", "zero1", "zero2", "fsdp", "hsdp", "expert", "fsdp_expert", "pipeline", "pipeline_fsdp")
AWKWARD = {"model.layers": 3, "model.vocab": 257, "model.mlp": 100, "workload.sequence": 15}


def config(model, table, backend, accumulation=1, **more):
    return plain(**choices(model, table, backend, accumulation, mesh=MESHES.get(table, "auto"), **more))


def run_jax(config_plain, batches) -> Outcome:
    from scaling_lab.backends.jax.train import open_session

    experiment = experiment_from(config_plain)
    job = Job(experiment, make_plan(experiment, FOUND), 0, "127.0.0.1:0")
    session = open_session(job)
    outcome = run_session(session, job, batches)
    assert session.compilations() == 1
    planned = {p.parameter.name: p.weights for p in job.plan.parameters}
    assert session.layouts() == planned
    session.close()
    return outcome


@functools.cache
def reference(model: str, awkward: bool = False) -> Outcome:
    """One device, JAX, accumulation 1."""
    more = AWKWARD if awkward else {}
    return run_jax(config(model, "single", "jax", **more), batches_of(awkward))


def batches_of(awkward: bool):
    return ragged_batches(AWKWARD["model.vocab"], AWKWARD["workload.sequence"]) if awkward else ragged_batches()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.xdist_group(f"jax_{model}")) for model in MODELS])
@pytest.mark.parametrize("table", TABLES)
def test_jax_on_a_table_equals_one_device(table, model, accumulation):
    outcome = run_jax(config(model, table, "jax", accumulation), ragged_batches())
    assert differences(outcome, reference(model)) == []


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("table", TABLES)
def test_torch_on_a_table_equals_one_device_in_jax(table, model, accumulation, torch_pool):
    outcome = torch_pool(config(model, table, "torch", accumulation), ragged_batches())
    assert differences(outcome, reference(model)) == []


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("jax", marks=pytest.mark.xdist_group("jax_llama")),
        pytest.param("torch", marks=pytest.mark.xdist_group("torch_parity")),
    ],
)
def test_awkward_sizes_are_equal_or_refused_while_planning(table, model, backend, request):
    """3 layers, odd sequence, vocabulary 257, mlp 100: the refusal is the plan's, so it is the same for both backends."""
    wanted = config(model, table, backend, **AWKWARD)
    if table not in WHOLE_TABLES:
        with pytest.raises(PlanError, match=r"257 over 2|sequence 15 over 2"):
            make_plan(experiment_from(wanted), FOUND)
        return
    run = run_jax if backend == "jax" else request.getfixturevalue("torch_pool")
    assert differences(run(wanted, batches_of(True)), reference(model, True)) == []


@pytest.mark.xdist_group("jax_llama")
def test_the_comparison_sees_a_wrong_gradient_and_a_wrong_loss():
    """The matrix would be worthless if its comparison let faults pass: a mean of means, and one tensor off by 0.1 %."""
    right = reference("llama")
    scaled = {name: value * 1.001 if name == "head.weight" else value for name, value in right.gradients.items()}
    assert differences(Outcome(right.losses, right.grad_norms, scaled, right.weights), right)
    assert differences(
        Outcome([loss * 1.0001 for loss in right.losses], right.grad_norms, right.gradients, right.weights), right
    )
    assert differences(right, right) == []
