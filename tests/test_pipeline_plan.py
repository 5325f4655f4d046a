"""The split of the layers into pipeline stages: which layers lie where, what is padding, the bubble, and what is refused."""

import pytest
from experiments import FOUND, experiment

from scaling_lab.errors import PlanError
from scaling_lab.models import decoder
from scaling_lab.plan.plan import make_plan

INTERLEAVED = {"workload.pipeline.schedule": "interleaved"}


def plan(**choices):
    return make_plan(experiment(**{"sharding": "pipeline", **choices}), FOUND)


def refusal(**choices):
    with pytest.raises(PlanError) as caught:
        plan(**choices)
    return str(caught.value)


def test_an_uneven_number_of_layers_gives_the_first_stages_one_more_and_the_others_padding():
    """10 layers over 4 stages: 3, 3, 2, 2, stored as 4 x 3."""
    split = plan(**{"mesh.pipeline": 4, "model.layers": 10}).pipeline
    assert [split.of_stage(stage) for stage in range(4)] == [(range(3),), (range(3, 6),), (range(6, 8),), (range(8, 10),)]
    assert split.slots == (0, 1, 2, 3, 4, 5, 6, 7, None, 8, 9, None)


def test_interleaved_stages_hold_every_second_chunk():
    """8 layers, 2 stages of 2 chunks: chunks 0-1, 2-3, 4-5, 6-7 on stages 0, 1, 0, 1."""
    split = plan(**{"mesh.pipeline": 2, "model.layers": 8, **INTERLEAVED}).pipeline
    assert split.of_stage(0) == (range(2), range(4, 6))
    assert split.slots == (0, 1, 4, 5, 2, 3, 6, 7)


