"""Mixtures of experts, latent attention and query-key norms in JAX: no layout changes their numbers; what a step exchanges.

The equations themselves: `test_moe_jax_equations`.
"""

import functools
import re

import numpy as np
import pytest
from cases import Outcome, choices, differences, ragged_batches
from experiments import FOUND, experiment

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("jax_llama")

#: Losses that count: with the usual coefficients a mistake in their gradients might hide in the tolerance.
MIXTURE = {"model.moe.expert_mlp": 24, "model.moe.balance_loss": 0.1, "model.moe.z_loss": 0.1}
LATENT = {"query_rank": 12, "kv_rank": 16, "rope_dim": 4, "nope_dim": 8, "value_dim": 6}
LIMITED = {"model.moe.capacity_factor": 0.75}
#: What is different from `tiny_moe`, or from `tiny` where it says so.
MODELS = {
    "dropless": {},
    "limited": LIMITED,
    "everything": {
        **LIMITED,
        "model.layers": 3,
        "model.moe.dense_layers": 1,
        "model.moe.shared_experts": 1,
        "model.moe.routing": "topk_softmax",
        "model.moe.routed_scale": 2.5,
        "model.qk_norm": True,
    },
    "latent": {"model": "tiny", "model.latent": LATENT, "model.kv_heads": 4, "model.head_dim": 12},
}


def asked(model, table="single", accumulation=1, **more):
    keys = choices("llama", table, "jax", accumulation, mesh="auto")
    mixture = {} if MODELS[model].get("model") == "tiny" else {"model": "tiny_moe", **MIXTURE}
    return experiment(**{**keys, **mixture, **MODELS[model], **more})


def opened(model, table="single", accumulation=1, **more):
    wanted = asked(model, table, accumulation, **more)
    job = Job(wanted, make_plan(wanted, FOUND), 0, "127.0.0.1:0")
    return open_session(job), job


def run(model, table="single", accumulation=1, **more):
    """What a case computed, and what its routers reported in each step."""
    session, job = opened(model, table, accumulation, **more)
    local = [local_batch(job, *batch) for batch in ragged_batches()]
    session.keep_gradients = True
    session.prepare(local[0])
    _, gradients = session.gradients(local[0])
    metrics = [session.step(batch).result() for batch in local]
    assert session.compilations() == 1
    assert session.layouts() == {p.parameter.name: p.weights for p in job.plan.parameters}
    losses, norms = ([m[name] for m in metrics] for name in ("loss", "grad_norm"))
    reported = {name: [m[name] for m in metrics] for name in ("balance_loss", "z_loss", "dropped_tokens") if name in metrics[0]}
    return Outcome(losses, norms, dict(gradients), dict(session.weights())), reported


reference = functools.cache(run)

LAYOUTS = [
    ("dropless", "data", 2, {}),
    ("dropless", "fsdp", 1, {}),
    ("dropless", "expert", 1, {"mesh.expert": 4, "mesh.data": 2}),
    ("dropless", "fsdp_expert", 2, {}),
    ("dropless", "fsdp_expert_tensor", 1, {}),
    ("dropless", "tensor", 1, {}),
    ("dropless", "fsdp_tensor_sequence", 2, {}),
    ("dropless", "fsdp_expert", 1, {"backend.partitioner": "gspmd"}),
    ("dropless", "fsdp_expert", 1, {"sharding.weights.embed": [], "sharding.weights.mlp": ["fsdp"]}),
    ("limited", "data", 2, {}),
    ("limited", "expert", 2, {"mesh.expert": 4, "mesh.data": 2}),
    ("limited", "fsdp_expert", 1, {}),
    ("limited", "context", 1, {}),
    ("everything", "fsdp_expert", 2, {}),
    ("everything", "fsdp_expert_tensor", 1, {"backend.scan_layers": False}),
    ("everything", "single", 1, {"workload.remat": "dots"}),
    ("everything", "fsdp_expert_tensor", 1, {"workload.remat": "full"}),
    ("latent", "tensor", 2, {}),
    ("latent", "fsdp_tensor_context", 1, {"workload.context.strategy": "ring"}),
    ("latent", "single", 1, {"backend.attention": "plain"}),
]


