"""Context parallelism: every strategy, split and number of parts gives the numbers of one device, in both backends."""

import pytest
from cases import differences, ragged_batches
from test_parity import config, reference, run_jax

FOUR = {"mesh.context": 4, "mesh.fsdp": 2}
#: strategy, zigzag, mesh. One part in two, and in four: with more than two parts a ring visits more than one other device.
WAYS = {
    "gather": ("gather", True, FOUR),
    "gather in order": ("gather", False, {}),
    "ring": ("ring", True, FOUR),
    "ring of two": ("ring", True, {}),
    "ring in order": ("ring", False, FOUR),
    "all-to-all": ("all_to_all", True, {}),
}
TENSOR = {"mesh.fsdp": 2, "mesh.context": 2, "mesh.tensor": 2}


def case(model, way, backend, table="context", **more):
    strategy, zigzag, mesh = WAYS[way]
    keys = {"workload.context.strategy": strategy, "workload.context.zigzag": zigzag}
    return config(model, table, backend, **{**keys, **mesh, **more})


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("way", WAYS)
def test_jax_with_a_split_sequence_equals_one_device(way):
    assert differences(run_jax(case("llama", way, "jax"), ragged_batches()), reference("llama")) == []


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_torch_with_a_split_sequence_equals_one_device_in_jax(model, way, torch_pool):
    assert differences(torch_pool(case(model, way, "torch"), ragged_batches()), reference(model)) == []


#: Beside the ways: sequence parallelism on top, and key and value heads whole under query heads in parts.
TABLES = {
    "ring, tensor and sequence parallel": (
        "ring",
        {"sharding.activations.residual_sequence": ["context", "tensor"], **TENSOR},
    ),
    "ring, keys and values whole": (
        "ring",
        {"sharding.weights.kv_heads": [], "sharding.activations.kv_heads": [], **TENSOR},
    ),
    "all-to-all of the heads of each tensor part": ("all-to-all", {"model.kv_heads": 4, **TENSOR}),
}


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("name", TABLES)
def test_jax_with_tensor_and_context_equals_one_device(name):
    way, changes = TABLES[name]
    wanted = run_jax(config("llama", "single", "jax", **kv_heads(changes)), ragged_batches())
    found = run_jax(case("llama", way, "jax", "fsdp_tensor_context", **changes), ragged_batches())
    assert differences(found, wanted) == []


@pytest.mark.xdist_group("torch_parity")
@pytest.mark.parametrize("name", TABLES)
def test_torch_with_tensor_and_context_equals_one_device_in_jax(name, torch_pool):
    way, changes = TABLES[name]
    wanted = run_jax(config("llama", "single", "jax", **kv_heads(changes)), ragged_batches())
    outcome = torch_pool(case("llama", way, "torch", "fsdp_tensor_context", **changes), ragged_batches())
    assert differences(outcome, wanted) == []


def kv_heads(changes):
    return {key: value for key, value in changes.items() if key == "model.kv_heads"}
