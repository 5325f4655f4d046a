"""A new strategy over data, fsdp and tensor is a YAML file: tables that nobody shipped give the numbers of one device."""

import pytest
from cases import differences, ragged_batches
from test_parity import config, reference, run_jax

TABLES = {
    # 2 key-value heads, whole, under queries split over 4
    "keys and values whole": (
        "tensor",
        {
            "sharding.weights.kv_heads": [],
            "sharding.activations.kv_heads": [],
            "mesh.tensor": 4,
            "mesh.data": 2,
        },
    ),
    "attention repeated, mlp split, sequence split": (
        "tensor_sequence",
        {f"sharding.{column}.{row}": [] for column in ("weights", "activations") for row in ("vocab", "heads", "kv_heads")},
    ),
    "ZeRO-2 over the copies of an FSDP group": (
        "hsdp",
        {"sharding.gradients.embed": ["data", "fsdp"], "mesh.data": 2, "mesh.fsdp": 4},
    ),
    "two axes on one dim": (
        "fsdp_tensor",
        {
            "sharding.weights.embed": [],
            **{f"sharding.weights.{row}": ["fsdp", "tensor"] for row in ("heads", "mlp", "vocab")},
            **dict.fromkeys(("mesh.data", "mesh.fsdp", "mesh.tensor"), 2),
        },
    ),
    "ZeRO-1 under tensor parallelism": ("tensor", {"sharding.optimizer.embed": ["data"]}),
}


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("name", TABLES)
def test_jax_on_a_new_table_equals_one_device(name):
    table, changes = TABLES[name]
    assert differences(run_jax(config("llama", table, "jax", **changes), ragged_batches()), reference("llama")) == []


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("name", TABLES)
def test_torch_on_a_new_table_equals_one_device_in_jax(name, torch_pool):
    table, changes = TABLES[name]
    outcome = torch_pool(config("llama", table, "torch", **changes), ragged_batches())
    assert differences(outcome, reference("llama")) == []


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("table", ["fsdp_tensor_sequence", "context"])
def test_the_older_partitioner_gives_the_same_numbers(table):
    outcome = run_jax(config("llama", table, "jax", **{"backend.partitioner": "gspmd"}), ragged_batches())
    assert differences(outcome, reference("llama")) == []
