"""Context parallelism: every strategy, split and number of parts gives the numbers of one device, in both backends."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from cases import differences, ragged_batches
from experiments import FOUND
from test_parity import config, reference, run_jax

from scaling_lab.backends.jax import blocks, context
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

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


@pytest.mark.xdist_group("jax_llama")
@pytest.mark.parametrize("zigzag", [True, False])
def test_a_ring_keeps_no_scores_of_a_whole_part_in_jax(zigzag):
    """4,096 tokens over 2 devices, so parts of 2,048: the compiled gradient has scores of at most 128 queries at once."""
    keys = {"workload.sequence": 4096, "workload.global_batch": 4, "workload.context.zigzag": zigzag}
    experiment = experiment_from(case("llama", "ring of two", "jax", **keys))
    plan = make_plan(experiment, FOUND)
    on = Placement(mesh_of(plan, jax.devices()), plan, experiment.workload.precision)

    def total(query, key, value):
        return context.attend(query, key, value, form="fused", on=on).sum()

    shaped = [jax.ShapeDtypeStruct((4, 4096, heads, 8), jnp.float32) for heads in (4, 2, 2)]
    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(*shaped).compile().as_text()
    sizes = [[int(size) for size in shape.split(",")] for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert any(size[-2:] == [blocks.ROWS, 1024 if zigzag else 2048] for size in sizes), "no scores found"
    # one row a device, 4 heads: 128 queries x 2,048 keys at most, where a part has 2,048 queries
    assert max(math.prod(size) for size in sizes) <= 4 * 128 * 2048
