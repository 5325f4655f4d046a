"""The equations of mixtures and latent attention in JAX: written out another way, by hand, and by Hugging Face."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import ROWS, SEQUENCE
from experiments import FOUND, experiment
from test_huggingface_logits import compare, randomised
from test_moe_jax import asked
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from scaling_lab.backends.initial import initial_values
from scaling_lab.backends.jax import flax_modules, moe, transformer
from scaling_lab.backends.jax.runtime import mesh_of
from scaling_lab.backends.jax.sharding import Placement
from scaling_lab.models import decoder
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("jax_llama")

ROUTINGS = ("softmax_topk", "softmax_topk_normalised", "topk_softmax")


@pytest.mark.parametrize(
    ("routing", "capacity", "activation"),
    [
        *((routing, None, "swiglu") for routing in ROUTINGS),
        *((routing, 0.75, "swiglu") for routing in ROUTINGS),
        ("softmax_topk", 0.75, "gelu"),
    ],
)
def test_a_mixture_equals_all_experts_on_all_tokens_in_both_passes(routing, capacity, activation):
    keys = {"model.moe.routing": routing, "model.moe.capacity_factor": capacity, "model.activation": activation}
    more = {"model.moe.experts": 6, "model.moe.experts_per_token": 3, "model.moe.shared_experts": 2}
    wanted = asked("dropless", **keys, **more, **{"model.moe.routed_scale": 1.5, "model.init_std": 0.5})
    weights = layer_weights(wanted)
    x = jax.random.normal(jax.random.key(0), (ROWS, SEQUENCE, 32))

    def with_losses(compute):
        def scalar(weights, x):
            y, reported = compute(wanted.model.moe, weights, x)
            mark = jnp.cos(jnp.arange(y.size)).reshape(y.shape)
            return (y * mark).sum() + (reported["balance_loss"] + reported["z_loss"]).sum(), (y, reported)

        return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))(weights, x)

    (_, (y, reported)), gradients = with_losses(module(wanted))
    (_, (y_wanted, expected)), gradients_wanted = with_losses(written_out)
    np.testing.assert_allclose(y, y_wanted, rtol=0, atol=2e-5 * float(jnp.abs(y_wanted).max()))
    assert reported["dropped_tokens"].tolist() == expected["dropped_tokens"].tolist()
    assert (sum(reported["dropped_tokens"].tolist()) > 0) == (capacity is not None)
    for name in ("balance_loss", "z_loss"):
        np.testing.assert_allclose(reported[name], expected[name], rtol=1e-5)
    for found, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_wanted), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=2e-5 * float(jnp.abs(right).max()))


def test_of_equal_experts_the_lower_index_wins():
    wanted = asked("dropless")
    on = placement(wanted)
    logits = jnp.asarray([[[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [2.0, 1.0, 2.0, 5.0]]])
    assert moe.best(logits, 2, on).tolist() == [[[1, 2], [0, 1], [3, 0]]]


def test_the_balance_loss_is_one_where_experts_share_alike_and_their_number_where_one_takes_all():
    wanted = asked("dropless", **{"model.moe.experts_per_token": 1}).model.moe
    logits = 100.0 * jnp.eye(4)[None]  # each of 4 tokens is sure of another expert
    assert moe.balance_loss(wanted, logits, jnp.arange(4)[None, :, None]).tolist() == [1.0]
    one = jnp.tile(100.0 * jnp.eye(4)[0], (1, 4, 1))
    assert moe.balance_loss(wanted, one, jnp.zeros((1, 4, 1), jnp.int32)).tolist() == [4.0]


def test_the_z_loss_is_the_mean_square_of_the_logarithm():
    # log(4 x e^0) = 1.3863 and log(4 x e^1) = 2.3863: (1.9218 + 5.6944) / 2
    assert moe.z_loss(jnp.asarray([[[0.0] * 4, [1.0] * 4]])).tolist() == pytest.approx([3.8081], abs=1e-4)


def test_room_is_a_share_of_the_sequence_rounded_up():
    # 0.75 x 16 tokens x 2 / 4 experts = 6; x 15 / 16: 5.625
    limited = asked("limited").model.moe
    assert (moe.room(limited, 16), moe.room(limited, 15), moe.room(asked("dropless").model.moe, 16)) == (6, 6, None)


def test_an_expert_takes_the_first_that_come_and_a_tokens_better_choices_first():
    on = placement(asked("limited", **{"workload.sequence": 3}))
    chosen = jnp.asarray([[[0, 1], [1, 0], [0, 1]]])
    kept, dropped = moe.with_room(chosen, 4, 2, on)
    assert (kept.tolist(), dropped.tolist()) == ([[[0, 1], [1, 0], [4, 4]]], [2])


def placement(wanted):
    plan = make_plan(wanted, FOUND)
    return Placement(mesh_of(plan, jax.devices()[:1]), plan, wanted.workload.precision)


def layer_weights(wanted):
    """Of the first layer's mixture, by parameter."""
    described = placement(wanted).described
    return {
        name: jnp.asarray(initial_values(p, 0, tuple(slice(0, n) for n in p.shape))[0])
        for name, p in described.items()
        if name.startswith("layers.moe.")
    }


def module(wanted):
    """`moe.Moe` as a function of its weights."""
    filled = flax_modules.filled(flax_modules.Moe(wanted, placement(wanted), "layers.moe."), layer_weights(wanted))
    return lambda _, weights, x: filled(weights)(x)


