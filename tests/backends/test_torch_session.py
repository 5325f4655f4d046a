"""A torch session over the ranks of the pool, and alone: what it shares out, how often it communicates, what it refuses."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch_pool as pool_module
from cases import SMALL, choices, ragged_batches
from experiments import FOUND, plain

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch import optimizer, runtime
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.errors import PlanError, WorkerError
from scaling_lab.plan.plan import Found, make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")

ADAMW = {"workload.optimizer.name": "adamw", "workload.optimizer.lr": 0.01, "workload.optimizer.weight_decay": 0.1}
MOMENTUM = {"workload.optimizer.momentum": 0.9}


def config(table: str, model: str = "llama", **changes: Any) -> dict[str, Any]:
    return plain(**choices(model, table, "torch", **changes))


def job_of(table: str, found: Found = FOUND, **changes: Any) -> Job:
    experiment = experiment_from(config(table, **changes))
    return Job(experiment, make_plan(experiment, found), 0, "127.0.0.1:0")


@pytest.mark.parametrize("changes", [ADAMW, MOMENTUM], ids=["adamw", "momentum"])
@pytest.mark.parametrize("table", ["zero1", "zero2", "fsdp", "fsdp_tensor_sequence"])
def test_state_in_parts_steps_like_state_in_one_piece(table, changes, torch_ranks):
    whole = torch_ranks.run(config("single", **changes), ragged_batches(), want=("weights",))
    parts = torch_ranks.run(config(table, **changes), ragged_batches(), want=("weights",))
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    for name, value in whole["weights"].items():
        # AdamW divides by a root that is near 0 for rare tokens, which widens rounding: lr x 1e-2 bounds it.
        np.testing.assert_allclose(parts["weights"][name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def bytes_of(session: Any, job: Job, batches: Any) -> dict[str, Any]:
    session.step(local_batch(job, *batches[0])).result()
    return session.bytes_per_device()


@pytest.mark.parametrize(
    ("table", "parameters", "state"), [("data", 1, 2), ("zero1", 1 + 1 / 8, 2 / 8), ("fsdp", 1 / 8, 2 / 8)]
)
def test_bytes_on_a_device_are_those_of_its_parts(table, parameters, state, torch_ranks):
    """AdamW keeps two copies; ZeRO-1 steps on a copy of its eighth of the weights beside the whole."""
    whole = 4 * make_plan(experiment_from(config("single")), FOUND).parameter_count
    for found in torch_ranks.run(config(table, **ADAMW), ragged_batches(), call=bytes_of)["results"]:
        assert (found["parameters"], found["optimizer"]) == (parameters * whole, state * whole)
        assert found["total"] is None


def counted_collectives(session: Any, job: Job, batches: Any) -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    session.step(local_batch(job, *batches[0])).result()
    with warnings.catch_warnings(), CommDebugMode() as counter:
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # the counter's own hooks
        session.step(local_batch(job, *batches[1])).result()
    counts: dict[str, int] = {}
    for operation, count in counter.get_comm_counts().items():
        kind = (
            str(operation).split(".")[-1].replace("_", "").replace("base", "").replace("intotensor", "").replace("tensor", "")
        )
        counts[kind] = counts.get(kind, 0) + count
    return counts


#: Two layers. Every step ends with one all-reduce of loss, count and squared norm.
COLLECTIVES = {
    "data": {"allreduce": 1 + 1},  # all gradients in one buffer
    "zero1": {"allreduce": 1 + 1, "allgather": 1},
    "zero2": {"reducescatter": 1, "allreduce": 1, "allgather": 1},
    # 3 units gathered forward; backward only the first layer again, as the last layer and the root are kept
    "fsdp": {"allgather": 3 + 1, "reducescatter": 3, "allreduce": 1},
    # embedding, 2 blocks a layer and pass, the head's input backward; the loss exchanges two numbers a token
    "fsdp_tensor": {"allgather": 3 + 1 + 1, "reducescatter": 3, "allreduce": 1 + 2 * 2 * 2 + 1 + 1},
}


@pytest.mark.parametrize("table", COLLECTIVES)
def test_a_step_communicates_as_often_as_its_table_needs(table, torch_ranks):
    for counts in torch_ranks.run(config(table), ragged_batches(), call=counted_collectives)["results"]:
        assert counts == COLLECTIVES[table]


def evaluated_between_steps(session: Any, job: Job, batches: Any) -> list[float]:
    first, second, _ = (local_batch(job, *batch) for batch in batches)
    losses = []
    for _ in range(2):
        found = session.evaluate(first).result()
        losses += [found["loss_sum"] / found["valid_tokens"], session.step(first).result()["loss"]]
        session.evaluate(second).result()
    return losses


@pytest.mark.parametrize("table", ["single", "fsdp", "hsdp", "fsdp_tensor"])
def test_an_evaluation_uses_the_present_weights_and_so_does_the_step_after_it(table, torch_ranks):
    results = torch_ranks.run(config(table), ragged_batches(), call=evaluated_between_steps)["results"]
    for losses in (found for found in results if found is not None):
        before, step, after, next_step = losses
        assert (before, after) == (step, next_step)
        assert after < before


def nothing_valid(session: Any, job: Job, batches: Any) -> tuple[dict[str, float], bool]:
    before = session.replica_digests()
    metrics = session.step(local_batch(job, batches[0][0], np.full_like(batches[0][1], -1))).result()
    return metrics, session.replica_digests() == before


@pytest.mark.parametrize("table", ["zero2", "fsdp_tensor_sequence"])
def test_a_step_without_any_valid_label_moves_nothing_on_any_rank(table, torch_ranks):
    still = {"workload.optimizer.weight_decay": 0.0}
    for metrics, unmoved in torch_ranks.run(config(table, **still), ragged_batches(), call=nothing_valid)["results"]:
        assert (metrics["loss"], metrics["grad_norm"], metrics["valid_tokens"]) == (0.0, 0.0, 0.0)
        assert unmoved


@pytest.mark.parametrize("table", ["fsdp", "fsdp_tensor", "tensor_sequence"])
def test_axes_of_size_1_equal_the_plain_run_bit_for_bit(table, torch_ranks):
    one = torch_ranks.run(config("single"), ragged_batches())
    ones = torch_ranks.run(config(table, mesh="one"), ragged_batches())
    assert (ones["losses"], ones["digests"]) == (one["losses"], one["digests"])


def test_first_weights_are_the_same_bits_in_every_table(torch_ranks):
    whole = torch_ranks.run(config("single"), [], want=("weights",))["weights"]
    parts = torch_ranks.run(config("fsdp_tensor"), [], want=("weights",))["weights"]
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value, err_msg=name)


def test_a_microbatch_of_a_process_has_the_rows_of_its_device():
    """Rows 0 to 15 in 2 microbatches of 8 over 8 devices: device 3 has row 3 of each, global rows 3 and 11."""
    experiment = experiment_from(config("data", accumulation=2))
    job = Job(experiment, make_plan(experiment, FOUND), 3, "")
    rows = np.arange(16, dtype=np.int32)[:, None].repeat(16, axis=1)
    batch = local_batch(job, rows, rows)
    assert batch.tokens.shape == (2, 1, 16)
    assert batch.tokens[:, 0, 0].tolist() == [3, 11]


def test_a_compiled_checkpointed_layer_that_is_split_is_refused_with_both_ways_out():
    with pytest.raises(PlanError, match=r"workload\.remat=none or backend\.compile=false"):
        open_session(job_of("tensor", **{"backend.compile": True, "workload.remat": "full"}))


def test_a_layer_stored_over_different_axes_is_refused_naming_its_parameters(torch_ranks):
    """Attention over data with copies over fsdp, the mlp the other way round: no one mesh for the layer's unit."""
    rows = {"sharding.weights.embed": [], "sharding.weights.heads": ["data"], "sharding.weights.kv_heads": ["data"]}
    mixed = config("hsdp", **rows, **{"sharding.weights.mlp": ["fsdp"], "mesh.data": 2, "mesh.fsdp": 4})
    with pytest.raises(pool_module.TorchPoolError, match=r"PlanError.*layers.attention.query over \['data'\].*layers.mlp.gate"):
        torch_ranks.run(mixed, [])


