"""Pipelines in torch: schedules and what they combine with against one device, the order in which they run, what is refused."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import numpy as np
import pytest
import test_moe_torch
from cases import Outcome, choices, differences, ragged_batches, run_session
from experiments import FOUND, plain
from test_packing import BATCHES as PACKED

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.errors import PlanError
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")

LAYERS = {"model.layers": 5}  # on 2 or 4 stages, or 2 x 2 chunks: some have one more than others
GPIPE: dict[str, Any] = {"workload.pipeline.schedule": "gpipe"}
BY_TURNS: dict[str, Any] = {"workload.pipeline.schedule": "1f1b"}
INTERLEAVED: dict[str, Any] = {"workload.pipeline.schedule": "interleaved", "workload.pipeline.virtual_stages": 2}
TWO, FOUR = {"mesh.pipeline": 2}, {"mesh.pipeline": 4}
#: table, accumulation, keys
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpipe on 2": ("pipeline", 1, {**GPIPE, **TWO}),
    "gpipe on 4": ("pipeline", 1, {**GPIPE, **FOUR}),
    "by turns on 2, accumulating": ("pipeline", 2, {**BY_TURNS, **TWO}),
    "by turns on 4": ("pipeline", 1, {**BY_TURNS, **FOUR}),
    "interleaved on 2": ("pipeline", 1, {**INTERLEAVED, **TWO}),
}
COMBINED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp, interleaved, accumulating": ("pipeline_fsdp", 2, {**INTERLEAVED, **TWO}),
    "fsdp that keeps what it gathered": ("pipeline_fsdp", 1, {**BY_TURNS, **FOUR, "backend.reshard_after_forward": False}),
    "fsdp with copies": ("pipeline_fsdp", 1, {**TWO, "mesh.data": 2, "mesh.fsdp": 2}),
    "tensor, one microbatch": ("pipeline_fsdp_tensor", 1, {**TWO, "workload.pipeline.microbatches": 1}),
    "tensor, interleaved": ("pipeline_fsdp_tensor", 1, {**INTERLEAVED, **TWO}),
    "sequence parallel": ("pipeline_fsdp_tensor", 1, {**TWO, "sharding.activations.residual_sequence": ["tensor"]}),
    "gradients and state in parts": ("pipeline", 1, {**BY_TURNS, **TWO, "sharding.gradients": {"embed": ["data"]}}),
    "ring": ("pipeline_context", 1, {**BY_TURNS, **FOUR, "mesh.context": 2, "workload.context.strategy": "ring"}),
    "layers computed again": ("pipeline", 1, {**BY_TURNS, **FOUR, "workload.remat": "full", "workload.loss_chunks": 2}),
}


def config(model: str, table: str, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    return plain(**choices(model, table, "torch", accumulation, **{**LAYERS, **keys}))


def job_of(asked: dict[str, Any]) -> Job:
    experiment = experiment_from(asked)
    return Job(experiment, make_plan(experiment, FOUND), 0, "")


@functools.cache
def alone(model: str, packed: bool = False, **keys: Any) -> Outcome:
    job = job_of(config(model, "single", **keys))
    session = open_session(job)
    return run_session(session, job, PACKED if packed else ragged_batches())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_schedule_gives_the_numbers_of_one_device(model, layout, torch_pool):
    """Replicas and layouts are checked by the pool: a tied table stays the same on the first stage and the last."""
    table, accumulation, keys = LAYOUTS[layout]
    assert differences(torch_pool(config(model, table, accumulation, **keys), ragged_batches()), alone(model)) == []


@pytest.mark.parametrize("layout", COMBINED)
def test_stages_combine_with_other_parallelism(layout, torch_pool):
    """GPT-2's tied table is summed over the first and the last stage, however it lies within them."""
    table, accumulation, keys = COMBINED[layout]
    assert differences(torch_pool(config("gpt2", table, accumulation, **keys), ragged_batches()), alone("gpt2")) == []


def test_four_stages_of_two_chunks_equal_one_device(torch_pool):
    keys = {"model.layers": 9}
    found = torch_pool(config("llama", "pipeline", **keys, **INTERLEAVED, **FOUR), ragged_batches())
    assert differences(found, alone("llama", **keys)) == []


@pytest.mark.parametrize(("table", "keys"), [("pipeline", {**INTERLEAVED, **TWO}), ("pipeline_context", {**BY_TURNS, **TWO})])
def test_every_stage_knows_where_documents_end(table, keys, torch_pool):
    assert differences(torch_pool(config("llama", table, **keys), PACKED), alone("llama", packed=True)) == []


EXPERTS = {"sharding.weights.layers": ["pipeline"], "mesh.expert": 2, "mesh.tensor": 2}


@pytest.mark.parametrize(
    ("model", "table", "keys"),
    [
        ("limited rooms", "pipeline", {**BY_TURNS, **TWO}),
        ("limited rooms", "fsdp_expert_tensor", {**GPIPE, **TWO, **EXPERTS}),
        ("no losses of the router", "pipeline", {**INTERLEAVED, **TWO}),
    ],
)
def test_losses_of_routers_travel_with_the_residual_stream(model, table, keys, torch_ranks):
    """They reach the loss on the last stage, and its gradient comes back the same way to every router."""
    sizes = {**test_moe_torch.MODELS[model], **LAYERS}
    job = test_moe_torch.job_of("single", **sizes)
    wanted = test_moe_torch.trained(open_session(job), job, ragged_batches())
    test_moe_torch.assert_equal(test_moe_torch.found_of(torch_ranks, table, **sizes, **keys), wanted)