def test_every_layer_lies_in_one_slot_whatever_the_numbers():
    for stages in (1, 2, 4, 8):
        for layers in range(2 * stages, 20):
            more = INTERLEAVED if stages > 1 else {}
            split = plan(**{"mesh.pipeline": stages, "model.layers": layers, "mesh.data": 8 // stages, **more}).pipeline
            assert sorted(slot for slot in split.slots if slot is not None) == list(range(layers))
            sizes = [len(chunk) for chunk in split.chunks]
            assert max(sizes) - min(sizes) <= 1
            assert split.room == max(sizes)


def test_the_bubble_is_what_the_stages_wait_for_the_first_and_the_last_microbatch():
    """4 stages and 4 microbatches: 3 / (4 + 3); with 2 chunks a stage 3 / (8 + 3)."""
    changes = {"mesh.pipeline": 4, "workload.pipeline.microbatches": 4, "model.layers": 8}
    assert plan(**changes).pipeline.bubble_share == 3 / 7
    assert plan(**changes, **INTERLEAVED).pipeline.bubble_share == 3 / 11


def test_the_usual_number_of_microbatches_is_the_most_stages_that_divide_the_rows():
    assert plan(**{"mesh.pipeline": 2, "mesh.data": 1}).pipeline.microbatches == 8  # 16 rows: 4 x 2
    assert plan(**{"mesh.pipeline": 2, "mesh.data": 4}).pipeline.microbatches == 4  # 4 rows: 2 x 2
    assert plan(**{"mesh.pipeline": 4, "mesh.data": 2}).pipeline.microbatches == 8


def test_padding_is_stored_but_counts_as_no_parameter():
    padded = plan(backend="jax", **{"model.layers": 5})
    assert padded.parameter_count == sum(p.size for p in decoder.parameters(experiment(**{"model.layers": 5}).model))
    up = next(p.parameter for p in padded.parameters if p.parameter.name == "layers.mlp.up")
    assert (up.shape[0], up.used_shape[0]) == (6, 5)


def test_embedding_and_head_live_on_the_first_and_the_last_stage_in_torch_and_everywhere_in_jax():
    def held(**choices):
        return {p.parameter.name: p.stages for p in plan(**{"mesh.pipeline": 4, **choices}).parameters}

    torch = held(backend="torch")
    assert (torch["embed.tokens"], torch["final_norm.scale"], torch["head.weight"]) == ((0,), (3,), (3,))
    assert torch["layers.mlp.up"] == (0, 1, 2, 3)
    tied = held(backend="torch", model="tiny_gpt2", **{"workload.sequence": 64})
    assert (tied["embed.tokens"], tied["embed.positions"]) == ((0, 3), (0,))
    assert set(held(backend="jax").values()) == {(0, 1, 2, 3)}


def test_bytes_are_those_of_the_stage_that_holds_most():
    """Two stages of 2 layers each; embedding and head have 256 x 128 elements, the final norm 128: the last stage in torch."""
    layers = sum(p.size for p in decoder.parameters(experiment().model) if p.stacked)
    outside = 256 * 128
    assert plan(backend="torch").bytes_per_device["parameters"] == 4 * (layers // 2 + outside + 128)
    assert plan(backend="jax").bytes_per_device["parameters"] == 4 * (layers // 2 + 2 * outside + 128)


def test_by_turns_a_stage_holds_as_many_microbatches_as_there_are_stages_from_it_to_the_last():
    changes = {"backend": "torch", "mesh.pipeline": 4, "workload.pipeline.microbatches": 8, "model.layers": 8}
    assert plan(**changes).pipeline.in_flight == (8, 8, 8, 8)
    by_turns = plan(**changes, **{"workload.pipeline.schedule": "1f1b"})
    assert by_turns.pipeline.in_flight == (4, 3, 2, 1)
    assert by_turns.bytes_per_device["activations"] < plan(**changes).bytes_per_device["activations"]


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"mesh.pipeline": 8},
            "model.layers=4 over mesh.pipeline=8: a stage would have no layer. Set mesh.pipeline=4 or model.layers=8",
        ),
        (
            {"mesh.pipeline": 4, **INTERLEAVED},
            "workload.pipeline.virtual_stages=2: a stage would have no layer. Set mesh.pipeline=2 or model.layers=8",
        ),
        (
            {"mesh.pipeline": 2, "workload.pipeline.microbatches": 3},
            "workload.pipeline.microbatches=3 does not divide the 4 rows of a device "
            "(workload.global_batch / workload.accumulation / what splits the batch). Set workload.pipeline.microbatches=2.",
        ),
        (
            {"mesh.pipeline": 2, "workload.global_batch": 12},
            "mesh.pipeline=2: the 3 rows of a device do not divide into 2 microbatches",
        ),
        (
            {"mesh.pipeline": 4, "mesh.data": 2, "model.layers": 8, "workload.pipeline.microbatches": 2, **INTERLEAVED},
            "groups of 4. Set workload.pipeline.microbatches=4.",
        ),
        ({"mesh.pipeline": 2, **INTERLEAVED, "workload.pipeline.virtual_stages": 1}, "Set workload.pipeline.virtual_stages=2."),
        ({"mesh.pipeline": 2, "workload.pipeline.virtual_stages": 2}, "Set workload.pipeline.virtual_stages=null or"),
        (
            {"mesh.pipeline": 2, "model": "tiny_moe", "model.moe.dense_layers": 1},
            "must all be of one kind. Set model.moe.dense_layers=0 or mesh.pipeline=1.",
        ),
    ],
)
def test_what_does_not_split_is_refused_alike_with_a_change_that_works(changes, words, backend):
    assert words in refusal(backend=backend, **changes)


TURNS = {"backend": "torch", "workload.pipeline.schedule": "1f1b"}