def test_a_plan_for_a_gpu_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(WorkerError, match="finds 0 GPUs"):
        open_session(job_of("single", Found("gpu", 1, False, None)))


def test_compiling_without_a_compiler_is_one_message(monkeypatch):
    monkeypatch.setattr(runtime.shutil, "which", lambda name: None)
    with pytest.raises(WorkerError, match=r"backend\.compile=true needs a C\+\+ compiler"):
        open_session(job_of("single", **{"backend.compile": True}))


def test_a_decay_that_reaches_no_parameter_is_an_error():
    with pytest.raises(WorkerError, match="apply to 0 of 0 tensors"):
        optimizer.make_optimizer(job_of("single").experiment.workload.optimizer, [], [])


def test_weight_decay_reaches_matrices_embedding_and_head_only():
    session = open_session(job_of("single"))
    decayed, others = session.optimizer.param_groups
    layers = SMALL["layers"]
    assert (decayed["weight_decay"], len(decayed["params"])) == (0.01, 2 + 7 * layers)  # embedding, head; q k v o gate up down
    assert (others["weight_decay"], len(others["params"])) == (0.0, 1 + 2 * layers)  # norms


def fail_on_rank_3(session: Any, job: Job, batches: Any) -> None:
    if job.process == 3:
        raise ValueError("rank 3 has had enough")
    session.step(local_batch(job, *batches[0])).result()


def hang_on_rank_1(session: Any, job: Job, batches: Any) -> None:
    if job.process == 1:
        time.sleep(600)
    session.step(local_batch(job, *batches[0])).result()


def test_the_pool_ends_when_a_rank_raises_or_hangs_and_starts_again():
    experiment = plain(**choices("llama", "data", "torch"))
    with pool_module.TorchPool(8, limit_s=60) as pool:
        with pytest.raises(pool_module.TorchPoolError, match="rank 3 has had enough"):
            pool.run(experiment, ragged_batches(), call=fail_on_rank_3)
        pool.limit_s = 8
        with pytest.raises(pool_module.TorchPoolError, match="no answer from ranks"):
            pool.run(experiment, ragged_batches(), call=hang_on_rank_1)
        pool.limit_s = 60
        assert len(pool.run(experiment, ragged_batches())["losses"]) == 3
        processes = [process for process, _ in pool._ranks]
    assert [process.is_alive() for process in processes] == [False] * 8