def written_out(sizes, weights, x):
    """The formulas of `models.moe`, all experts computing all tokens."""
    w = {name.removeprefix("layers.moe."): value for name, value in weights.items()}
    k, num = sizes.experts_per_token, sizes.experts
    logits = x @ w["router"]
    probabilities = jax.nn.softmax(logits, axis=-1)
    order = jnp.argsort(-logits, axis=-1, stable=True)[..., :k]
    chosen = jax.nn.one_hot(order, num)  # (b, t, k, n)
    weight = (chosen * probabilities[:, :, None]).sum(-1)
    if sizes.routing != "softmax_topk":
        weight = weight / weight.sum(-1, keepdims=True)
    kept = (
        np.ones(order.shape, bool)
        if sizes.capacity_factor is None
        else jax.pure_callback(functools.partial(_kept, sizes), jax.ShapeDtypeStruct(order.shape, bool), order)
    )

    def mlp(prefix):
        up = jnp.einsum("bte,...ef->bt...f", x, w[f"{prefix}up"])
        gate = jnp.einsum("bte,...ef->bt...f", x, w[f"{prefix}gate"]) if f"{prefix}gate" in w else None
        hidden = jax.nn.gelu(up) if gate is None else up * jax.nn.silu(gate)
        return jnp.einsum("bt...f,...fe->bt...e", hidden, w[f"{prefix}down"])

    y = jnp.einsum("btkn,btk,btne->bte", chosen, jnp.where(kept, weight, 0.0), mlp("")) * sizes.routed_scale
    share = chosen.sum((1, 2)) / (k * x.shape[1])
    reported = {
        "balance_loss": num * (share * probabilities.mean(1)).sum(-1),
        "z_loss": (jax.nn.logsumexp(logits, axis=-1) ** 2).mean(1),
        "dropped_tokens": (~kept).sum((1, 2)) if sizes.capacity_factor else jnp.zeros(len(x), int),
    }
    return y + mlp("shared_"), reported


def _kept(sizes, order):
    order = np.asarray(order)
    kept, most = np.ones(order.shape, bool), -(-sizes.capacity_factor * order.shape[1] * order.shape[2] // sizes.experts)
    for row in range(len(order)):
        taken = [0] * sizes.experts
        for token in range(order.shape[1]):
            for rank, expert in enumerate(order[row, token]):
                kept[row, token, rank] = taken[expert] < most
                taken[expert] += 1
    return kept


MIXTURES = {
    "Mixtral": ({}, MixtralConfig, MixtralForCausalLM),
    "Mixtral, top k first": ({"moe.routing": "topk_softmax", "moe.experts": 6}, MixtralConfig, MixtralForCausalLM),
    "Qwen3": ({"qk_norm": True}, Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "Qwen3, not normalised, a dense layer": (
        {"qk_norm": True, "moe.routing": "softmax_topk", "moe.dense_layers": 1, "moe.experts_per_token": 3},
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_equal_those_of_the_mixture(name):
    changes, config_class, model_class = MIXTURES[name]

    def eager(config):
        theirs = model_class(config)
        theirs.set_experts_implementation("eager")
        return theirs

    compare("jax", "tiny_moe", changes, 24, config_class, eager)


@pytest.mark.parametrize("query_rank", [None, 24])
def test_logits_equal_deepseek_v3_with_latent_attention(query_rank):
    latent = {"query_rank": query_rank, "kv_rank": 16, "rope_dim": 8, "nope_dim": 12, "value_dim": 10}
    keys = {"model.latent": latent, "model.kv_heads": 4, "model.head_dim": 20, "model.norm_eps": 1e-6}
    wanted = experiment(sharding="single", backend="jax", **keys)
    theirs = randomised(DeepseekV3ForCausalLM(deepseek_config(wanted.model)))
    weights = from_deepseek(wanted.model, {name: tensor.numpy() for name, tensor in theirs.state_dict().items()})
    tokens = np.random.default_rng(0).integers(0, wanted.model.vocab, (2, 24), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(transformer.logits(wanted, weights, tokens), expected, rtol=0, atol=1e-4)


def deepseek_config(model):
    """All layers dense; pairs turned as ours are."""
    return DeepseekV3Config(
        vocab_size=model.vocab,
        hidden_size=model.embed,
        intermediate_size=model.mlp,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        q_lora_rank=model.latent.query_rank,
        kv_lora_rank=model.latent.kv_rank,
        qk_rope_head_dim=model.latent.rope_dim,
        qk_nope_head_dim=model.latent.nope_dim,
        v_head_dim=model.latent.value_dim,
        first_k_dense_replace=model.layers,
        rms_norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_interleave=False,
        attn_implementation="eager",
    )


def from_deepseek(model, state):
    attention = {
        "query": "q_proj",
        "query_down": "q_a_proj",
        "query_down_norm": "q_a_layernorm",
        "query_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_down_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "output": "o_proj",
    }
    theirs = {
        **{f"attention.{ours}": f"self_attn.{name}" for ours, name in attention.items()},
        **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        "attention_norm.scale": "input_layernorm",
        "mlp_norm.scale": "post_attention_layernorm",
        "embed.tokens": "model.embed_tokens",
        "final_norm.scale": "model.norm",
        "head.weight": "lm_head",
    }

    def whole(parameter):
        name = theirs[parameter.name.removeprefix("layers.")]
        names = [f"model.layers.{i}.{name}.weight" for i in range(model.layers)] if parameter.stacked else [f"{name}.weight"]
        turned = parameter.name != "embed.tokens"
        return np.stack([state[n].T if turned else state[n] for n in names]).reshape(parameter.shape)

    return {parameter.name: whole(parameter) for parameter in decoder.parameters(model)}
