"""The split of the sequence: which token is stored where, in which order, and what does not split."""

import pytest
from experiments import FOUND, experiment

from scaling_lab.errors import PlanError
from scaling_lab.plan.plan import make_plan


def plan(**choices):
    return make_plan(experiment(**{"sharding": "context", **choices}), FOUND)


def test_a_zigzag_split_gives_each_device_an_early_and_a_late_chunk():
    """16 tokens over 4 devices are 8 chunks of 2: device 0 has chunks 0 and 7, device 1 chunks 1 and 6, and so on."""
    split = plan(**{"workload.sequence": 16, "mesh.context": 4, "mesh.fsdp": 2}).sequence
    assert split.positions == (0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9)
    assert (split.axes, split.parts, split.zigzag) == (("context",), 4, True)


def test_every_device_of_a_zigzag_split_has_the_same_number_of_visible_keys():
    split = plan(**{"workload.sequence": 64, "mesh.context": 4, "mesh.fsdp": 2}).sequence
    visible = [sum(position + 1 for position in split.positions[16 * part : 16 * (part + 1)]) for part in range(4)]
    assert visible == [64 * 65 // 2 // 4] * 4


@pytest.mark.parametrize(
    "changes", [{"workload.context.zigzag": False}, {"workload.context.strategy": "all_to_all", "model.kv_heads": 4}]
)
def test_a_plain_split_keeps_the_texts_order(changes):
    assert plan(**changes).sequence.positions == tuple(range(256))


def test_a_table_that_does_not_split_the_sequence_stores_it_in_order():
    split = plan(sharding="fsdp_tensor").sequence
    assert (split.axes, split.parts, split.zigzag) == ((), 1, False)
    assert split.positions == tuple(range(256))


def test_the_columns_of_the_devices_of_a_row_tile_it():
    planned = plan(**{"mesh.context": 4, "mesh.fsdp": 2})
    columns = [planned.sequence.columns(planned.mesh, device) for device in range(4)]
    assert columns == [slice(0, 64), slice(64, 128), slice(128, 192), slice(192, 256)]


def test_context_is_a_role_and_its_gradients_are_summed():
    rows = {"sharding.weights.embed": ["fsdp"]}
    planned = plan(**rows)
    assert planned.roles["context"] == ("context parallel",)
    assert all("context" in p.sum_axes for p in planned.parameters)
    assert plan().roles["context"] == ("fsdp",)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"workload.sequence": 250, "mesh.context": 4, "mesh.fsdp": 2}, "sequence 250 over 4"),
        (
            {"workload.sequence": 12, "mesh.context": 4, "mesh.fsdp": 2},
            "zigzag split needs a multiple of 8, twice the parts. Set workload.sequence=8 or 16, or workload.context.zigzag=false",
        ),
        (
            {"workload.context.strategy": "all_to_all", "mesh.context": 4, "mesh.fsdp": 2},
            "model.kv_heads=2 does not divide by 4. Set model.kv_heads=4 or workload.context.strategy=ring",
        ),
        ({"sharding.activations.residual_sequence": []}, "write residual_sequence: [context]"),
    ],
)
def test_what_does_not_split_is_refused_with_what_works(choices, words):
    with pytest.raises(PlanError) as caught:
        plan(**choices)
    assert words in str(caught.value)