@pytest.mark.parametrize(("model", "table", "accumulation", "more"), LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_device(model, table, accumulation, more):
    (found, reported), (wanted, expected) = run(model, table, accumulation, **more), reference(model)
    assert differences(found, wanted) == []
    assert reported.keys() == expected.keys()
    assert reported.get("dropped_tokens") == expected.get("dropped_tokens")
    for name in reported:
        assert reported[name] == pytest.approx(expected[name], rel=1e-5)


def test_room_is_dropped_from_where_it_is_short_and_only_there():
    assert all(dropped > 0 for dropped in reference("limited")[1]["dropped_tokens"])
    assert reference("dropless")[1]["dropped_tokens"] == [0.0] * 3


def test_the_reported_loss_is_the_cross_entropy_alone():
    """Of the first step: it does not depend on coefficients, the gradient does."""
    without = {"model.moe.balance_loss": 0.0, "model.moe.z_loss": 0.0}
    (found, reported), (wanted, expected) = run("dropless", **without), reference("dropless")
    assert found.losses[0] == wanted.losses[0]
    assert reported["balance_loss"][0] == expected["balance_loss"][0]
    assert abs(found.grad_norms[0] - wanted.grad_norms[0]) > 1e-4 * wanted.grad_norms[0]


def test_routers_learn_from_a_batch_without_a_valid_label():
    session, job = opened("dropless", "fsdp_expert", 2)
    tokens, labels = ragged_batches()[0]
    _, gradients = session.gradients(local_batch(job, tokens, np.full_like(labels, -1)))
    assert np.abs(gradients["layers.moe.router"]).max() > 1e-3
    assert not gradients["layers.moe.down"][-1].any(), "no router comes after the last layer's experts"
    assert not gradients["head.weight"].any()


def test_evaluation_sums_the_cross_entropy_alone():
    session, job = opened("dropless")
    batch = local_batch(job, *ragged_batches()[0])
    session.prepare(batch)
    sums = session.evaluate(batch).result()
    assert sums.keys() == {"loss_sum", "valid_tokens"}
    assert sums["loss_sum"] / sums["valid_tokens"] == pytest.approx(reference("dropless")[0].losses[0], rel=1e-6)


def test_bfloat16_products_leave_the_router_in_float32():
    session, job = opened("everything", "fsdp_expert", **{"workload.precision.compute": "bfloat16"})
    batch = local_batch(job, *ragged_batches()[0])
    session.prepare(batch)
    assert session.step(batch).result()["loss"] == pytest.approx(reference("everything")[0].losses[0], rel=0.03)
    text = session._jitted().lower(session._weights, session._state, session._placed(batch), np.float32(0)).as_text()
    products = "\n".join(line.partition("->")[2] for line in text.splitlines() if "dot_general" in line)
    assert "tensor<16x16x4xf32>" in products  # logits of 16 rows of 16 tokens for 4 experts
    assert "tensor<16x16x4xbf16>" not in products


@functools.cache
def collectives(model):
    """The instructions of the compiled step that exchange something, on 2 devices for the experts and 4 for the rest."""
    session, job = opened(model, "fsdp_expert")
    session.prepare(local_batch(job, *ragged_batches()[0]))
    lines = session._compiled.as_text().splitlines()
    return [line for line in lines if re.search(r" = .* (all-[\w-]+|reduce-scatter|collective-permute)\(", line)]


def test_limited_experts_exchange_rows_all_to_all_and_gather_no_tokens():
    lines = collectives("limited")
    # 2 rows of 16 tokens a device, room 6: of each of 4 experts 12 rows of 32, half of the experts being the other device's
    rows = [line for line in lines if "all-to-all(" in line and "f32[2,12,32]" in line]
    assert len(rows) == 4  # there and back, in both passes
    assert not [line for line in lines if "all-gather(" in line and "shard_map" in line]


def test_dropless_experts_gather_tokens_over_their_own_axis_alone():
    lines = collectives("dropless")
    # of 2 devices with 2 rows of 16 tokens: forward, again for the backward pass, and their gradients
    assert len([line for line in lines if "f32[64,32]{1,0} all-gather(" in line and "shard_map" in line]) == 3
    assert len([line for line in lines if "f32[32,32]{1,0} reduce-scatter(" in line]) == 2


@pytest.mark.parametrize("model", ["limited", "dropless"])
def test_gradients_of_experts_are_scattered_and_choices_stay_on_their_device(model):
    lines = collectives(model)
    # of 2 experts a device, embed 32 over fsdp 4, width 24: up, gate and down
    assert len([line for line in lines if re.search(r"f32\[2,(24,8|8,24)\]\S* reduce-scatter\(", line)]) == 3
    assert not [line for line in lines if "top_k" in line]
