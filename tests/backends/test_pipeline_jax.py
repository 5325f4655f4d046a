"""Pipelines in JAX: schedules, uneven layers and combinations equal one device; what a step exchanges, and what a stage holds."""

import functools
import re

import numpy as np
import pytest
from cases import ROWS, differences, ragged_batches
from experiments import FOUND
from test_moe_jax import reference as reference_mixture
from test_moe_jax import run as run_mixture
from test_packing import BATCHES as PACKED
from test_packing import reference as reference_packed
from test_parity import config, run_jax

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax import by_turns
from scaling_lab.backends.jax.pipeline import ticks
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.config import experiment_from
from scaling_lab.plan.pipeline import PipelineSplit
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("jax_gpt2")

INTERLEAVED = {"workload.pipeline.schedule": "interleaved"}
TURNS = {"workload.pipeline.schedule": "1f1b"}
STAGES = {"sharding.weights.layers": ["pipeline"], "mesh.pipeline": 2}


@functools.cache
def reference(model, layers):
    return run_jax(config(model, "single", "jax", **{"model.layers": layers}), ragged_batches())


@pytest.mark.parametrize(
    ("model", "table", "layers", "accumulation", "changes"),
    [
        ("llama", "pipeline", 6, 1, {"mesh.pipeline": 4}),
        ("gpt2", "pipeline", 5, 1, INTERLEAVED),
        ("gpt2", "pipeline_fsdp", 5, 2, INTERLEAVED),
        ("llama", "pipeline_fsdp_tensor", 3, 1, {"sharding.activations.residual_sequence": ["tensor"]}),
        ("llama", "pipeline_context", 2, 1, {"workload.context.strategy": "ring"}),
        ("llama", "pipeline", 3, 1, {"backend.scan_layers": False, "workload.remat": "full"}),
        ("llama", "pipeline", 3, 1, {"workload.remat": "dots", "workload.loss_chunks": 4}),
        ("llama", "pipeline", 3, 1, {"backend.partitioner": "gspmd", "workload.pipeline.microbatches": 1}),
        ("llama", "zero2", 2, 1, STAGES),
        ("gpt2", "pipeline", 3, 1, {**TURNS, "workload.remat": "dots"}),
        ("llama", "pipeline", 6, 2, {**TURNS, "mesh.pipeline": 4, "workload.loss_chunks": 2}),
        ("llama", "pipeline_fsdp_tensor", 3, 1, TURNS),
        ("llama", "pipeline_context", 3, 1, {**TURNS, "backend.module": "equinox"}),
    ],
)
def test_stages_equal_one_device(model, table, layers, accumulation, changes):
    asked = config(model, table, "jax", accumulation, **{"model.layers": layers, **changes})
    assert differences(run_jax(asked, ragged_batches()), reference(model, layers)) == []


@pytest.mark.parametrize(("model", "table", "accumulation"), [("llama", "pipeline_context", 1), ("gpt2", "pipeline", 2)])
def test_packed_rows_meet_their_own_documents_on_every_stage(model, table, accumulation):
    assert differences(run_jax(config(model, table, "jax", accumulation), PACKED), reference_packed(model)) == []


@pytest.mark.parametrize(
    ("model", "table", "changes"),
    [("limited", "pipeline_fsdp", {}), ("dropless", "fsdp_expert_tensor", {**STAGES, "mesh.expert": 2, "mesh.tensor": 2})],
)
def test_routers_of_every_stage_take_part_and_nothing_of_the_bubble_does(model, table, changes):
    outcome, reported = run_mixture(model, table, **changes)
    wanted, wanted_reported = reference_mixture(model)
    assert differences(outcome, wanted) == []
    for name, values in wanted_reported.items():
        assert np.allclose(reported[name], values, rtol=1e-5), name


def test_an_evaluation_passes_through_the_stages_too():
    job, session = opened("pipeline_fsdp")
    batch = local_batch(job, *ragged_batches()[0])
    before = session.evaluate(batch).result()
    assert before["loss_sum"] / before["valid_tokens"] == pytest.approx(reference("llama", 4).losses[0], rel=1e-6)
    session.close()


