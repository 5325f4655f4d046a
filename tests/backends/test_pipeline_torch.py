"""Pipelines in torch: schedules and what they combine with against one device, the order in which they run, what is refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import test_moe_torch
from cases import Outcome, choices, differences, ragged_batches, run_session
from experiments import FOUND, plain
from test_packing import BATCHES as PACKED

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.backends.torch.bubble import makespan, order
from scaling_lab.backends.torch.train import open_session
from scaling_lab.config import experiment_from
from scaling_lab.errors import PlanError
from scaling_lab.plan.pipeline import PipelineSplit
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


def test_a_schedule_ends_when_its_last_pass_has_had_all_that_it_waits_for():
    """2 stages, 2 microbatches, forward 1 s and backward 2 s: stage 1 has F 1-2, F 2-3, B 3-5, B 5-7, stage 0 B 5-7, B 7-9."""
    passes = [[(stage, kind, n) for kind in "FB" for n in range(2)] for stage in range(2)]
    assert makespan(passes, {(stage, kind): 1 + (kind == "B") for stage in range(2) for kind in "FB"}) == 9
    slow = {(0, "F"): 3, (1, "F"): 1, (0, "B"): 2, (1, "B"): 2}
    assert makespan(passes, slow) == 13  # stage 0: F 0-3, F 3-6; stage 1: F 3-4, F 6-7, B 7-9, B 9-11; stage 0: B 9-11, B 11-13


def test_the_planned_bubble_is_that_of_every_schedule_whose_stages_are_alike():
    """Whatever the stages, chunks and microbatches, and whether a backward pass takes as long as a forward one or twice."""
    for stages, chunks, rounds, back in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 4), (1, 2)):
        for schedule in ("gpipe", "1f1b") if chunks == 1 else ("interleaved",):
            split = PipelineSplit(("pipeline",), stages, chunks, rounds * stages, schedule, stages * chunks)
            alike = {(chunk, kind): back if kind == "B" else 1 for chunk in range(stages * chunks) for kind in "FB"}
            whole = makespan([order(split, stage) for stage in range(stages)], alike)
            assert 1 - (1 + back) * split.microbatches * chunks / whole == pytest.approx(split.bubble_share)


@pytest.mark.parametrize(
    "keys", [{**GPIPE, **FOUR}, {**BY_TURNS, **FOUR}, {**INTERLEAVED, **TWO}], ids=lambda k: k["workload.pipeline.schedule"]
)
def test_passes_follow_as_the_plan_says_and_so_few_microbatches_are_in_flight(keys, torch_ranks):
    asked = config("llama", "pipeline", **keys)
    found = torch_ranks.run(asked, ragged_batches(), call=watched)["results"]
    plan = job_of(asked).plan
    split = plan.pipeline
    for rank, (passes, in_flight, shares) in enumerate(found):
        stage = plan.mesh.coordinates(rank)["pipeline"]
        assert passes == order(split, stage)
        assert in_flight == split.in_flight[stage]
        assert shares == found[0][2]
    assert all(split.bubble_share < share < 1 for share in found[0][2]), "5 layers: stages differ, so some wait more"


def watched(session: Any, job: Job, batches: Any) -> tuple[list[Any], int, list[float]]:
    """Of a rank: the passes of a step, of how many microbatches x chunks it holds activations at most, and bubbles of steps."""
    stages, passes, held = session.pipeline.stages, [], [0]

    def noting(stage: Any, kind: str, work: Any) -> Any:
        def run(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            passes.append((stage.stage_index, kind, microbatch))
            found = work(microbatch, *args, **kwargs)
            held.append(sum(len(stage.fwd_cache) for stage in stages))
            return found

        return run

    for stage in stages:
        stage.forward_one_chunk = noting(stage, "F", stage.forward_one_chunk)
        stage.backward_one_chunk = noting(stage, "B", stage.backward_one_chunk)
    steps = [session.step(local_batch(job, *batch)).result() for batch in batches]
    return passes[: len(passes) // len(steps)], max(held), [step["bubble_share"] for step in steps]


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


def test_ddp_is_refused_with_stages():
    with pytest.raises(PlanError, match=r"Set backend.data_parallel=buckets or mesh.pipeline=1"):
        job_of(config("llama", "pipeline", **TWO, **{"backend.data_parallel": "ddp"}))