@pytest.mark.parametrize(
    ("asked", "words", "change"),
    [
        (
            {**TURNS, "mesh.pipeline": 4, "workload.pipeline.microbatches": 2},
            "workload.pipeline.microbatches=2 with mesh.pipeline=4: by turns 4 stages need a microbatch each. "
            "Set workload.pipeline.microbatches=4.",
            {"workload.pipeline.microbatches": 4},
        ),
        (  # 2 rows a device
            {**TURNS, "mesh.pipeline": 4, "workload.pipeline.microbatches": 2, "workload.global_batch": 4},
            "Set workload.pipeline.microbatches=null workload.global_batch=8.",
            {"workload.pipeline.microbatches": None, "workload.global_batch": 8},
        ),
        (  # 6 rows a device: 6 microbatches are more than the 4 stages
            {**TURNS, "mesh.pipeline": 4, "workload.global_batch": 12},
            "Set workload.global_batch=16, or workload.pipeline.microbatches=6.",
            {"workload.pipeline.microbatches": 6},
        ),
        (  # but not in groups of 4
            {"backend": "torch", "mesh.pipeline": 4, "model.layers": 8, "workload.global_batch": 12, **INTERLEAVED},
            "Set workload.global_batch=16.",
            {"workload.global_batch": 16},
        ),
        (
            {"backend": "torch", "mesh.pipeline": 2, "backend.data_parallel": "ddp"},
            "backend.data_parallel=ddp with mesh.pipeline=2: it sums the gradients of a whole model, a process has a stage of it. "
            "Set backend.data_parallel=buckets or mesh.pipeline=1.",
            {"backend.data_parallel": "buckets"},
        ),
    ],
)
def test_what_torch_cannot_run_is_refused_with_a_change_that_works(asked, words, change):
    assert words in refusal(**asked)
    plan(**{**asked, **change})


def test_a_torch_stage_over_fsdp_holds_its_layers_whole_and_the_sum_of_whole_gradients():
    """Of its bytes, a quarter is stored on each of 4 devices; whole are what is gathered, and the gradients until they are reduced."""
    layers = sum(p.size for p in decoder.parameters(experiment().model) if p.stacked)
    last = 4 * (layers // 2 + 256 * 128 + 128)
    needed = plan(sharding="pipeline_fsdp", backend="torch").bytes_per_device
    assert (needed["parameters"], needed["gathered"], needed["gradients"]) == (last // 4, last, last + last // 4)
    one_program = plan(sharding="pipeline_fsdp", backend="jax").bytes_per_device
    assert one_program["gradients"] == one_program["parameters"]


def test_by_turns_with_routers_is_refused_in_jax_alone():
    changes = {"workload.pipeline.schedule": "1f1b", "model": "tiny_moe"}
    assert "Set workload.pipeline.schedule=gpipe or backend=torch." in refusal(backend="jax", **changes)
    assert plan(backend="torch", **changes).pipeline.schedule == "1f1b"


def test_by_turns_in_one_program_waits_twice_as_long_and_holds_what_does_not_grow_with_the_microbatches():
    """4 stages: ticks of 3 on the way there and 3 on the way back."""
    changes = {"backend": "jax", "mesh.pipeline": 4, "mesh.data": 1, "workload.pipeline.schedule": "1f1b"}
    splits = [plan(**changes, **{"workload.pipeline.microbatches": n}) for n in (4, 16)]
    assert [one.pipeline.bubble_share for one in splits] == [6 / 10, 6 / 22]
    assert [one.pipeline.in_flight for one in splits] == [(1, 1, 1, 1)] * 2
    few, many = (one.bytes_per_device["activations"] for one in splits)
    assert many < few  # smaller microbatches, no more of them


def test_an_axis_of_stages_does_nothing_else():
    message = refusal(
        **{"sharding.activations.batch": ["pipeline", "data"], "sharding.activations.expert_batch": ["pipeline", "data"]}
    )
    assert (
        "sharding.weights.layers names pipeline, which makes pipeline stages of it; take it out of sharding.activations.batch"
        in message
    )
    assert "sharding.optimizer.layers drops pipeline" in refusal(**{"sharding.optimizer.layers": []})


def test_two_axes_larger_than_one_do_not_make_stages_together():
    changes = {"sharding.weights.layers": ["pipeline", "fsdp"], "mesh.pipeline": 2, "mesh.fsdp": 2}
    assert "one axis larger than 1 makes the stages. Set mesh.fsdp=1." in refusal(**changes)


def test_without_stages_the_keys_of_pipelines_change_nothing():
    assert plan(**{"mesh.pipeline": 1, "workload.pipeline.microbatches": 3}).pipeline.microbatches == 1
