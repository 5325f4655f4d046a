"""One model in two module libraries: flax NNX and Equinox hold the same weights, ask for the same program, give the same bits."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import test_moe_jax
import test_packing
from cases import choices, ragged_batches
from experiments import FOUND, experiment

from scaling_lab.backends.jax import optimizer, sharding
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.backends.jax.train import train_step
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("jax_llama")

UNROLLED, KEPT, AGAIN = {"backend.scan_layers": False}, {"workload.remat": "dots"}, {"workload.remat": "full"}
#: Model, table and keys that are compared to the last bit.
RUN = [
    ("llama", "single", {}),
    ("llama", "fsdp_tensor_sequence", {**UNROLLED, **KEPT}),
    ("llama packed", "single", AGAIN),
    ("gpt2", "fsdp_tensor", {"workload.loss_chunks": 2, "workload.accumulation": 2}),
    ("dropless", "fsdp_expert", {}),
    ("everything", "single", UNROLLED),
    ("latent", "tensor", {}),
]
#: More of which only the programs are compared, before anything is compiled.
LOWERED = [
    ("llama", "fsdp_tensor_context", {}),
    ("llama", "pipeline_fsdp", KEPT),
    ("llama", "pipeline_fsdp", {"workload.pipeline.schedule": "1f1b"}),
    ("llama packed", "context", UNROLLED),
    ("gpt2", "single", {**UNROLLED, **AGAIN}),
    ("gpt2", "zero2", KEPT),
    ("everything", "fsdp_expert_tensor", AGAIN),
    ("latent", "single", {**UNROLLED, **KEPT}),
]


def lowered(module: str, model: str, table: str, more: dict[str, Any]) -> tuple[jax.stages.Lowered, tuple[Any, ...]]:
    """A step that gives its gradients too, and what it takes."""
    keys = {**more, "backend.module": module}
    if model in test_moe_jax.MODELS:
        wanted = test_moe_jax.asked(model, table, **keys)
    else:
        wanted = experiment(**choices(model.removesuffix(" packed"), table, "jax", **keys))
    plan = make_plan(wanted, FOUND)
    on = Placement(mesh_of(plan, jax.devices()[: plan.mesh.devices]), plan, wanted.workload.precision)
    transform = optimizer.transformation(wanted.workload.optimizer, on)
    step = train_step(wanted, on, transform, keep_gradients=True)
    batch = test_packing.BATCHES[0] if model.endswith("packed") else ragged_batches()[0]
    parts = (rows.reshape(plan.batch.accumulation, -1, rows.shape[1]) for rows in batch)
    placed = {name: jax.device_put(x, on.batch) for name, x in zip(("tokens", "labels", "documents"), parts, strict=False)}
    weights = sharding.place_initial(on, wanted.workload.seed)
    given = (weights, optimizer.initial_state(*optimizer.state_shardings(transform, on)), placed, np.float32(0.1))
    return jax.jit(step).lower(*given), given


def operations(text: str) -> Counter[tuple[str, ...]]:
    """How often a program has each operation on tensors of these types, in whatever order."""
    lines = re.findall(r" (?:= |return)[\"\s]*(\w+\.\w+|call)?(.*)", text)
    return Counter((name, *sorted(re.findall(r"tensor<[^>]*>", rest))) for name, rest in lines)


@pytest.mark.parametrize(("model", "table", "more"), RUN)
def test_equinox_gives_the_bits_of_flax(model, table, more):
    """Of loss and other metrics, of updated weights and of gradients."""
    outcomes = []
    for module in ("flax", "equinox"):
        program, given = lowered(module, model, table, more)
        outcomes.append(jax.device_get(program.compile()(*given)))
    ((_, _, metrics, gradients), _) = outcomes
    assert metrics["loss"] > 0
    assert all(np.any(gradients[name]) for name in gradients if not name.endswith("bias"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), *outcomes)


@pytest.mark.parametrize(("model", "table", "more"), LOWERED)
def test_equinox_asks_for_the_operations_of_flax(model, table, more):
    """All of them as often: the order of a scanned layer's weights is all that may differ."""
    in_flax, in_equinox = (operations(lowered(module, model, table, more)[0].as_text()) for module in ("flax", "equinox"))
    assert in_flax.total() > 500
    assert in_flax == in_equinox