def opened(table, **changes):
    asked = experiment_from(config("llama", table, "jax", **{"model.layers": 4, **changes}))
    job = Job(asked, make_plan(asked, FOUND), 0, "127.0.0.1:0")
    session = open_session(job)
    workload = asked.workload
    session.prepare(local_batch(job, *ragged_batches(rows=workload.global_batch, sequence=workload.sequence)[0]))
    return job, session


def test_a_tick_sends_what_lies_between_stages_once_forward_and_once_back_and_nothing_else_over_the_pipeline():
    """Devices are (pipeline 2, data 4); a microbatch has 16 rows / 4 / 4 = 1 row of 16 tokens of 32 elements on a device."""
    assert ROWS == 16
    job, session = opened("pipeline")
    text = session._compiled.as_text()
    session.close()
    found = re.findall(r" = (\S+?)(?:\{[\d,]*\})? collective-permute\(.*source_target_pairs=(\S+),", text)
    forward = "{{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}"
    assert found == [("f32[1,1,16,32]", forward)] * 2
    assert job.plan.pipeline.microbatches == 4
    assert not re.search(r"all-to-all", text)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 3), (4, 16)])
def test_by_turns_a_microbatch_comes_back_the_way_it_went_and_its_input_is_still_kept(stages, microbatches):
    there, back = {}, {}
    schedule = by_turns.ticks(stages, microbatches)
    for number, forward, backward in zip(
        schedule.number, zip(*schedule.forward, strict=True), zip(*schedule.backward, strict=True), strict=True
    ):
        for visits, (row, _, working) in ((there, forward), (back, backward)):
            visits |= {(int(row[stage]), int(stage)): int(number) for stage in np.flatnonzero(working)}
    assert there.keys() == back.keys() == {(m, s) for m in range(microbatches) for s in range(stages)}
    for (microbatch, stage), tick in there.items():
        assert tick == microbatch + stage
        assert back[microbatch, stage] - tick == 2 * (stages - 1 - stage) < 2 * stages - 1


def test_by_turns_the_temporaries_of_a_step_do_not_grow_with_its_microbatches():
    """Of one row each; with all forward passes first, every microbatch more costs what its layers save."""

    def temporaries(microbatches, **changes):
        keys = {
            "workload.global_batch": 4 * microbatches,
            "workload.pipeline.microbatches": microbatches,
            "workload.sequence": 64,
        }
        _, session = opened("pipeline", **keys, **changes)
        held = session.bytes_per_device()["temporaries"]
        session.close()
        return held

    grown = temporaries(16) - temporaries(4)
    grown_by_turns = temporaries(16, **TURNS) - temporaries(4, **TURNS)
    rows = 12 * 64 * 32 * 4  # bytes of the residual stream of 12 rows more
    assert grown > 40 * rows
    assert grown_by_turns < 10 * rows


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 1, 4), (4, 1, 3), (2, 2, 4), (4, 3, 8)])
def test_every_microbatch_meets_every_chunk_in_order_and_none_twice_at_once(stages, chunks, microbatches):
    split = PipelineSplit(("pipeline",), stages, chunks, microbatches, "interleaved", stages * chunks, True)
    turns, leaves = ticks(split)
    assert len(turns.working) == microbatches * chunks + stages - 1
    met = {m: [] for m in range(microbatches)}
    for tick, (row, chunk, working) in enumerate(zip(*turns, strict=True)):
        for stage in np.flatnonzero(working):
            met[row[stage]].append((tick, int(chunk[stage]) * stages + int(stage)))
    for microbatch, visits in met.items():
        assert [chunk for _, chunk in visits] == list(range(stages * chunks))  # in the model's order, every chunk once
        first = visits[0][0]
        assert [tick for tick, _ in visits] == list(range(first, first + stages * chunks))  # from place to place without a wait
        assert leaves[microbatch] == visits[-1][0]
    idle = 1 - turns.working.mean()
    assert idle == pytest.approx(split.bubble_share)