@pytest.mark.parametrize(
    ("table", "keys"),
    [("pipeline", {**GPIPE, **FOUR}), ("pipeline_fsdp", {**INTERLEAVED, **TWO}), ("pipeline", {**BY_TURNS, **TWO})],
)
def test_evaluations_between_steps_change_nothing_and_give_the_loss(table, keys, torch_ranks):
    job = job_of(config("gpt2", "single"))
    session = open_session(job)
    local = [local_batch(job, *batch) for batch in ragged_batches()]
    sums = session.evaluate(local[1]).result()
    losses = [session.step(batch).result()["loss"] for batch in local]
    for found in torch_ranks.run(config("gpt2", table, **keys), ragged_batches(), call=evaluated_between_steps)["results"]:
        assert found[0] == pytest.approx(sums, rel=1e-5)
        assert found[1] == pytest.approx(losses, rel=1e-5)


def evaluated_between_steps(session: Any, job: Job, batches: Any) -> tuple[dict[str, float], list[float]]:
    first, second, third = (local_batch(job, *batch) for batch in batches)
    session.prepare_evaluation(second)
    sums = session.evaluate(second).result()
    losses = [session.step(first).result()["loss"]]
    session.evaluate(first).result()
    losses += [session.step(batch).result()["loss"] for batch in (second, third)]
    return sums, losses


@pytest.mark.parametrize("keys", [{**GPIPE, **FOUR}, {**BY_TURNS, **FOUR}, {**INTERLEAVED, **TWO}], ids=lambda k: str(k))
def test_as_many_microbatches_are_in_flight_on_a_stage_as_the_plan_says(keys, torch_ranks):
    asked = config("llama", "pipeline", **keys)
    found = torch_ranks.run(asked, ragged_batches(), call=most_in_flight)["results"]
    plan = job_of(asked).plan
    places = [plan.mesh.coordinates(rank)["pipeline"] for rank in range(8)]
    assert found == [plan.pipeline.in_flight[stage] for stage in places]


def most_in_flight(session: Any, job: Job, batches: Any) -> int:
    """How many microbatches x chunks a rank holds activations of at most, in a step."""
    stages, most = session.pipeline.stages, [0]

    def watched(forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            most[0] = max(most[0], sum(len(stage.fwd_cache) for stage in stages))
            return output

        return run

    for stage in stages:
        stage.forward_one_chunk = watched(stage.forward_one_chunk)
    session.step(local_batch(job, *batches[0])).result()
    return most[0]


def test_the_bubble_of_one_microbatch_is_most_of_the_schedule(torch_ranks):
    """On 4 stages at most one is at work at a time: 3 / 4 by arithmetic, more by the clock, which also counts waiting for messages."""
    asked = config("llama", "pipeline", **GPIPE, **FOUR, **{"workload.pipeline.microbatches": 1})
    found = torch_ranks.run(asked, ragged_batches(), call=bubbles)["results"]
    assert len(set(found)) == 1
    assert all(0.75 <= share < 1 for share in found[0])


def bubbles(session: Any, job: Job, batches: Any) -> tuple[float, ...]:
    return tuple(session.step(local_batch(job, *batch)).result()["bubble_share"] for batch in batches)


def test_a_stage_holds_its_own_layers_and_only_their_bytes(torch_ranks):
    """5 layers over 4 stages: 2, 1, 1, 1; the embedding is on the first stage, the final norm and the head on the last."""
    asked = config("llama", "pipeline", **FOUR)
    found = torch_ranks.run(asked, ragged_batches(), call=held)["results"]
    plan = job_of(asked).plan
    wanted = {
        0: {"embed.tokens", "layers.0", "layers.1"},
        1: {"layers.2"},
        2: {"layers.3"},
        3: {"layers.4", "final_norm.scale", "head.weight"},
    }
    for rank, (names, parameter_bytes) in enumerate(found):
        stage = plan.mesh.coordinates(rank)["pipeline"]
        assert names == wanted[stage]
        layers = sum(name.startswith("layers") for name in names)
        sizes = {p.parameter.name: int(np.prod(p.parameter.shape[1:])) for p in plan.parameters if p.parameter.stacked}
        outside = sum(p.parameter.size for p in plan.parameters if p.parameter.name in names)
        assert parameter_bytes == 4 * (layers * sum(sizes.values()) + outside)


def held(session: Any, job: Job, batches: Any) -> tuple[set[str], int]:
    names = {piece.name if piece.layer is None else f"layers.{piece.layer}" for piece in session.pieces}
    return names, session.bytes_per_device()["parameters"]


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile on CPU needs a C++ compiler")
def test_compiled_layers_of_stages_give_the_same_steps(torch_pool):
    asked = config("llama", "pipeline", **{"backend.compile": True}, **BY_TURNS, **FOUR)
    assert differences(torch_pool(asked, ragged_batches()), alone("llama")) == []


def test_ddp_is_refused_with_stages():
    with pytest.raises(PlanError, match=r"Set backend.data_parallel=buckets or mesh.pipeline=1"):
        job_of(config("llama", "pipeline", **TWO, **{"backend.data_parallel": "ddp"}))
