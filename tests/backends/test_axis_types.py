"""`backend.axis_types=explicit`: layouts in types give the numbers of one device, by the exchanges that the partitioner finds."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import test_moe_jax
import test_packing
from cases import differences, ragged_batches
from experiments import FOUND, experiment
from jax.sharding import AxisType
from test_parity import config, reference, run_jax

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.config import experiment_from
from scaling_lab.errors import ConfigError, PlanError
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("jax_llama")

EXPLICIT = {"backend.axis_types": "explicit"}
UNROLLED, KEPT, AGAIN = {"backend.scan_layers": False}, {"workload.remat": "dots"}, {"workload.remat": "full"}
CASES = [
    ("llama", "data", {}),
    ("llama", "fsdp", {"backend.attention": "plain"}),
    ("llama", "tensor", UNROLLED),
    ("llama", "fsdp_tensor", {"workload.accumulation": 2, "backend.module": "equinox"}),
    ("llama", "tensor_sequence", {**UNROLLED, **KEPT}),
    ("llama", "fsdp_tensor_context", {"workload.context.strategy": "ring", "workload.loss_chunks": 2}),
    ("gpt2", "data", {"workload.loss_chunks": 2}),
    ("gpt2", "fsdp_tensor", AGAIN),
    ("gpt2", "tensor_sequence", {}),
]


@pytest.mark.parametrize(("model", "table", "more"), CASES)
def test_a_table_written_in_types_equals_one_device(model, table, more):
    outcome = run_jax(config(model, table, "jax", **more, **EXPLICIT), ragged_batches())
    assert differences(outcome, reference(model)) == []


@pytest.mark.parametrize(
    ("model", "table", "more"), [("everything", "fsdp_expert_tensor", {}), ("latent", "fsdp_tensor", AGAIN)]
)
def test_so_do_mixtures_and_latent_attention(model, table, more):
    outcome, _ = test_moe_jax.run(model, table, **more, **EXPLICIT)
    assert differences(outcome, test_moe_jax.reference(model)[0]) == []


def test_so_do_packed_documents_exchanged_for_heads():
    outcome = run_jax(
        config("llama", "context", "jax", **{"workload.context.strategy": "all_to_all"}, **EXPLICIT), test_packing.BATCHES
    )
    assert differences(outcome, test_packing.reference("llama")) == []


@pytest.mark.parametrize("table", ["data", "fsdp_tensor"])
def test_the_exchanges_are_those_that_the_partitioner_finds(table):
    found = {}
    for kind in ("auto", "explicit"):
        wanted = experiment_from(config("llama", table, "jax", **{"backend.axis_types": kind}))
        job = Job(wanted, make_plan(wanted, FOUND), 0, "127.0.0.1:0")
        session = open_session(job)
        session.prepare(local_batch(job, *ragged_batches()[0]))
        assert set(session._on.mesh.axis_types) == {AxisType.Explicit if kind == "explicit" else AxisType.Auto}
        program = session._compiled.as_text()
        found[kind] = Counter(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program))
        session.close()
    assert found["auto"].total() > 0
    assert found["explicit"] == found["auto"]


def test_what_types_do_not_follow_is_refused_while_planning():
    with pytest.raises(PlanError) as refused:
        make_plan(experiment(sharding="zero2", **EXPLICIT), FOUND)
    assert "sharding.gradients.embed=[data] is not sharding.weights.embed=[]" in str(refused.value)
    assert "Set backend.axis_types=auto" in str(refused.value)
    with pytest.raises(PlanError, match=r"mesh\.pipeline=\d splits sharding\.weights\.layers"):
        make_plan(experiment(sharding="pipeline_fsdp", **EXPLICIT), FOUND)
    make_plan(experiment(sharding="zero2", **{"mesh.devices": 1}, **EXPLICIT), FOUND)


def test_torch_has_no_use_for_it():
    with pytest.raises(ConfigError, match=r"backend\.axis_types=explicit is for backend=jax.*Set backend\.axis_types=null"):
        make_plan(experiment(backend="torch", **EXPLICIT), FOUND)
