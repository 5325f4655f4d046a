"""Mixtures of experts and latent attention in torch: every layout against one device, and how often it communicates."""

from __future__ import annotations

import functools
import shutil
import warnings
from typing import Any

import pytest
from cases import Outcome, choices, differences, ragged_batches
from experiments import FOUND, plain

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")

#: Weights so large, and losses of the router so heavy, that a fault in either would show in every gradient.
SIZES = {"model.moe.expert_mlp": 24, "model.init_std": 0.2, "model.moe.balance_loss": 0.7, "model.moe.z_loss": 0.05}
RANKS = {"query_rank": 24, "kv_rank": 16, "rope_dim": 4, "nope_dim": 8, "value_dim": 10}
LATENT = {"model.latent": RANKS, "model.head_dim": 12, "model.kv_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "limited rooms": {"model.moe.capacity_factor": 1.3, "model.moe.shared_experts": 2},
    "one dense layer, a shared expert": {
        "model.layers": 3,
        "model.moe.dense_layers": 1,
        "model.moe.shared_experts": 1,
        "model.moe.routing": "softmax_topk",
        "model.moe.routed_scale": 1.5,
    },
    "normed queries, three of four experts": {
        "model.qk_norm": True,
        "model.moe.experts_per_token": 3,
        "model.moe.routing": "topk_softmax",
    },
    "one of eight experts": {"model.moe.experts": 8, "model.moe.experts_per_token": 1, "model.moe.routing": "softmax_topk"},
    "latent attention": LATENT,
    "latent attention without a query rank": {**LATENT, "model.latent": {**RANKS, "query_rank": None, "value_dim": 16}},
    "no losses of the router": {"model.moe.balance_loss": 0.0, "model.moe.z_loss": 0.0, "model.activation": "gelu"},
}
#: table, accumulation, mesh and other keys
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "data": ("data", 2, {}),
    "ddp": ("data", 2, {"backend.data_parallel": "ddp"}),
    "zero2": ("zero2", 1, {}),
    "fsdp": ("fsdp", 1, {}),
    "expert": ("expert", 1, {}),
    "expert in 4, accumulating": ("expert", 2, {"mesh.expert": 4}),
    "fsdp_expert": ("fsdp_expert", 1, {}),
    "fsdp_expert that keeps what it gathered": ("fsdp_expert", 2, {"backend.reshard_after_forward": False}),
    "fsdp_expert with copies": ("fsdp_expert", 2, {"mesh.data": 2, "mesh.fsdp": 2, "mesh.expert": 2}),
    "fsdp_expert_tensor": ("fsdp_expert_tensor", 1, {}),
    "tensor": ("tensor", 2, {}),
    "sequence parallel": ("fsdp_tensor_sequence", 1, {}),
    "sequence in parts": ("fsdp_tensor_context", 1, {"workload.context.strategy": "ring"}),
    "sequence in 4 parts, gathered": ("context", 1, {"workload.context.strategy": "gather", "mesh.context": 4, "mesh.fsdp": 2}),
}


def config(table: str, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    return plain(**{**choices("llama", table, "torch", accumulation), "model": "tiny_moe", **SIZES, **changes})


def job_of(table: str, accumulation: int = 1, **changes: Any) -> Job:
    asked = experiment_from(config(table, accumulation, **changes))
    return Job(asked, make_plan(asked, FOUND), 0, "")


def trained(session: Any, job: Job, batches: Any) -> dict[str, Any]:
    """Runs on a rank."""
    local = [local_batch(job, *batch) for batch in batches]
    session.prepare(local[0])
    _, gradients = session.gradients(local[0])
    steps = [session.step(batch).result() for batch in local]
    outcome = Outcome([s["loss"] for s in steps], [s["grad_norm"] for s in steps], dict(gradients), dict(session.weights()))
    planned = {p.parameter.name: p.weights for p in job.plan.parameters}
    return {
        "outcome": outcome if job.process == 0 else None,
        "steps": steps,
        "planned": session.layouts() == planned,
        "digests": session.replica_digests(),
    }


def found_of(ranks: Any, table: str, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """What rank 0 found; all ranks have the same numbers, lie as planned, and hold the same bits of what several have."""
    answers = ranks.run(config(table, accumulation, **changes), ragged_batches(), call=trained)["results"]
    answers = [answer for answer in answers if answer is not None]
    replicas: dict[str, str] = {}
    for answer in answers:
        assert answer["planned"]
        assert answer["steps"] == answers[0]["steps"]
        assert all(replicas.setdefault(part, digest) == digest for part, digest in answer["digests"].items())
    return answers[0]


@functools.cache
def alone(model: str) -> dict[str, Any]:
    """One device, in this process."""
    job = job_of("single", **MODELS[model])
    session = open_session(job)
    try:
        return trained(session, job, ragged_batches())
    finally:
        session.close()


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert differences(found["outcome"], wanted["outcome"]) == []
    for name in ("balance_loss", "z_loss", "dropped_tokens", "valid_tokens"):
        ours, theirs = ([step[name] for step in one["steps"]] for one in (found, wanted))
        assert ours == pytest.approx(theirs, rel=1e-5), name


#: Every layout with two of the models, every model in the layouts that differ most.
FULLY = ("limited rooms", "one dense layer, a shared expert")
TELLING = ("expert in 4, accumulating", "fsdp_expert_tensor", "tensor", "sequence in 4 parts, gathered")
PAIRS = [(model, layout) for model in MODELS for layout in LAYOUTS if model in FULLY or layout in TELLING]


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_a_layout_equals_one_device(model, layout, torch_ranks):
    table, accumulation, changes = LAYOUTS[layout]
    found = found_of(torch_ranks, table, accumulation, **{**MODELS[model], **changes})
    assert_equal(found, alone(model))


def test_rooms_are_too_small_for_some_assignments_of_every_step():
    dropped = [step["dropped_tokens"] for step in alone("limited rooms")["steps"]]
    assert all(0 < number < 2 * 16 * 16 * 2 for number in dropped)


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("layout", ["expert", "fsdp_expert", "fsdp_expert_tensor"])
def test_a_checkpointed_layer_with_experts_gives_the_same_steps(layout, remat, torch_ranks):
    table, accumulation, changes = LAYOUTS[layout]
    model = "one dense layer, a shared expert"
    found = found_of(torch_ranks, table, accumulation, **{**MODELS[model], **changes, "workload.remat": remat})
    assert_equal(found, alone(model))


def test_experts_spread_over_two_axes_equal_one_device(torch_ranks):
    rows = {"weights.experts": ["expert", "fsdp"], "activations.experts": ["expert", "fsdp"]}
    rows |= {"weights.embed": [], "activations.expert_batch": ["data"]}
    keys = {f"sharding.{row}": axes for row, axes in rows.items()}
    assert_equal(found_of(torch_ranks, "fsdp_expert", **keys, **{"mesh.fsdp": 2, "mesh.data": 2}), alone("dropless"))


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile on CPU needs a C++ compiler")
@pytest.mark.parametrize("layout", ["fsdp_expert", "tensor"])
def test_compiled_layers_with_experts_give_the_same_steps(layout, torch_pair):
    table, accumulation, changes = LAYOUTS[layout]
    found = found_of(torch_pair, table, accumulation, **changes, **{"backend.compile": True, "mesh.devices": 2})
    assert_equal(found, alone("dropless"))


def test_bfloat16_experts_come_near_float32(torch_ranks):
    changes = {"workload.precision.compute": "bfloat16", "model.moe.shared_experts": 1}
    near = found_of(torch_ranks, "fsdp_expert_tensor", **changes)
    wanted = found_of(torch_ranks, "single", **{"model.moe.shared_experts": 1})
    for name in ("loss", "balance_loss", "z_loss"):
        ours, theirs = ([step[name] for step in one["steps"]] for one in (near, wanted))
        assert ours == pytest.approx(theirs, rel=0.03)
        assert ours != theirs


def collectives(session: Any, job: Job, batches: Any) -> dict[str, int]:
    """Runs on a rank: how many collectives of a kind a step has."""
    from torch.distributed.tensor.debug import CommDebugMode

    session.step(local_batch(job, *batches[0])).result()
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # the counter's own hooks
        warnings.filterwarnings("ignore", ".* returned a view tensor")  # a view by these hooks
        session.step(local_batch(job, *batches[1])).result()
    counts: dict[str, int] = {}
    for operation, count in counter.get_comm_counts().items():
        kind = str(operation).split(".")[-1].replace("_", "")
        kind = kind.replace("base", "").replace("intotensor", "").replace("tensor", "").replace("single", "")
        counts[kind] = counts.get(kind, 0) + count
    return counts


#: Two layers. Every step begins with the sum of valid tokens, and ends with one of loss, norm and counts.
COLLECTIVES: dict[str, dict[str, int]] = {
    "data": {"allreduce": 2 + 1},
    # experts are gathered and scattered with the rest of their layer
    "fsdp": {"allgather": 3 + 1, "reducescatter": 3, "allreduce": 2},
    # gradients of the experts and of the rest; a layer: counts, there and back, in both passes
    "expert": {"allreduce": 2 + 2, "alltoall": 2 * (1 + 2 + 2)},
    # two units a layer, of which the last layer's are kept; copies of what are no experts are summed over the experts' axis
    "fsdp_expert": {"allgather": 5 + 2, "reducescatter": 5, "allreduce": 2 + 3, "alltoall": 10},
    # two blocks a layer and pass, embedding, head; one bucket of gradients; the loss exchanges two numbers a token
    "tensor": {"allreduce": 2 + 1 + 2 * 2 * 2 + 1 + 1, "allgather": 1},
    "fsdp_expert_tensor": {"allgather": 7 + 1, "reducescatter": 5, "allreduce": 2 + 3 + 8 + 1 + 1, "alltoall": 10},
}


@pytest.mark.parametrize("table", COLLECTIVES)
def test_a_step_communicates_as_often_as_its_table_needs(table, torch_ranks):
    for counts in torch_ranks.run(config(table), ragged_batches(), call=collectives)["results"]:
        assert counts == COLLECTIVES[table]


#: What differs from the counts above: latent attention costs as much as the plain one, its norms one sum of all layers.
CHANGED = {
    "rooms need no counts": ("expert", {"model.moe.capacity_factor": 1.0}, {"alltoall": -2}),
    "no losses, no count of tokens": ("expert", {"model.moe.balance_loss": 0.0, "model.moe.z_loss": 0.0}, {"allreduce": -1}),
    "a recomputed layer sends once more": ("fsdp_expert", {"workload.remat": "full"}, {"alltoall": 2 * 3}),
    "norms of all heads in one": ("tensor", {"model.qk_norm": True}, {"allreduce": 1}),
    "latent attention": ("tensor", LATENT, {}),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_a_change_of_the_model_costs_in_collectives(change, torch_ranks):
    table, changes, more = CHANGED[change]
    wanted = {kind: count + more.get(kind, 0) for kind, count in COLLECTIVES[table].items()}
    for counts in torch_ranks.run(config(table, **changes), ragged_batches(), call=collectives)["results"]:
        assert counts == wanted


def evaluated(session: Any, job: Job, batches: Any) -> list[float]:
    """Runs on a rank: an evaluation before, between and after steps, and the steps' losses."""
    first, second, _ = (local_batch(job, *batch) for batch in batches)
    losses = []
    for _ in range(2):
        found = session.evaluate(first).result()
        assert found.keys() == {"loss_sum", "valid_tokens"}
        losses += [found["loss_sum"] / found["valid_tokens"], session.step(first).result()["loss"]]
        session.evaluate(second).result()
    return losses


@pytest.mark.parametrize("table", ["single", "fsdp_expert", "fsdp_expert_tensor"])
def test_an_evaluation_has_the_loss_of_the_next_step_without_the_routers_losses(table, torch_ranks):
    for losses in torch_ranks.run(config(table), ragged_batches(), call=evaluated)["results"]:
        if losses is not None:
            before, step, after, next_step = losses
            assert (before, after) == (step, next_step)
